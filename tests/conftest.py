"""Tests run on eight virtual CPU devices, so that sharding is tested everywhere."""

from __future__ import annotations

import gc
import importlib.util
import json
import math
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.fixtures.xla import LEVEL, QUICKLY

DEVICES = 8
ROOT = Path(__file__).resolve().parent.parent
COSTS = Path(__file__).with_name("costs.json")
"""Processor seconds of each test file with its children; `pytest --costs` measures them."""
QUICK_SECONDS = 2.5
"""Cost of a file up to which `make quick` has its core tests."""
OTHER_VERSIONS_SECONDS = 5.5
"""Cost of a file up to which `make core` has its core tests; the Makefile names more folders."""

# Read once, when JAX or a BLAS is first imported; the tests' own threads are enough for the cores.
_USER_FLAGS = os.environ.get("XLA_FLAGS", "")
_FLAGS = [
    _USER_FLAGS,
    *(() if LEVEL in _USER_FLAGS else QUICKLY),
    f"--xla_force_host_platform_device_count={DEVICES}",
]
os.environ["XLA_FLAGS"] = " ".join(_FLAGS).strip()
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["MPLBACKEND"] = "agg"
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Prepared data and compiled programs stay in the checkout, for the next run, for other workers and
# for every process that a test starts.
os.environ["MUPAX_DATA"] = str(ROOT / ".cache" / "data")
# Tuned presets and settings of whoever runs the tests must not reach them.
os.environ["MUPAX_HOME"] = str(ROOT / ".cache" / "home")
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(ROOT / ".cache" / "jax")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

# A container may forbid it: then every process that a test starts would compile our modules again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# `nohup` ignores the first and a shell's `&` the second, and child processes would inherit that.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest  # noqa: E402

# Tracing makes hundreds of thousands of lasting objects; collecting took a fifth of its time.
gc.set_threshold(100_000, 50, 100)


@pytest.fixture(scope="module", autouse=True)
def programs_end_with_their_module(request: pytest.FixtureRequest) -> Iterator[None]:
    """Free compiled programs, whose memory maps would come to more than Linux gives a process."""
    if "jax" in sys.modules:  # tests of presets run without
        import jax

        assert jax.device_count() == DEVICES  # a skip would hide it
    yield
    if "jax" in sys.modules:
        for value in vars(request.module).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()
        sys.modules["jax"].clear_caches()
        gc.collect()


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name bytes by their argument: compressed bytes hold the time, and workers must agree."""
    return argname if isinstance(val, bytes) else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--costs", action="store_true", help=f"write what each test file costs to {COSTS.name}"
    )


def file_of(item: pytest.Item) -> str:
    return item.path.relative_to(ROOT).as_posix()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort dear files first, so that no worker begins one last, and set marks by cost."""
    costs = json.loads(COSTS.read_text())
    items.sort(key=lambda item: -costs.get(file_of(item), math.inf))
    libtpu = importlib.util.find_spec("libtpu")
    cuda = importlib.util.find_spec("jax_cuda12_plugin")
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        cost = costs.get(file_of(item), math.inf)
        if "core" in marks and "slow" not in marks and cost <= QUICK_SECONDS:
            item.add_marker("quick")
        if "core" in marks and cost <= OTHER_VERSIONS_SECONDS:
            item.add_marker("versions")
        # `make tpu` brings the compiler; a run of everything does without.
        if "tpu" in marks and libtpu is None:
            item.add_marker(
                pytest.mark.skip(reason="libtpu, the TPU compiler, is not installed (make tpu)")
            )
        if "gpu" in marks and cuda is None:
            item.add_marker(
                pytest.mark.skip(reason="the CUDA plugin of JAX is not installed (make gpu)")
            )


def pytest_collection_finish() -> None:
    gc.freeze()  # modules and tests stay to the end


_spent: Counter[str] = Counter()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    before = sum(os.times()[:4])
    result = yield
    _spent[file_of(item)] += sum(os.times()[:4]) - before
    return result


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add the costs of the files of a worker of pytest-xdist."""
    _spent.update(getattr(node, "workeroutput", {}).get("spent", {}))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["spent"] = dict(_spent)
    elif session.config.getoption("--costs"):
        costs = json.loads(COSTS.read_text()) | {
            path: round(seconds, 1) for path, seconds in _spent.items()
        }
        lines = sorted(
            f"{json.dumps(path)}: {cost}" for path, cost in costs.items() if (ROOT / path).is_file()
        )
        COSTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
