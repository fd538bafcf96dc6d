"""Mistakes that others have made and written of: each is named, with its parameter, what it leads to and what to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from mupax import presets
from mupax.presets import Preset
from mupax.presets.verify.command import MISTAKES, STANDARD
from tests.presets.verify import dumps
from tests.presets.verify.dumps import LR, Contents, changed, decoder, verified

pytestmark = pytest.mark.core

Pair = tuple[Contents, Contents]
"""Of a model and of a larger one."""
TIMES = 8
MATRICES = [f"block.attention.{name}" for name in ("query", "key", "value", "out")] + [
    "block.mlp.up",
    "block.mlp.down",
]
TABLES = ["token", "position"]


def pair(
    preset: Preset | None = None, optimizer: str = "adamw", axis: str = "heads", **fields: Any
) -> Pair:
    """Right dumps of a model and of one that is eight times as wide or deep."""
    preset = preset or presets.get("mup")
    small, large = dumps.pair(preset, decoder(16, **fields), axis, optimizer, times=TIMES)
    return small, large


def but(names: list[str], files: Pair, **columns: Callable[[Contents], float]) -> Pair:
    """The pair where the large model has other columns of some parameters, as a function of what it should have."""
    small, large = files
    return small, changed(
        large, lambda n, e: {c: f(e) for c, f in columns.items()} if n in names else None
    )


def forward(files: Pair, **factors: float) -> Pair:
    """The pair where the large model's forward pass has other factors, times what it should have."""
    small, large = files
    return small, {
        **large,
        "model": {**large["model"], **{key: large["model"][key] * x for key, x in factors.items()}},
    }


def everything(files: Pair, **columns: float) -> Pair:
    return files[0], changed(files[1], lambda n, e: columns)


EVERY = [*pair()[0]]
VECTORS = [name for name in EVERY if name.endswith(("bias", "gain"))]
PLAIN = presets.get("mup", form="plain")
IN_BLOCKS = [*MATRICES, *(n for n in VECTORS if n.startswith("block."))]


class Mistake(NamedTuple):
    """Right dumps, what is wrong with them, and what the first finding says of parameter, consequence and remedy."""

    right: Callable[[], Pair]
    change: Callable[[Pair], Pair]
    parameter: str
    consequence: str
    remedy: str


GOLDEN = {
    "scheduler overwrites group rates": Mistake(
        pair, lambda p: everything(p, lr=LR),
        "block.attention.query", "the change of attention logits explodes as width^1", "Write lr 0.000125 at width 128, not 0.001",
    ),
    "tied readout without its multiplier": Mistake(
        lambda: pair(tied=True), lambda p: forward(p, readout=TIMES),
        "tied readout", "the change of the output explodes as width^1", "Multiply the logits by 0.0312 at width 128, not 0.25",
    ),
    "tied table rescaled as a readout": Mistake(
        lambda: pair(tied=True), lambda p: but(["token"], p, std=lambda e: e["std"] * TIMES**0.5),
        "token", "the residual stream explodes as width^0.5", "Write std 1 at width 128, not 2.83: as at the base",
    ),
    "Muon scaled twice": Mistake(
        lambda: pair(optimizer="muon"), lambda p: but(MATRICES, p, lr=lambda e: e["lr"] / TIMES),
        "block.attention.query", "the change of v, MLP entries becomes lazy as width^-1", "Write lr 0.001 at width 128, not 0.000125",
    ),
    "readout's rate without 1/m": Mistake(
        lambda: pair(PLAIN), lambda p: but(["readout"], p, lr=lambda e: LR),
        "readout", "the change of the output explodes as width^1", "Write lr 0.000125 at width 128, not 0.001: the base's x width^-1",
    ),
    "readout scaled twice": Mistake(
        pair, lambda p: but(["readout"], p, lr=lambda e: e["lr"] / TIMES),
        "readout", "the weight movement of readout freezes as width^-1", "Write lr 0.001 at width 128, not 0.000125: as at the base",
    ),
    "attention by 1/sqrt(d)": Mistake(
        lambda: pair(axis="head_dim"), lambda p: forward(p, attention=TIMES**0.5),
        "attention logits", "the change of attention logits explodes as width^0.5", "Multiply q.k by 0.0625 at width 128, not 0.177",
    ),
    "embedding as a hidden matrix": Mistake(
        pair, lambda p: but(TABLES, p, lr=lambda e: e["lr"] / TIMES),
        "token", "the weight movement of embedding freezes as width^-1", "Write lr 0.001 at width 128, not 0.000125: as at the base",
    ),
    "init not rescaled": Mistake(
        pair, lambda p: but(MATRICES, p, std=lambda e: e["std"] * TIMES**0.5),
        "block.attention.query", "the entries of q, k, v, MLP explode as width^0.5", "Write std 0.0884 at width 128, not 0.25",
    ),
    "std divided by m": Mistake(
        pair, lambda p: but(MATRICES, p, std=lambda e: e["std"] / TIMES**0.5),
        "block.attention.query", "the entries of q, k, v, MLP vanish as width^-0.5", "Write std 0.0884 at width 128, not 0.0312",
    ),
    "gains and biases as hidden matrices": Mistake(
        pair, lambda p: but(VECTORS, p, lr=lambda e: e["lr"] / TIMES),
        "block.attention.query_bias", "its steps fade as width^-1 beside the rest and it stops training", "Write lr 0.001 at width 128",
    ),
    "decay fades with the rate": Mistake(
        pair, lambda p: but(MATRICES, p, wd=lambda e: e["wd"] / TIMES),
        "block.attention.query", "lr * weight decay vanishes as width^-1", "Write wd 0.8 at width 128, not 0.1: the base's x width^1",
    ),
    "eps not scaled": Mistake(
        pair, lambda p: but(MATRICES, p, eps=lambda e: e["eps"] * TIMES),
        "block.attention.query", "the gradient over eps of q, k vanishes as width^-1", "Write eps 1.25e-09 at width 128, not 1e-08",
    ),
    "depth missing in the rate": Mistake(
        lambda: pair(presets.get("depth-mup"), axis="depth"), lambda p: but(IN_BLOCKS, p, lr=lambda e: LR),
        "block.attention.query", "the change of the stream explodes as depth^0.5", "Write lr 0.000354 at depth 16, not 0.001",
    ),
    "no depth multiplier": Mistake(
        lambda: pair(presets.get("completep"), axis="depth"), lambda p: forward(p, branch=TIMES),
        "residual branches", "the residual stream explodes as depth^0.5", "Multiply every branch by 0.125 at depth 16, not 1",
    ),
    "base shapes of the target": Mistake(
        pair, lambda p: pair(presets.get("sp")),
        "block.attention.query", "the change of attention logits explodes as width^1", "Write lr 0.000125 at width 128, not 0.001",
    ),
}  # fmt: skip
CAUTIONS = ("decay fades with the rate", "eps not scaled")
"""What sources disagree on, or most code leaves out: counted with --strict."""


