"""Every typed value of a flag is read, or refused by a message."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mupax import MupaxError
from mupax.train.config import record, run, sizes
from mupax.train.config.recipes import RECIPES
from mupax.train.studies.sweep import grids
from mupax.train.studies.tune import over
from mupax.zoo.configs import DecoderConfig
from tests.fixtures.properties import PROPERTY, TYPED

pytestmark = pytest.mark.core
CONFIG = RECIPES["lm-tiny"]()
READERS: dict[str, Callable[[str], Any]] = {
    "grid": grids.parse,
    "range": grids.span,
    "sizes": sizes.parse,
    "rules of sharding": lambda text: run.parse_rules([text]),
    "slices": lambda text: run.parse_slices([text]),
    "constants": lambda text: over.parse([text], CONFIG),
}
BEGINNINGS = ("", "lr", "lr=", "readout.lr=", "width=", "heads=1,", "2^-3:2^3:", "1:", "data=")


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
@PROPERTY
@given(st.sampled_from(BEGINNINGS), TYPED)
def test_whatever_is_typed_is_read_or_refused(
    reader: Callable[[str], Any], beginning: str, rest: str
) -> None:
    with contextlib.suppress(MupaxError):
        reader(beginning + rest)


@PROPERTY
@given(st.floats(1e-6, 1.0), st.floats(1.001, 1000.0), st.integers(2, 40))
def test_a_grid_goes_from_start_to_stop_in_equal_ratios(
    start: float, ratio: float, count: int
) -> None:
    numbers = grids.parse(f"{start!r}:{start * ratio!r}:{count}")
    assert len(numbers) == count
    assert math.isclose(numbers[0], start)
    assert math.isclose(numbers[-1], start * ratio)
    steps = [math.log(b / a) for a, b in itertools.pairwise(numbers)]
    assert all(
        math.isclose(step, math.log(ratio) / (count - 1), rel_tol=1e-6, abs_tol=1e-9)
        for step in steps
    )


@pytest.mark.parametrize("text", ["1:2:²", "1:2:9999999999", "-2^0.5", "10^400", "0^-1"])
def test_numbers_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(MupaxError, match="grid"):
        grids.parse(text)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda: dataclasses.replace(CONFIG, steps=8.0), "steps is 8.0; .* int, such as 8"),
        (lambda: dataclasses.replace(CONFIG, steps=np.int64(8)), "steps is .*8.*, such as 8"),
        (lambda: dataclasses.replace(CONFIG, seed=True), "seed is True; .* int, such as 1"),
        (lambda: dataclasses.replace(CONFIG, steps=math.nan), "steps is nan; .* int, such as 1"),
        (
            lambda: dataclasses.replace(CONFIG, optimizer=run.OptimizerConfig(warmup_steps=2.5)),  # pyright: ignore
            r"optimizer\.warmup_steps is 2\.5; write a whole number as Python's int, such as 2",
        ),
        (
            lambda: dataclasses.replace(CONFIG, log=run.LogConfig(eval_every_steps=10.0)),  # pyright: ignore
            r"log\.eval_every_steps is 10\.0",
        ),
        (lambda: dataclasses.replace(CONFIG.model, width=64.0), r"model\.width is 64\.0"),
        (
            lambda: DecoderConfig(width=8, depth=1, num_heads=1, vocab_size=9, seq_len=8.0),  # pyright: ignore
            r"model\.seq_len is 8\.0",
        ),
    ],
)
def test_a_whole_number_is_an_int(changed: Callable[[], Any], message: str) -> None:
    """A float would fail later, or train with other durations."""
    with pytest.raises(MupaxError, match=message):
        changed()
    # The control: a float field takes an integer, and an optional integer may be absent.
    optimizer = run.OptimizerConfig(peak_lr=1, decay_steps=None)
    assert dataclasses.replace(CONFIG, optimizer=optimizer, steps=8).steps == 8


def test_a_model_may_have_a_type_that_python_cannot_look_up() -> None:
    """Names of a function, and imports under TYPE_CHECKING, are not in a model's module."""

    class Note:
        pass

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Noted(DecoderConfig):
        note: Note | None = None

    sizes_of_model: dict[str, Any] = {"width": 8, "depth": 1, "num_heads": 1, "vocab_size": 9}
    model = Noted(**sizes_of_model, seq_len=8, note=Note())
    assert dataclasses.replace(CONFIG, model=model).model == model
    with pytest.raises(MupaxError, match=r"model\.seq_len is 8\.0"):
        Noted(**sizes_of_model, seq_len=8.0)  # pyright: ignore[reportArgumentType]


def test_a_recorded_model_may_have_a_type_that_python_cannot_look_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run that has trained can be evaluated, and its other fields are still checked."""

    class Note:
        pass

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Recorded(DecoderConfig):
        note: Note | None = None
        scales: tuple[float, ...] = (0.5,)

    monkeypatch.setattr(record, "family_class", lambda family: Recorded)
    model = Recorded(width=8, depth=1, num_heads=1, vocab_size=9, seq_len=8, scales=(0.1, 2.0))
    fields = record.model_to_json(model)
    assert record.model_from_json(fields) == model
    with pytest.raises(MupaxError, match=r"model\.scales is \['a'\]"):
        record.model_from_json({**fields, "scales": ["a"]})
