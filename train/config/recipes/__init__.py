"""Runs as functions: a recipe returns a complete config. Its docstring says what it is, what it costs, what to expect.

`mupax train RECIPE` runs one; any field can be changed by a flag of its name. A recipe of your own is a function in a
file here and a line in `RECIPES`.
"""

from __future__ import annotations

from collections.abc import Callable

from mupax.table import LazyRegistry
from mupax.train.config.run import Config

RECIPES: LazyRegistry[Callable[[], Config]] = LazyRegistry(
    __name__,
    {
        "lm-laptop": "laptop:lm_laptop",
        "lm-tiny": "laptop:lm_tiny",
        "vit-digits": "laptop:vit_digits",
        "vit-endless": "laptop:vit_endless",
        "vit-fashion": "laptop:vit_fashion",
        "ed-tiny": "laptop:ed_tiny",
        "bordelon-vit": "papers:bordelon_vit",
        "bordelon-lm": "papers:bordelon_lm",
        "vit-s16-imagenet": "pods:vit_s16_imagenet",
        "vit-b16-imagenet": "pods:vit_b16_imagenet",
        "gpt2-c4": "pods:gpt2_c4",
        "vit-h14": "pods:vit_h14",
        "lm-1b": "pods:lm_1b",
        "lm-8b": "pods:lm_8b",
        "lm-30b-a3b": "pods:lm_30b_a3b",
        "bart-large-c4": "pods:bart_large_c4",
        "r2c2-c4": "pods:r2c2_c4",
    },
)
"""Name to recipe. The name is the first word after `mupax train`."""
