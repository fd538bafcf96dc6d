"""The table of peak rates answers whole names only."""

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
    ["cpu", "", "TPU v5 mega", "TPU v5 lite pod", "NVIDIA H100", "NVIDIA H100 80GB HBM2e", "NVIDIA A100", "nvidia l4"],
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
    devices_ = [Device({"peak_bytes_in_use": 3, "bytes_in_use": 2}), Device({"peak_bytes_in_use": 7}), Device(None)]
    assert hardware.memory_peak(devices_) == 7


def test_memory_is_unknown_where_no_device_counts_it():
    assert hardware.memory_peak([Device(None), Device({})]) is None
