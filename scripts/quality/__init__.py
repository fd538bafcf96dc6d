"""Does a tuned preset win, or only transfer? Large models under `mup`, tuned at the base, against `sp` tuned anew at every size."""
