"""Processes that differ are refused: each difference by name, on every screen."""

from __future__ import annotations

import dataclasses
import socket
from typing import Any

import jax
import pytest

from mupax.train.config.recipes import lm_tiny
from mupax.train.parallel import agreement, environment
from mupax.train.parallel.processes import Processes
from tests.train.parallel.test_distributed import on_two_processes

pytestmark = pytest.mark.core


def agreed(change: Any = lambda facts: None) -> list[Any]:
    """Return the errors of two processes if the second has other facts."""

    def work(processes: Processes) -> None:
        config = dataclasses.replace(lm_tiny(), workdir="same")
        real = agreement.facts(config)
        if processes.index:
            change(real)
        agreement.check(config, processes, real)

    return on_two_processes(work)


@pytest.mark.parametrize(
    ("group", "path", "value", "message"),
    [
        ("config", "seed", 7, "has seed 7 and process 0 (HOST) has 0; start all processes with the same flags"),
        ("versions", "jax", "0.1", f"has jax 0.1 and process 0 (HOST) has {jax.__version__}; install the same versions on all"),
        ("code", "train/core/step.py", "beef", "has another train/core/step.py than process 0 (HOST); run the same code"),
        ("code", "train/core/old.py", "beef", "has a train/core/old.py, other than process 0 (HOST); run the same code"),
        ("environment", "XLA_FLAGS", "--xla_a", "has XLA_FLAGS='--xla_a' and process 0 (HOST) has XLA_FLAGS='"),
        ("options", "jax_default_prng_impl", "rbg", "has JAX's option jax_default_prng_impl rbg and process 0 (HOST) has threefry2x32; set"),
        ("options", "jax_of_a_later_version", True, "has JAX's option jax_of_a_later_version True and process 0 (HOST) has None; set"),
        ("devices", "instructions", [], "has a processor with other vector instructions than process 0 (HOST) ("),
        ("devices", "kind", "TPU v3", "has devices of another kind, TPU v3, than process 0 (HOST), cpu; start all"),
        ("devices", "number", 3, "has devices of another number, 3, than process 0 (HOST), 8; start all"),
    ],
)  # fmt: skip
def test_what_must_be_alike_is_refused_by_name_on_every_screen(
    group: str, path: str, value: Any, message: str
) -> None:
    first, second = agreed(lambda facts: facts[group].__setitem__(path, value))
    assert isinstance(first, agreement.AgreementError)
    host = socket.gethostname()
    assert str(first) == str(second)
    assert str(first).startswith(f"process 1 ({host}) {message.replace('HOST', host)}")


def test_control_processes_that_are_alike_agree() -> None:
    assert agreed() == [None, None]
    assert len(environment.sources()) > 150
