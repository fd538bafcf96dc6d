"""Every test runs on eight virtual CPU devices, so that sharding is tested wherever the tests are."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

DEVICES = 8
ROOT = Path(__file__).resolve().parent.parent

# Read once, when JAX or a BLAS is first imported; the tests' own threads are enough for the cores.
# Hundreds of small programs: without LLVM's optimizations compiling them takes a third of the time. `make core` leaves them on.
LEVEL = "--xla_backend_optimization_level"
_GIVEN = os.environ.get("XLA_FLAGS", "")
_FLAGS = [_GIVEN, *([] if LEVEL in _GIVEN else [f"{LEVEL}=0"]), f"--xla_force_host_platform_device_count={DEVICES}"]
os.environ["XLA_FLAGS"] = " ".join(_FLAGS).strip()
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["MPLBACKEND"] = "agg"
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Prepared data and compiled programs stay in the checkout: away from what its owner uses, and there for the next run,
# the other worker and every process that a test starts.
os.environ["MUPAX_DATA"] = str(ROOT / ".cache" / "data")
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(ROOT / ".cache" / "jax")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.5"

import pytest  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def programs_end_with_their_module(request: pytest.FixtureRequest) -> Iterator[None]:
    """Thousands of compiled programs, each some memory maps, would come to more of those than Linux gives a process."""
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`make tpu` brings the TPU compiler; a run of everything does without."""
    if importlib.util.find_spec("libtpu") is None:
        for item in items:
            if item.get_closest_marker("tpu"):
                item.add_marker(pytest.mark.skip(reason="libtpu, the TPU compiler, is not installed (make tpu)"))
