"""Mistakes that others have made and written of, by what they look like in a dump: what each is, and where it is written.

The findings say what is wrong without it; a mistake that is recognized says where it usually comes from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from mupax.presets.optimizers import Family
from mupax.presets.verify.differences import BRANCH, LOGITS, TIED
from mupax.presets.verify.fit import Line
from mupax.presets.verify.sentences import Finding


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mistake:
    """A published mistake.

    Attributes:
        name: of a few words.
        text: where it comes from, and what to do.
        source: where it is written.
        fits: whether a finding is one, of a line of growth under an optimizer's family.
        alone: it leaves all other numbers as they should be.
    """

    name: str
    text: str
    source: str
    fits: Callable[[Finding, Line, Family], bool]
    alone: bool = False


EQUAL_RATES = 1e-4
"""Relative difference up to which two learning rates are one: far above float32's 1e-7, far below any rule's."""


def _near(finding: Finding, exponent: float) -> bool:
    return abs(finding.excess - exponent) < 0.15


def _one_rate(line: Line) -> bool:
    """Return whether every parameter has one learning rate.

    Rates are means over layers and may have gone through float32: they are compared with a tolerance.
    """
    for model in line.models:
        rates = [p.entry.lr for p in model.parameters.values() if p.entry.lr is not None]
        if not rates or max(rates) > min(rates) * (1 + EQUAL_RATES):
            return False
    return True


def _hidden(finding: Finding) -> bool:
    return (
        finding.role.startswith(("block.", "matrices", "hidden"))
        and "bias" not in finding.role
        and "gain" not in finding.role
    )


MISTAKES = (
    Mistake(
        name="scheduler overwrites group rates",
        text="Every parameter has one learning rate: a scheduler that sets the rate of all groups to its own undoes those of the groups; "
        "let it multiply what each group has",
        source="microsoft/mup, README, Current Limitations; DeepSpeed issue 7713",
        fits=lambda f, line, family: (
            f.what == "rate" and _hidden(f) and f.excess > 0.4 and _one_rate(line) and line.word != "depth"
        ),
        alone=True,
    ),
    Mistake(
        name="tied readout without its multiplier",
        text="A readout that is the embedding's table has no std and no rate of its own: 1/m has to be on its output (MuSharedReadout)",
        source="Tensor Programs V, Table 8; microsoft/mup, README",
        fits=lambda f, line, family: f.names[0] == TIED and f.what == "multiplier" and f.excess > 0.4,
    ),
    Mistake(
        name="tied table rescaled as a readout",
        text="A table that is both is rescaled for the readout, and the embedding grows with it; its std is to stay",
        source="microsoft/mup, issue 55",
        fits=lambda f, line, family: f.role == "token_embedding" and f.what == "start" and _near(f, 0.5),
    ),
    Mistake(
        name="Muon scaled twice",
        text="An orthogonalized update has the size of its matrix already; 1/m is Adam's",
        source="NVIDIA/Megatron-LM, pull request 3715; karpathy/nanochat, pull request 644",
        fits=lambda f, line, family: family == "muon" and f.what == "rate" and _hidden(f) and f.excess < -0.4,
    ),
    Mistake(
        name="readout's rate without 1/m",
        text="In the form of Table 3, with the scale in the std, the readout's rate falls as well; with a multiplier (Table 8) it does not",
        source="microsoft/mup, issue 7; mlfoundations/open_lm, pull request 25",
        fits=lambda f, line, family: f.role == "readout" and f.what == "rate" and family != "sgd" and _near(f, 1.0),
    ),
    Mistake(
        name="readout scaled twice",
        text="The multiplier and the rate both have 1/m; one of them is enough",
        source="EleutherAI/gpt-neox, pull request 1087",
        fits=lambda f, line, family: f.role == "readout" and f.what in ("rate", "multiplier") and f.excess < -0.4,
    ),
    Mistake(
        name="attention by 1/sqrt(d)",
        text="Queries and keys align in training, and q.k grows as d, not as its root",
        source="Tensor Programs V, Definition 4.1; microsoft/mup, README",
        fits=lambda f, line, family: f.names[0] == LOGITS and f.excess > 0.3,
    ),
    Mistake(
        name="embedding as a hidden matrix",
        text="A table is looked up and not summed over: its fan-in does not grow, and its rate is to stay",
        source="microsoft/mup, issue 48; 2506.15025",
        fits=lambda f, line, family: (
            f.role in ("token_embedding", "position", "patch_embedding") and f.what == "rate" and f.excess < -0.4
        ),
    ),
    Mistake(
        name="init not rescaled",
        text="One std for every width, such as 0.02; under muP it belongs to the base, and falls as 1/sqrt(m)",
        source="Tensor Programs V, Table 3; EleutherAI/nanoGPT-mup, coordinate check `sp`",
        fits=lambda f, line, family: f.what == "start" and _hidden(f) and _near(f, 0.5),
    ),
    Mistake(
        name="std divided by m",
        text="The variance falls as 1/m, the standard deviation as 1/sqrt(m)",
        source="EleutherAI/gpt-neox, pull request 1087",
        fits=lambda f, line, family: f.what == "start" and _hidden(f) and _near(f, -0.5) and line.word != "depth",
    ),
    Mistake(
        name="gains and biases as hidden matrices",
        text="Gains and biases multiply one entry each: as vectors their rate is to stay",
        source="microsoft/mup, issues 12 and 57",
        fits=lambda f, line, family: (
            f.what == "rate" and ("bias" in f.role or "gain" in f.role) and f.excess < -0.4 and line.word != "depth"
        ),
    ),
    Mistake(
        name="decay fades with the rate",
        text="In AdamW w falls by lr*wd*w: where the rate has 1/m, wd needs m (MuAdamW), or the decay is to be independent",
        source="microsoft/mup, issue 1, and pull request 73; 2405.13698",
        fits=lambda f, line, family: f.what == "pull" and f.excess < -0.4,
    ),
    Mistake(
        name="eps not scaled",
        text="Gradients fall with size, and an eps that does not outgrows them",
        source="CompleteP, 2505.01618; 2407.05872",
        fits=lambda f, line, family: f.what == "eps" and f.excess > 0.4,
    ),
    Mistake(
        name="depth missing in the rate",
        text="Branches are scaled with depth, and the rates of what is in them have to follow",
        source="Tensor Programs VI, 2310.02244; marin-community/marin, issue 5177",
        fits=lambda f, line, family: line.word == "depth" and f.what == "rate" and f.excess > 0.3,
    ),
    Mistake(
        name="no depth multiplier",
        text="Every block adds as much at every depth, and the stream grows with their number",
        source="Tensor Programs VI, 2310.02244; CompleteP, 2505.01618",
        fits=lambda f, line, family: f.names[0] == BRANCH and f.excess > 0.3,
    ),
)
"""Mistakes with a source, each with what it looks like."""

STANDARD = Mistake(
    name="base shapes of the target",
    text="All of it is standard parameterization: muP is off, or the base is the model itself, as after set_base_shapes(model, None)",
    source="microsoft/mup, issue 41",
    fits=lambda f, line, family: False,
)


def recognized(
    findings: Sequence[Finding], line: Line, family: Family, *, standard: bool
) -> list[tuple[Finding | None, Mistake]]:
    """Published mistakes among findings, each once, with the finding that shows it; None where it is all of them.

    Args:
        findings: what is wrong.
        line: what grows.
        family: of the optimizer.
        standard: the dumps are standard parameterization's.
    """
    if standard:
        return [(None, STANDARD)]
    pairs: list[tuple[Finding | None, Mistake]] = []
    for mistake in MISTAKES:
        faults = [f for f in findings if f.severity == "fault"]
        if mistake.alone and len({f.what for f in faults}) > 1:
            continue
        finding = next((f for f in findings if f.slope is not None and mistake.fits(f, line, family)), None)
        if finding is not None and all(other is not finding for other, _ in pairs):
            pairs.append((finding, mistake))
    return pairs
