"""What becomes of runs in a world that is unwell, each a resumable command: `python -m scripts.campaigns.NAME`, table in docs/."""
