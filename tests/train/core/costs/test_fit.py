"""What `--dry-run` says of a step that does not fit: flags that were compiled, and that hold when they are typed."""

from __future__ import annotations

import re
from collections.abc import Callable

import jax
import pytest

from mupax.train.__main__ import main
from mupax.train.config import cli
from mupax.train.config.recipes import RECIPES
from mupax.train.core.costs import fit
from mupax.train.core.program import assemble

FLAGS = "--model.depth 2 --mesh.data 2 --mesh.fsdp 4 --data.batch-size 32"
Said = Callable[[float], str | None]


def needs(flags: str) -> fit.Needs:
    taken = fit.needs(assemble(cli.parse("lm-tiny", RECIPES["lm-tiny"], flags.split()).config))
    assert taken
    return taken


@pytest.fixture(scope="module")
def taken() -> fit.Needs:
    return needs(FLAGS)


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Said:
    """The row of a dry run on devices of so many bytes."""

    def run(limit: float) -> str | None:
        monkeypatch.setattr(fit, "room", lambda device: int(limit))
        assert main(["lm-tiny", *FLAGS.split(), "--dry-run"]) == 0
        row = re.search(r"^ does not fit +(.*)$", capsys.readouterr().out, re.M)
        return row and row[1]

    return run


def test_the_flags_that_it_names_make_it_fit(taken: fit.Needs, said: Said) -> None:
    assert said(taken.peak) is None
    limit = taken.state + taken.temporary // 2
    flags = re.search(r"on each device\. With (.*) it takes", said(limit) or "")
    assert flags
    assert needs(f"{FLAGS} {flags[1]}").peak <= limit


def test_a_state_that_is_too_large_alone_names_how_many_devices(taken: fit.Needs, said: Said) -> None:
    text = said(taken.state / 2) or ""
    assert "The state alone is too much" in text
    assert int(text.rsplit(maxsplit=1)[-1]) > 4 * 2


def test_what_no_flag_makes_fit_is_said(taken: fit.Needs, said: Said) -> None:
    assert "More devices make it fit (--mesh.fsdp)" in (said(taken.state / 0.89) or "")


def test_a_cpu_has_its_part_of_the_host() -> None:

    assert 2**27 < (fit.room(jax.devices()[0]) or 0) < 2**40
