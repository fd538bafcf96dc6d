"""`--restart N`: a supervisor that starts a run again after a crash."""
