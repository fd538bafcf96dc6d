"""The strategies of Dinan, Yaida and Zhang 2023 (arXiv 2304.02034) as they trained them, as presets in absolute form.

A hidden matrix moves by the *hidden rate* h = lr / n^(3/2 - s/2) in a step of AdamW (under `standard` lr itself) and is pulled by
lr wd, so that the paper's map between strategies is (lr, wd) -> (h n^(3/2 - s/2), wd n^-(3/2 - s/2)): the same h and the same decay
times rate in each. As there, hidden matrices start alike under every strategy, and their rates leave the ratio of the MLP out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from mupax.presets import Role
from mupax.presets.papers.effective_theory import VARIANCES
from mupax.train.config.run import PresetConfig

MAP = {"standard": 0.0, "ntk": 1.5, "hybrid": 1.25, "maximal-update": 1.0}
"""Strategy to the exponent of n in lr over h, 3/2 - s/2."""
START = 0.64
"""Initial std of the language models times n^1/2: 0.02 at the paper's n = 1024."""
RATIO = 4
"""Width of the MLP over n."""
_HIDDEN = (Role.QUERY, Role.KEY, Role.VALUE, Role.ATTENTION_OUT, Role.MLP_IN, Role.MLP_OUT)


def peak_lr(strategy: str, width: int, hidden: float) -> float:
    """The learning rate whose hidden rate is `hidden`.

    Args:
        strategy: a name in `MAP`, or one that begins with it ("standard, ...").
        width: of the model.
        hidden: rate of hidden matrices.
    """
    return hidden * width ** MAP[family(strategy)]


def family(strategy: str) -> str:
    """The name in `MAP` of a strategy or of a variant, which has a comma and more behind it."""
    return strategy.partition(",")[0]


def language(strategy: str, width: int, embeddings: float = 1.0) -> PresetConfig:
    """The strategy of an encoder-decoder: one std everywhere under `standard`, where the head multiplies by 1; tokens of std 1 otherwise.

    Args:
        strategy: as `peak_lr` has it.
        width: of the model.
        embeddings: factor on the rates of both tables, tokens and positions.
    """
    std = START / math.sqrt(width)
    numbers = {f"stds.{role.value}": START for role in _HIDDEN}
    numbers |= {"stds.mlp_out": START * math.sqrt(RATIO), "stds.position": std}
    if family(strategy) == "standard":
        numbers |= {"stds.token_embedding": std, "multipliers.readout": math.sqrt(width)}
    faster = {"token_embedding": embeddings, "position": embeddings} if embeddings != 1 else {}
    return _preset(strategy, numbers, faster, fan_in=True)


def vision(strategy: str, patch: int) -> PresetConfig:
    """The strategy of a ViT, hidden matrices, patches and positions starting with the paper's variances under each.

    Args:
        strategy: as `peak_lr` has it.
        patch: numbers of an input patch.
    """
    if family(strategy) != "standard":
        return _preset(strategy, {}, {}, fan_in=False)
    stds = {
        f"stds.{role.value}": math.sqrt(variance)
        for role, variance in VARIANCES.items()
        if variance != 1
    }
    # `sp` multiplies patches by patch^-1/2, and with it what a step moves.
    return _preset(strategy, stds, {"patch_embedding": math.sqrt(patch)}, fan_in=False)


def _preset(
    strategy: str, numbers: Mapping[str, float], rates: Mapping[str, float], *, fan_in: bool
) -> PresetConfig:
    words = [f"{name}={value!r}" for name, value in numbers.items()]
    if family(strategy) != "standard":
        rates = {"mlp_in": math.sqrt(RATIO), "mlp_out": RATIO, **rates}
        words += ["init=fan-in"] * fan_in
    words += [f"rates.{group}={factor!r}" for group, factor in rates.items()]
    return PresetConfig(name=family(strategy), base=None, constants=tuple(words))
