"""What things cost. `python -m scripts.bench NAME` measures in turns (`in_turns.py`) and writes docs/evidence/performance.md."""
