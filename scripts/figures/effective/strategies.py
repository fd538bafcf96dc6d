"""Strategies of Dinan, Yaida and Zhang 2023 (arXiv 2304.02034) as presets in absolute form.

In a step of AdamW a hidden matrix moves by the *hidden rate* h = lr / n^(3/2 - s/2), or by lr
itself under `standard`, and decays by lr wd. So the paper's map between strategies is
(lr, wd) -> (h n^(3/2 - s/2), wd n^-(3/2 - s/2)), which keeps h and lr wd. As in the paper, hidden
matrices have the same initial std under every strategy, and their rates leave out the MLP's ratio.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from mupax.presets import Role
from mupax.presets.papers.effective_theory import VARIANCES
from mupax.train.config.run import PresetConfig

MAP = {"standard": 0.0, "ntk": 1.5, "hybrid": 1.25, "maximal-update": 1.0}
"""Strategy to the exponent p = 3/2 - s/2 of the width n, where lr = h n^p for hidden rate h."""
START = 0.64
"""Initial std of the language models times n^1/2, which is 0.02 at the paper's n = 1024."""
RATIO = 4
"""Width of the MLP over n."""
_HIDDEN = (Role.QUERY, Role.KEY, Role.VALUE, Role.ATTENTION_OUT, Role.MLP_IN, Role.MLP_OUT)


def peak_lr(strategy: str, width: int, hidden: float) -> float:
    """Return the learning rate whose hidden rate is `hidden`.

    Args:
        strategy: Name in `MAP`, or such a name followed by a comma and more ("standard, ...").
        width: Width `n` of the model.
        hidden: Hidden rate `h`.
    """
    return hidden * width ** MAP[family(strategy)]


def family(strategy: str) -> str:
    """Return the name in `MAP` of a strategy: the part before the first comma."""
    return strategy.partition(",")[0]


def language(strategy: str, width: int, embeddings: float = 1.0) -> PresetConfig:
    """Return the preset of an encoder-decoder under a strategy.

    Under `standard` all parameters have one std, and the head multiplies by 1. Otherwise the token
    embedding has std 1.

    Args:
        strategy: Name as in `peak_lr`.
        width: Width `n` of the model.
        embeddings: Factor on the learning rates of token and position embeddings.
    """
    std = START / math.sqrt(width)
    constants = {f"stds.{role.value}": START for role in _HIDDEN}
    constants["stds.mlp_out"] = START * math.sqrt(RATIO)
    constants["stds.position"] = std
    if family(strategy) == "standard":
        constants["stds.token_embedding"] = std
        constants["multipliers.readout"] = math.sqrt(width)
    rates = {}
    if embeddings != 1:
        rates = {"token_embedding": embeddings, "position": embeddings}
    return _preset(strategy, constants, rates, fan_in=True)


def vision(strategy: str, patch: int) -> PresetConfig:
    """Return the preset of a ViT under a strategy.

    Hidden matrices, patches and positions have the paper's initial variances under every strategy.

    Args:
        strategy: Name as in `peak_lr`.
        patch: Number of values in an input patch.
    """
    if family(strategy) != "standard":
        return _preset(strategy, {}, {}, fan_in=False)
    stds = {}
    for role, variance in VARIANCES.items():
        if variance != 1:
            stds[f"stds.{role.value}"] = math.sqrt(variance)
    # `sp` multiplies patches by patch^-1/2, which scales a step's change by the same factor.
    return _preset(strategy, stds, {"patch_embedding": math.sqrt(patch)}, fan_in=False)


def _preset(
    strategy: str, constants: Mapping[str, float], rates: Mapping[str, float], *, fan_in: bool
) -> PresetConfig:
    """Return the preset of a strategy with its constants.

    Args:
        constants: Name of a preset's constant, such as `stds.position`, to its value.
        rates: Parameter group to the factor on its learning rate.
        fan_in: Whether initial variances are over the fan-in, except under `standard`.
    """
    assignments = [f"{name}={value!r}" for name, value in constants.items()]
    if family(strategy) != "standard":
        # The paper's hidden rates leave out the ratio of the MLP, and the family's rule does not.
        rates = {"mlp_in": math.sqrt(RATIO), "mlp_out": RATIO, **rates}
        if fan_in:
            assignments.append("init=fan-in")
    assignments += [f"rates.{group}={factor!r}" for group, factor in rates.items()]
    return PresetConfig(name=family(strategy), base=None, constants=tuple(assignments))
