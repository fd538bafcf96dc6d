"""Dumps of models at two sizes, which are right, and the answer of `verify` to such files."""

from __future__ import annotations

import dataclasses
import json
import statistics
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mupax.presets import Preset
from mupax.presets.roles import OWN
from mupax.presets.rule import Decay
from mupax.zoo.configs import DecoderConfig, ModelConfig
from tests.fixtures.commands import Done, command

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


def grown(base: Any, axis: str, times: int = 4) -> Any:
    """Return the model with `times` as much of an axis: heads, head_dim or depth."""
    if axis == "depth":
        deeper = {"depth": base.depth * times}
        if hasattr(base, "encoder_depth"):
            deeper["encoder_depth"] = base.encoder_depth * times
        return dataclasses.replace(base, **deeper)
    heads = times if axis == "heads" else 1
    return dataclasses.replace(base, width=base.width * times, num_heads=base.num_heads * heads)


def pair(
    preset: Preset,
    base: ModelConfig,
    axis: str = "heads",
    optimizer: str = "adamw",
    decay: Decay = "coupled",
    times: int = 4,
) -> list[Contents]:
    """Return dumps under a preset of its base, and of the model with `times` as much of an axis."""
    models = (base, grown(base, axis, times))
    return [dump(preset, model, base, optimizer, decay) for model in models]


def network(
    width: int, layers: int = 2, query: str = "attn.q_proj", key: str = "attn.k_proj", **model: Any
) -> Contents:
    """Return a muP decoder in PyTorch's names, relative to width 64, with fixed heads."""
    times = width / 64
    rate = 6e-4

    def entry(shape: list[int], std: float, lr: float = 1.0, multiplier: float = 1.0) -> Contents:
        return {
            "shape": shape, "std": std, "lr": lr * rate, "wd": 0.0, "eps": 1e-8 / times,
            "multiplier": multiplier,
        }  # fmt: skip

    def matrix(shape: list[int]) -> Contents:
        return entry(shape, shape[1] ** -0.5, 1 / times)

    contents = {"wte.weight": entry([256, width], 0.5)}
    for layer in range(layers):
        for name in (query, key, "attn.v_proj", "attn.o_proj"):
            contents[f"h.{layer}.{name}.weight"] = matrix([width, width])
        contents[f"h.{layer}.mlp.c_fc.weight"] = matrix([4 * width, width])
        contents[f"h.{layer}.mlp.c_proj.weight"] = matrix([width, 4 * width])
        contents[f"h.{layer}.ln_1.weight"] = {"shape": [width], "lr": rate}
    contents["lm_head.weight"] = entry([256, width], 0.125, multiplier=1 / times)
    about = {"optimizer": "adam", "head_dim": width // 4, "attention": 16 / width, "branch": 1.0}
    return {**contents, "model": {**about, **model}}


def networks(
    extra: Callable[[int], Contents] | None = None, without: str = "", **fields: Any
) -> list[Contents]:
    """Return `network` at the widths 64 and 256.

    Args:
        extra: Function from the width to parameters that come first.
        without: Name of a parameter to leave out.
        fields: Further arguments of `network`.
    """
    files = []
    for width in (64, 256):
        contents = network(width, **fields)
        contents.pop(without, None)
        files.append({**(extra(width) if extra else {}), **contents})
    return files


@dataclasses.dataclass(frozen=True)
class Judged:
    """Exit code of `verify`, and the object that it prints."""

    code: int
    report: Contents

    @property
    def line(self) -> Contents:
        """Judgement on one line of growth, the only one."""
        (line,) = self.report["lines"]
        return line

    @property
    def findings(self) -> list[Contents]:
        return self.line["findings"]

    @property
    def faults(self) -> list[str]:
        """Names of the parameters with a fault."""
        names = []
        for finding in self.findings:
            if finding["severity"] == "fault":
                names += finding["names"]
        return names


def shown(*files: Contents, flags: str = "") -> Done:
    """Return the answer of `verify` to dumps, which it reads from 0.json, 1.json and so on."""
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for index, contents in enumerate(files):
            path = Path(folder, f"{index}.json")
            path.write_text(json.dumps(contents))
            paths.append(str(path))
        return command("verify", *paths, flags)


def verified(*files: Contents, flags: str = "") -> Judged:
    """Return the exit code of `verify` for dumps, and its JSON."""
    done = shown(*files, flags=f"{flags} --json")
    return Judged(done.code, json.loads(done.out or "{}"))
