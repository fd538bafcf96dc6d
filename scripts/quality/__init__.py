"""Study of tuned presets: a preset tuned once at the base against `sp` tuned anew at every size."""
