"""Write tests/goldens: every preset's table for every model family and each optimizer, the only way they change.

    python -m scripts.goldens

One line per parameter group: its power laws in m = size / base size, then its values at two sizes, so that a changed
exponent is a changed line. `tests/presets/test_goldens.py` compares.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from mupax import presets
from mupax.presets import ParamSpec, Preset, PresetError
from mupax.presets.analysis import table
from mupax.presets.optimizers import Family
from mupax.presets.papers import choices
from mupax.presets.roles import ENCODER, OWN, Stack
from mupax.zoo.configs import DecoderConfig, EncoderDecoderConfig, ModelConfig, ViTConfig
from mupax.zoo.transformer import RoutingConfig
from scripts import ROOT

FOLDER = ROOT / "tests" / "goldens"
OPTIMIZERS: tuple[Family, ...] = get_args(Family)
"""One per column of the rules: adamw reads adam's, momentum sgd's."""
EXPONENTS = (0.5, 0.75, 1.0)

_VIT = {
    "image_size": 6,
    "patch_size": 3,
    "channels": 1,
    "num_classes": 7,
    "pool": "cls",
    "qk_norm": True,
    "layer_scale": 0.1,
}
_LM = {"vocab_size": 11, "seq_len": 5, "positions": "rotary", "activation": "swiglu"}
_ED = {
    "vocab_size": 11,
    "seq_len": 5,
    "target_len": 3,
    "positions": "relative",
    "qk_norm": True,
    "tied": False,
}
MODELS: dict[str, tuple[ModelConfig, ModelConfig, ModelConfig]] = {
    "vit": (
        ViTConfig(width=8, num_heads=2, depth=2, **_VIT),
        ViTConfig(width=32, num_heads=2, depth=8, **_VIT),
        ViTConfig(width=24, num_heads=6, depth=2, **_VIT),
    ),
    "decoder": (
        DecoderConfig(width=8, num_heads=4, num_kv_heads=2, depth=2, **_LM),
        DecoderConfig(width=32, num_heads=4, num_kv_heads=2, depth=8, **_LM),
        DecoderConfig(width=24, num_heads=12, num_kv_heads=6, mlp_ratio=8, depth=2, **_LM),
    ),
    "encoder-decoder": (
        EncoderDecoderConfig(width=8, num_heads=2, depth=2, encoder_depth=3, **_ED),
        EncoderDecoderConfig(width=32, num_heads=2, depth=8, encoder_depth=6, **_ED),
        EncoderDecoderConfig(width=24, num_heads=6, depth=2, encoder_depth=3, **_ED),
    ),
}  # fmt: skip
"""Base and two sizes of each family: head_dim and depth grown; heads grown (decoder: the MLP further)."""


_MOE = {
    "vocab_size": 11,
    "seq_len": 5,
    "activation": "swiglu",
    "routing": RoutingConfig(balance="bias"),
}
EXPERTS = (
    DecoderConfig(width=8, num_heads=4, depth=2, experts=6, expert_dim=3, **_MOE),
    DecoderConfig(width=32, num_heads=4, depth=8, experts=6, expert_dim=12, **_MOE),
    DecoderConfig(width=8, num_heads=4, depth=2, experts=18, active_experts=6, expert_dim=15, **_MOE),
)  # fmt: skip
"""Base and two sizes of a model of experts: width, with experts' hidden size, and depth; experts at a fixed share, and their size."""


def golden(
    preset: Preset,
    specs: Mapping[str, ParamSpec],
    sizes: Iterable[Mapping[str, int]],
    optimizer: str,
    stacks: Iterable[Stack] = (OWN,),
) -> str:
    """A compact text that says all a preset does to a model: forward scales, then rules and values per group.

    Args:
        preset: relative to a base, or absolute.
        specs: name to declaration.
        sizes: each is one `|` column of shape, multiplier, init_std, lr, eps, weight_decay.
        optimizer: whose columns.
        stacks: of residual blocks.
    """
    sizes = list(sizes)
    lines = [f"{preset.describe()}; {optimizer}"]
    for stack in stacks:
        law, part = (
            preset.branch.renamed(OWN.axis, stack.axis),
            "encoder " if stack == ENCODER else "",
        )
        for branch in stack.branches:
            scales = [
                preset.residual_scale(at, i, branch, stack)
                for at in sizes
                for i in (0, at[stack.axis] - 1)
            ]
            numbers = " ".join(f"{skip:.5g}/{scale:.5g}" for skip, scale in scales)
            lines.append(f"{part}{branch} branch {law} | {numbers}")
    lines.append(
        f"logits {preset.logits} | " + " ".join(f"{preset.logit_scale(at):.5g}" for at in sizes)
    )
    by_group = {spec.group: spec for spec in specs.values()}
    for group, rule in sorted(
        (row["group"], row) for row in table.rule_rows(preset, specs, optimizer)
    ):
        laws = "; ".join(rule[column] for column in ("multiplier", "init_std", "lr", "eps"))
        values = [
            [table.cell([at[axis] for axis in by_group[group].axes])]
            + [
                f"{x:.5g}"
                for x in dataclasses.astuple(preset.scales(by_group[group], at, optimizer))
            ]
            for at in sizes
        ]
        lines.append(f"{group}: {laws} | " + " | ".join(" ".join(column) for column in values))
    return "\n".join(lines) + "\n"


