"""The rows of steps compiled for pods: what a report becomes, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.bench import commits, tpu

SHAPE = "8 B, v5e:16x16, 1x4096"


def collective(kind: str, sent: float, alone: float, gathers: bool = False) -> dict[str, Any]:
    return {"kind": kind, "wire_bytes": sent, "alone_bytes": alone, "gathers": gathers}


REPORT = {
    "fits": True,
    "hbm_bytes_per_device": 16 * 2**30,
    "peak_bytes_per_device": 3 * 2**30,
    "problems": [],
    "estimated_cycles": 2_000_000_000,
    "argument_bytes_per_device": 190_000_000,
    "temporary_bytes_per_device": 2_175_000_000,
    "collectives": [
        collective("all-reduce", 20e9, 5e9),
        collective("reduce-scatter", 3e9, 1e9),
        collective("all-gather", 9e9, 9e9),
        collective("all-reduce", 2e9, 2e9, gathers=True),
    ],
    "roofline": {"step_seconds": 1.5},
    "jax": "0.10.2",
}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the committed rows without those of Muon, in the checkout of another commit."""
    copy = tmp_path / "tpu.json"
    copy.write_text(json.dumps(json.loads(tpu.FILE.read_text()) | {"muon": []}))
    monkeypatch.setattr(tpu, "FILE", copy)
    monkeypatch.setattr(commits, "head", lambda _: {"commit": "abc1234", "date": "2026-01-02"})
    return copy


def test_a_report_is_added_and_shown(file: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    report.write_text(json.dumps(REPORT))
    assert tpu.main(["--json", str(report), "--shape", SHAPE, "--says", "half of it"]) == 0
    added = json.loads(file.read_text())
    assert added["rows"][-1]["says"] == "half of it"
    # Of MaxText's 2.517e9 cycles, 0.380 and 4.35 GB; what is gathered is no sum.
    shown = (
        "| half of it | 2.000e9 | 0.795 | 0.50 | 2.17 | 0.50 | 17.0 + 6.0 | abc1234, 2026-01-02 |"
    )
    lines = tpu.part(added).splitlines()
    assert lines.index(
        f"| {SHAPE}, MaxText | 2.517e9 |  | 0.380 GB | 4.35 |  |  |  |"
    ) < lines.index(shown)
    assert lines.index(shown) < next(
        i for i, line in enumerate(lines) if line.startswith("| 8 B, v6e:16x16")
    )


def test_a_step_with_muon_is_shown_beside_the_same_step_with_adamw(
    file: Path, tmp_path: Path
) -> None:
    muon = REPORT | {
        "estimated_cycles": 2_100_000_000,
        "temporary_bytes_per_device": 2_392_500_000,
        "collectives": [*REPORT["collectives"], collective("all-to-all", 2**29, 0.0)],
    }
    for name, report in {"muon": muon, "adamw": REPORT}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(report))
    flags = "lm-8b --topology v5e:16x16"
    files = ["--json", str(tmp_path / "muon.json"), "--adamw", str(tmp_path / "adamw.json")]
    # A second report of the same step replaces the first.
    for _ in range(2):
        assert tpu.main([*files, "--shape", flags]) == 0
    added = json.loads(file.read_text())
    (row,) = added["muon"]
    assert (row["muon"]["problems"], row["adamw"]["problems"]) == (0, 0)
    assert tpu.muon_part(added).splitlines()[-1] == (
        f"| `{flags}` | 1.050 | 2.23 | 1.100 | +0.50 | 3.00 of 16 |"
    )


@pytest.mark.parametrize(
    ("report", "shape", "message"),
    [
        (
            REPORT,
            "8 B, v5e:8x8",
            "no shape is named '8 B, v5e:8x8'; write one of 1.2 B, v5e:4x4, 4x2048, ",
        ),
        (REPORT | {"fits": False}, SHAPE, "is of a step that does not fit"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    report: dict[str, Any],
    shape: str,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = tpu.FILE.read_text()
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report))
    with pytest.raises(SystemExit):
        tpu.main(["--json", str(path), "--shape", shape, "--says", "x"])
    assert message in capsys.readouterr().err
    assert tpu.FILE.read_text() == before
