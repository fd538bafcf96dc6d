"""Loss and best learning rate of a run before it is run: a law fitted to a study's rows, and what it says with intervals."""