def goldens() -> Iterator[tuple[str, str]]:
    """(file name, text) of every golden file."""
    for family, (base, *grown) in MODELS.items():
        specs = dict(sorted(base.parameters().items()))
        stacks = dict.fromkeys(of.stack for of in base.factors().values() if of.kind == "branch")
        sizes = [model.sizes() for model in grown]
        for optimizer in OPTIMIZERS:
            for name in presets.PRESETS:
                preset = _relative(name, base)
                if optimizer in preset.optimizers:
                    yield (
                        f"{name}-{family}-{optimizer}.txt",
                        golden(preset, specs, sizes, optimizer, stacks),
                    )
        for optimizer in ("adam", "sgd"):
            pairs = [
                golden(
                    _relative("depth-mup", base, alpha_a=alpha_a, alpha_l=alpha_l),
                    specs,
                    sizes,
                    optimizer,
                    stacks,
                )
                for alpha_a, alpha_l in itertools.product(EXPONENTS, EXPONENTS)
            ]
            yield f"pairs-depth-mup-{family}-{optimizer}.txt", "\n".join(pairs)
        for optimizer in OPTIMIZERS:
            dense = [choice for choice in choices.CHOICES if choice.constant != "experts"]
            named = [_relative(c.presets[0], base, **{c.constant: c.value}) for c in dense]
            other = [
                preset
                for preset, c in zip(named, dense, strict=True)
                if c.constant in preset.choices
            ]
            texts = [
                golden(preset, specs, sizes, optimizer, stacks)
                for preset in other
                if optimizer in preset.optimizers
            ]
            yield f"choices-{family}-{optimizer}.txt", "\n".join(texts)
    for optimizer in OPTIMIZERS:
        yield f"tied-{optimizer}.txt", "\n".join(_tied("decoder", optimizer))
        yield (
            f"tied-encoder-decoder-{optimizer}.txt",
            "\n".join(_tied("encoder-decoder", optimizer)),
        )
        yield f"experts-{optimizer}.txt", "\n".join(_experts(optimizer))


def _tied(family: str, optimizer: str) -> Iterator[str]:
    """Every preset's table of a shared embedding and readout, or its reason to refuse them."""
    base, *grown = (replace(model, tied=True) for model in MODELS[family])  # pyright: ignore[reportCallIssue]
    assert base.tied_readout is not None
    specs = {"token": base.parameters()["token"], "tied_readout": base.tied_readout}
    for name in presets.PRESETS:
        preset = _relative(name, base)
        if optimizer not in preset.optimizers:
            continue
        try:
            yield golden(preset, specs, [size.sizes() for size in grown], optimizer)
        except PresetError as error:
            yield f"{error}\n"


def _experts(optimizer: str) -> Iterator[str]:
    """Every preset's table of a router and experts, with biases, and those of the other rules that `mup` has for them."""
    base, *grown = EXPERTS
    specs = {name: spec for name, spec in base.parameters().items() if ".experts." in name}
    rules = [choice.value for choice in choices.CHOICES if choice.constant == "experts"]
    named = [_relative(name, base) for name in presets.PRESETS] + [
        _relative("mup", base, experts=x) for x in rules
    ]
    for preset in {each.label: each for each in named}.values():
        if optimizer in preset.optimizers:
            yield golden(preset, specs, [size.sizes() for size in grown], optimizer)


def _relative(name: str, base: ModelConfig, **constants: Any) -> Preset:
    baseless = presets.get(name).baseless
    return presets.get(name, base=None if baseless else base.base_sizes(), **constants)


def main() -> int:
    """Write every file and remove those no longer made; returns the exit code."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    texts = dict(goldens())
    for path in FOLDER.glob("*.txt"):
        if path.name not in texts:
            path.unlink()
    for name, text in texts.items():
        (FOLDER / name).write_text(text)
    print(
        f"{len(texts)} files in {FOLDER.relative_to(Path.cwd()) if FOLDER.is_relative_to(Path.cwd()) else FOLDER.name}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
