"""The rate of fine-tuning at two widths, in full and by adapters: `python -m scripts.studies.finetuning`, and its page."""