def test_every_published_mistake_is_here():
    assert set(GOLDEN) == {mistake.name for mistake in (*MISTAKES, STANDARD)}


def wrong(mistake: str) -> Pair:
    """The dumps that have it."""
    golden = GOLDEN[mistake]
    return golden.change(golden.right())


@pytest.mark.parametrize("mistake", GOLDEN)
def test_a_mistake_is_named_with_parameter_consequence_and_remedy(mistake: str):
    golden = GOLDEN[mistake]
    files = wrong(mistake)
    judged = verified(*files, flags="--strict" if mistake in CAUTIONS else "")
    first = judged.findings[0]
    assert judged.code == 1
    assert first["names"][0] == golden.parameter
    assert golden.consequence in first["sentence"]
    assert golden.remedy in first["sentence"]
    assert first["severity"] == ("caution" if mistake in CAUTIONS else "fault")
    assert [published["mistake"] for published in judged.line["published"]] == [mistake]
    # Nothing is named that is as it should be.
    right = golden.right()[1]
    named = {name for finding in judged.findings for name in finding["names"]} & right.keys()
    assert all(files[1][name] != right[name] for name in named)


@pytest.mark.parametrize("mistake", GOLDEN)
def test_control_without_it_nothing_is_said(mistake: str):
    judged = verified(*GOLDEN[mistake].right())
    assert (judged.code, judged.findings) == (0, [])


@pytest.mark.parametrize("mistake", CAUTIONS)
def test_a_caution_alone_is_no_failure(mistake: str):
    judged = verified(*wrong(mistake))
    assert judged.code == 0
    assert [finding["severity"] for finding in judged.findings] == ["caution"]


@pytest.mark.parametrize(
    "mistake", ["readout's rate without 1/m", "attention by 1/sqrt(d)", "depth missing in the rate"]
)
def test_what_the_remedy_writes_is_right(mistake: str):
    """Every number that a remedy names, written into the dump, leaves nothing to say."""
    small, large = wrong(mistake)
    for finding in verified(small, large).findings:
        words = finding["sentence"].split()
        if finding["names"] == ["attention logits"]:
            large["model"]["attention"] = float(words[words.index("q.k") + 2])
            continue
        start = words.index("Write")
        column, number = words[start + 1 : start + 3]
        for name in finding["names"]:
            large[name][column] = float(number)
    judged = verified(small, large)
    assert (judged.code, judged.faults) == (0, [])
