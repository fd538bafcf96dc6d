"""The table of peak rates answers whole names only."""

import pytest

from train import devices

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
    assert devices.peak_flops(kind) == pytest.approx(tera * 1e12)


@pytest.mark.parametrize(
    "kind",
    ["cpu", "", "TPU v5 mega", "TPU v5 lite pod", "NVIDIA H100", "NVIDIA H100 80GB HBM2e", "NVIDIA A100", "nvidia l4"],
)
def test_a_name_that_only_contains_a_known_one_is_unknown(kind):
    assert devices.peak_flops(kind) is None


def test_other_types_are_unknown():
    assert devices.peak_flops("TPU v4", "float32") is None
    assert devices.peak_flops("TPU v4", "bfloat16") is not None
