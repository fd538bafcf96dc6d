"""Recipes: functions that return the complete config of a run.

`mupax train RECIPE` runs one, and a flag changes the field of its name. The docstring says what is
trained, what it costs and what to expect. Its first line is printed by `mupax train --help`, the
rest by `mupax train RECIPE --help`. A new recipe is a function in a file of this folder and a line
in `RECIPES`.
"""

from __future__ import annotations

from mupax.mappings import LazyRegistry
from mupax.train.config.run import Config


def _import_laptop():
    from mupax.train.config.recipes import laptop

    return laptop


def _import_papers():
    from mupax.train.config.recipes import papers

    return papers


def _import_pods():
    from mupax.train.config.recipes import pods

    return pods


RECIPES: LazyRegistry[[], Config] = LazyRegistry(
    {
        "lm-laptop": lambda: _import_laptop().lm_laptop,
        "lm-tiny": lambda: _import_laptop().lm_tiny,
        "vit-digits": lambda: _import_laptop().vit_digits,
        "vit-endless": lambda: _import_laptop().vit_endless,
        "vit-fashion": lambda: _import_laptop().vit_fashion,
        "ed-tiny": lambda: _import_laptop().ed_tiny,
        "bordelon-vit": lambda: _import_papers().bordelon_vit,
        "bordelon-lm": lambda: _import_papers().bordelon_lm,
        "vit-s16-imagenet": lambda: _import_pods().vit_s16_imagenet,
        "vit-b16-imagenet": lambda: _import_pods().vit_b16_imagenet,
        "gpt2-c4": lambda: _import_pods().gpt2_c4,
        "vit-h14": lambda: _import_pods().vit_h14,
        "lm-1b": lambda: _import_pods().lm_1b,
        "lm-8b": lambda: _import_pods().lm_8b,
        "lm-30b-a3b": lambda: _import_pods().lm_30b_a3b,
        "bart-large-c4": lambda: _import_pods().bart_large_c4,
        "r2c2-c4": lambda: _import_pods().r2c2_c4,
    }
)
"""Name of a recipe, which is the first word after `mupax train`, to its function."""
