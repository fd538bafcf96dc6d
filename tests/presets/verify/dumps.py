"""Dumps of the presets' own tables, which are right, and what `verify` says of a pair of files."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mupax.__main__ import main
from mupax.presets import Preset
from mupax.presets.roles import OWN
from mupax.presets.rule import Decay
from mupax.zoo.configs import DecoderConfig, ModelConfig

CONFIGS = Path(__file__).parent / "configs"
LR = 1e-3
EPS = 1e-8
WD = 0.1
"""Of the optimizer, which factors multiply."""

Contents = dict[str, Any]
"""Contents of a file."""


def dump(
    preset: Preset,
    model: ModelConfig,
    base: ModelConfig,
    optimizer: str = "adamw",
    decay: Decay = "coupled",
) -> Contents:
    """Return the dump of a model under a preset relative to a base: values, not factors."""
    sizes = model.sizes()
    preset = preset if preset.baseless else dataclasses.replace(preset, base=base.base_sizes())
    contents: Contents = {}
    for name, spec in model.parameters().items():
        scales = preset.scales(spec, sizes, optimizer, decay)
        contents[name] = {
            "shape": [sizes[axis] for axis in spec.axes], "std": scales.init_std, "lr": scales.lr * LR,
            "wd": scales.weight_decay * WD, "eps": scales.eps * EPS, "multiplier": scales.multiplier,
        }  # fmt: skip
    blocks = [(layer, branch) for layer in range(sizes[OWN.axis]) for branch in OWN.branches]
    about: Contents = {
        "optimizer": optimizer, "decay": decay, "head_dim": sizes["head_dim"], "layers": sizes["layers"],
        "attention": preset.logit_scale(sizes),
        "branch": statistics.geometric_mean(preset.residual_scale(sizes, *block)[1] for block in blocks),
    }  # fmt: skip
    if "encoder_layers" in sizes:
        about["encoder_layers"] = sizes["encoder_layers"]
    for factor in model.factors().values():
        if factor.kind == "readout" and factor.spec is not None:
            about["readout"] = preset.scales(factor.spec, sizes, optimizer).multiplier
    return {**contents, "model": about}


def decoder(width: int, heads: int = 4, depth: int = 2, **fields: Any) -> DecoderConfig:
    """Return a small decoder with biases and learned positions."""
    return DecoderConfig(
        width=width,
        num_heads=heads,
        depth=depth,
        vocab_size=11,
        seq_len=5,
        **{"mlp_ratio": 4, **fields},
    )


def changed(
    contents: Mapping[str, Any], change: Callable[[str, Contents], Contents | None]
) -> Contents:
    """Return a dump with changed entries.

    Args:
        change: Function from name and entry of a parameter to the fields that differ, or None.
    """
    parameters = {name: entry for name, entry in contents.items() if name != "model"}
    for name, entry in parameters.items():
        parameters[name] = {**entry, **(change(name, entry) or {})}
    return {**contents, **parameters}


def verified(folder: Path, *files: Contents, flags: tuple[str, ...] = ()) -> tuple[int, Contents]:
    """Write dumps into a folder, and return the exit code of `verify` and its JSON."""
    paths = []
    for index, contents in enumerate(files):
        path = folder / f"dump{index}.json"
        path.write_text(json.dumps(contents))
        paths.append(str(path))
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        code = main(["verify", *paths, *flags, "--json"])
    return code, json.loads(shown.getvalue() or "{}")
