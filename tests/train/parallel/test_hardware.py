"""The table of peak rates answers whole names only; and what the C library does with freed memory."""

import subprocess
import sys
from pathlib import Path

import pytest

from mupax.train.parallel import hardware

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    ("kind", "tera"),
    [
        ("TPU v4", 275),
        ("TPU v5 lite", 197),
        ("TPU v5", 459),
        ("TPU v6 lite", 918),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989.4),
        ("NVIDIA L4", 121),
    ],
)
def test_known_devices(kind, tera):
    assert hardware.peak_flops(kind) == pytest.approx(tera * 1e12)


@pytest.mark.parametrize(
    "kind",
    [
        "cpu",
        "",
        "TPU v5 mega",
        "TPU v5 lite pod",
        "NVIDIA H100",
        "NVIDIA H100 80GB HBM2e",
        "NVIDIA A100",
        "nvidia l4",
    ],
)
def test_a_name_that_only_contains_a_known_one_is_unknown(kind):
    assert hardware.peak_flops(kind) is None


def test_other_types_are_unknown():
    assert hardware.peak_flops("TPU v4", "float32") is None
    assert hardware.peak_flops("TPU v4", "bfloat16") is not None


class Device:
    def __init__(self, stats):
        self.stats = stats

    def memory_stats(self):
        return self.stats


def test_memory_peak_is_that_of_the_fullest_device():
    devices_ = [
        Device({"peak_bytes_in_use": 3, "bytes_in_use": 2}),
        Device({"peak_bytes_in_use": 7}),
        Device(None),
    ]
    assert hardware.memory_peak(devices_) == 7


def test_memory_is_unknown_where_no_device_counts_it():
    assert hardware.memory_peak([Device(None), Device({})]) is None


PROGRAM = """
import resource, sys, threading
from mupax.train.parallel import hardware

assert hardware.keep_freed_memory() if "keep" in sys.argv else True

def steps():
    for _ in range(4):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        b"x" * taken
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

faults, taken = [], 80 * 2**20
thread = threading.Thread(target=steps)
thread.start()
thread.join()
sys.modules["jax"] = None
assert not hardware.keep_freed_memory()  # too late
print(faults[-1])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
@pytest.mark.parametrize(("word", "pages"), [("keep", range(100)), ("control", range(1000, 10**6))])
def test_freed_memory_comes_back_without_page_faults(word: str, pages: range):
    root = Path(__file__).resolve().parents[3]
    command = [sys.executable, "-c", PROGRAM, word]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60, check=True)
    assert int(done.stdout) in pages
