"""What the loop costs the host between two steps, measured by its bench in a short run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.bench.runs import host_overhead


@pytest.mark.alone
def test_the_host_takes_less_than_a_millisecond_per_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert host_overhead.main(["--steps", "250", "--json", str(out)]) == 0
    record = json.loads(out.read_text())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == record
    # The loop's own work, and not what other processes took from it.
    assert 0 < record["between_cpu_ms"]["median"] < 1
    assert record["dispatch_ms"]["median"] > 0


@pytest.mark.core
def test_a_run_too_short_to_count_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        host_overhead.main(["--steps", "100"])
    assert stopped.value.code == 2
    assert "write more than 101" in capsys.readouterr().err
