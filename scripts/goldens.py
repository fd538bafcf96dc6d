"""Golden tables of tests/goldens: every preset for every model family and optimizer.

    python -m scripts.goldens

It writes the tables anew, which is the only way to change them. A table has one line for each
parameter group: its power laws in m = size / base size, then its values at two sizes, so that a
changed exponent is a changed line. `tests/presets/test_goldens.py` compares.
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
from scripts import ROOT, harness

FOLDER = ROOT / "tests" / "goldens"
OPTIMIZERS: tuple[Family, ...] = get_args(Family)
"""Optimizers with a column of rules. adamw reads adam's column, momentum sgd's."""
EXPONENTS = (0.5, 0.75, 1.0)
"""Values of `alpha_a` and `alpha_l` that the tables of `depth-mup` have."""

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
"""Base and two sizes of each family. The first size grows head_dim and depth, the second heads (and
the decoder's MLP faster)."""


_MOE = {
    "vocab_size": 11,
    "seq_len": 5,
    "activation": "swiglu",
    "routing": RoutingConfig(balance="bias"),
}
EXPERTS = (
    DecoderConfig(width=8, num_heads=4, depth=2, experts=6, expert_dim=3, **_MOE),
    DecoderConfig(width=32, num_heads=4, depth=8, experts=6, expert_dim=12, **_MOE),
    DecoderConfig(
        width=8, num_heads=4, depth=2, experts=18, active_experts=6, expert_dim=15, **_MOE
    ),
)
"""Base and two sizes of a model of experts. The first size grows width, the experts' hidden size
and depth; the second the experts at a fixed active share, and their hidden size."""


def golden(
    preset: Preset,
    specs: Mapping[str, ParamSpec],
    sizes: Iterable[Mapping[str, int]],
    optimizer: str,
    stacks: Iterable[Stack] = (OWN,),
) -> str:
    """Return the table of a preset and model: forward multipliers, then rules and values by group.

    Args:
        specs: name of a parameter to its declaration.
        sizes: Sizes of grown models. Each is one `|` column of shape, multiplier, init_std, lr, eps
            and weight_decay.
        stacks: Stacks of residual blocks; an encoder-decoder has two.
    """
    sizes = list(sizes)
    lines = [f"{preset.describe()}; {optimizer}"]
    for stack in stacks:
        law = preset.branch.renamed(OWN.axis, stack.axis)
        prefix = "encoder " if stack == ENCODER else ""
        for branch in stack.branches:
            cells = []
            for size in sizes:
                # The first block and the last, because some rules depend on the block.
                for block in (0, size[stack.axis] - 1):
                    skip, scale = preset.residual_scale(size, block, branch, stack)
                    cells.append(f"{skip:.5g}/{scale:.5g}")
            lines.append(f"{prefix}{branch} branch {law} | {' '.join(cells)}")
    logit_scales = " ".join(f"{preset.logit_scale(size):.5g}" for size in sizes)
    lines.append(f"logits {preset.logits} | {logit_scales}")

    by_group = {spec.group: spec for spec in specs.values()}
    rules = table.rule_rows(preset, specs, optimizer)
    for rule in sorted(rules, key=lambda row: row["group"]):
        spec = by_group[rule["group"]]
        laws = "; ".join(rule[column] for column in ("multiplier", "init_std", "lr", "eps"))
        columns = []
        for size in sizes:
            shape = table.cell([size[axis] for axis in spec.axes])
            scales = dataclasses.astuple(preset.scales(spec, size, optimizer))
            columns.append(" ".join([shape, *(f"{value:.5g}" for value in scales)]))
        lines.append(f"{rule['group']}: {laws} | {' | '.join(columns)}")
    return "\n".join(lines) + "\n"


def goldens() -> Iterator[tuple[str, str]]:
    """Yield file name and text of every golden table."""
    for family in MODELS:
        yield from _family(family)
    for optimizer in OPTIMIZERS:
        yield f"tied-{optimizer}.txt", "\n".join(_tied("decoder", optimizer))
        texts = _tied("encoder-decoder", optimizer)
        yield f"tied-encoder-decoder-{optimizer}.txt", "\n".join(texts)
        yield f"experts-{optimizer}.txt", "\n".join(_experts(optimizer))


def _family(family: str) -> Iterator[tuple[str, str]]:
    """Yield file name and text of each golden table of one family."""
    base, *grown = MODELS[family]
    specs = dict(sorted(base.parameters().items()))
    factors = base.factors().values()
    # A set would give the tables another order in each run.
    stacks = dict.fromkeys(factor.stack for factor in factors if factor.kind == "branch")
    sizes = [model.sizes() for model in grown]

    for optimizer in OPTIMIZERS:
        for name in presets.PRESETS:
            preset = _relative(name, base)
            if optimizer in preset.optimizers:
                text = golden(preset, specs, sizes, optimizer, stacks)
                yield f"{name}-{family}-{optimizer}.txt", text

    for optimizer in ("adam", "sgd"):
        pairs = []
        for alpha_a, alpha_l in itertools.product(EXPONENTS, EXPONENTS):
            preset = _relative("depth-mup", base, alpha_a=alpha_a, alpha_l=alpha_l)
            pairs.append(golden(preset, specs, sizes, optimizer, stacks))
        yield f"pairs-depth-mup-{family}-{optimizer}.txt", "\n".join(pairs)

    for optimizer in OPTIMIZERS:
        texts = []
        for choice in choices.CHOICES:
            # Rules of experts do not show in a dense model.
            if choice.constant == "experts":
                continue
            preset = _relative(choice.presets[0], base, **{choice.constant: choice.value})
            is_different = choice.constant in preset.choices
            if is_different and optimizer in preset.optimizers:
                texts.append(golden(preset, specs, sizes, optimizer, stacks))
        yield f"choices-{family}-{optimizer}.txt", "\n".join(texts)


def _tied(family: str, optimizer: str) -> Iterator[str]:
    """Yield each preset's table of a shared embedding and readout, or its message of refusal."""
    models = MODELS[family]
    base, *grown = (replace(model, tied=True) for model in models)  # pyright: ignore[reportCallIssue]
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
    """Yield the tables of routers and experts: of each preset, then of `mup` with other rules.

    The other rules are the choices for the constant `experts`.
    """
    base, *grown = EXPERTS
    specs = {}
    for name, spec in base.parameters().items():
        if ".experts." in name:
            specs[name] = spec
    selected = [_relative(name, base) for name in presets.PRESETS]
    for choice in choices.CHOICES:
        if choice.constant == "experts":
            selected.append(_relative("mup", base, experts=choice.value))

    # A rule that is a preset's default gives the same label, and is shown once.
    by_label = {preset.label: preset for preset in selected}
    for preset in by_label.values():
        if optimizer in preset.optimizers:
            yield golden(preset, specs, [size.sizes() for size in grown], optimizer)


def _relative(name: str, base: ModelConfig, **constants: Any) -> Preset:
    """Return a preset relative to a base, or without one if it takes none."""
    sizes = None if presets.get(name).baseless else base.base_sizes()
    return presets.get(name, base=sizes, **constants)


def main() -> int:
    """Write every golden table, remove files that are no longer made, and return 0."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    texts = dict(goldens())
    for path in FOLDER.glob("*.txt"):
        if path.name not in texts:
            path.unlink()
    for name, text in texts.items():
        (FOLDER / name).write_text(text)
    # The command may run outside of the checkout.
    is_below = FOLDER.is_relative_to(Path.cwd())
    folder = FOLDER.relative_to(Path.cwd()) if is_below else FOLDER.name
    print(f"{len(texts)} files in {folder}")
    return 0


if __name__ == "__main__":
    harness.refuse_words()
    sys.exit(main())
