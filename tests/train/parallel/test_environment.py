"""Facts that decide the bits of a run: which options of JAX and which flags of XLA count, and how a change is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import pytest

from mupax.train.parallel import environment

pytestmark = pytest.mark.core


def test_every_option_of_jax_counts_but_those_that_change_no_number() -> None:
    counted = environment.options()
    assert counted.keys() == jax.config.values.keys() - environment.HARMLESS
    numeric = {
        "jax_threefry_partitionable",
        "jax_default_prng_impl",
        "jax_enable_x64",
        "jax_default_matmul_precision",
    }
    assert numeric <= counted.keys()
    assert (
        not {"jax_compilation_cache_dir", "jax_log_compiles", "jax_dump_ir_to", "jax_platforms"}
        & counted.keys()
    )
    with jax.threefry_partitionable(False):
        assert environment.options() == {**counted, "jax_threefry_partitionable": False}


def test_flags_of_xla_count_in_any_order_and_dumps_do_not(tmp_path: Path) -> None:
    def flags(text: str) -> str:
        return environment.variables({"XLA_FLAGS": text})["XLA_FLAGS"]

    assert (
        flags("--xla_b=1 --xla_dump_to=/tmp/0 --xla_a")
        == flags("--xla_a --xla_b=2 --xla_b=1")
        == "--xla_a --xla_b=1"
    )
    assert (
        flags("--xla_force_host_platform_device_count=8 --xla_cpu_collective_timeout_seconds=9")
        == ""
    )
    (tmp_path / "flags").write_text("--xla_a\n--xla_c=3\n")
    assert flags(str(tmp_path / "flags")) == "--xla_a --xla_c=3"


def test_a_processor_is_told_by_its_vector_instructions(tmp_path: Path) -> None:
    text = "processor : 0\nmodel name : Some CPU\nflags : fpu sme smep avx avx2 fma\n\nprocessor : 1\nflags : fpu\n\n"
    (tmp_path / "cpuinfo").write_text(text)
    assert environment.processor(tmp_path / "cpuinfo") == {
        "model": "Some CPU",
        "instructions": ["avx", "avx2", "fma"],
    }
    assert environment.processor(tmp_path / "none")["instructions"] == []


def record(**values: Any) -> dict[str, Any]:
    """Return a record of a run, with some facts of its environment otherwise."""
    facts = {
        "options": {"jax_enable_x64": False},
        "variables": {"XLA_FLAGS": "--xla_a"},
        "devices": {"devices": 1},
        "processor": {"instructions": ["avx", "avx2"]},
        "code": "1",
    }
    versions = {"jax": "0.10.2", "python": "3.11.7"} | values.pop("versions", {})
    return {
        "environment": facts | values,
        "versions": versions,
        "xla": {"options": {}},
        "platform": "Linux",
    }


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"options": {"jax_enable_x64": True}}, "jax_enable_x64: False -> True (bits can differ)"),
        (
            {"variables": {"XLA_FLAGS": "--xla_a --xla_b"}},
            "XLA_FLAGS: none -> --xla_b (bits can differ)",
        ),
        ({"devices": {"devices": 8}}, "devices: 1 -> 8 (bits can differ)"),
        (
            {"processor": {"instructions": ["avx"]}},
            "processor's instructions: avx2 -> none (bits can differ)",
        ),
        ({"versions": {"jax": "0.12.0"}}, "jax: 0.10.2 -> 0.12.0 (bits can differ)"),
        ({"versions": {"python": "3.13.0"}}, "python: 3.11.7 -> 3.13.0 (the bits stay the same)"),
    ],
)
def test_a_change_is_told_with_its_effect(values: dict[str, Any], line: str) -> None:
    assert [str(change) for change in environment.changes(record(), record(**values)) or ()] == [
        line
    ]


def test_what_is_alike_or_was_not_recorded_is_not_told() -> None:
    assert environment.changes(record(), record()) == []
    assert environment.changes({"versions": {"jax": "0.1"}}, record()) is None
    newer = record(versions={"jax": "0.12.0"}, options={"jax_enable_x64": False, "jax_new": 1})
    assert [change.name for change in environment.changes(record(), newer) or ()] == ["jax"]
