"""`--restart N`: a process that starts a run again after a crash (`supervisor.py`), and what the run tells it (`memory.py`)."""
