"""Steps for GPUs beside MaxText's: the record, its table, and what is refused."""

from __future__ import annotations

import importlib.util
import json

import pytest

from scripts.bench import maxtext

RECORD = json.loads(maxtext.FILE.read_text())


@pytest.mark.parametrize("says", ["no flags", "its own flags"])
def test_the_step_takes_no_more_memory_than_maxtexts(says: str) -> None:
    ours = RECORD["rows"][says]["mupax"]
    theirs = RECORD["rows"][says]["maxtext"]
    # Parameters and two moments in float32 on both sides; MaxText's have a few thousand bytes more.
    assert ours["argument_bytes"] <= theirs["argument_bytes"]
    assert ours["temporary_bytes"] <= 0.85 * theirs["temporary_bytes"]
    # The gradient of a readout of 32,000 x 2,048, summed in float32 where MaxText sums in bfloat16.
    more = 2 * 32_000 * 2_048 * 7 / 8
    assert ours["sent_bytes"] - theirs["sent_bytes"] == pytest.approx(more, rel=0.02)


def test_a_table_has_both_steps_and_their_ratios() -> None:
    def row(size: int) -> dict[str, int]:
        return {
            "argument_bytes": size,
            "temporary_bytes": 2 * size,
            "sent_bytes": 4 * size,
            "alone_bytes": size // 2,
        }

    record = {"rows": {"no flags": {"maxtext": row(2**31), "mupax": row(2**30)}}}
    assert maxtext.part(record).splitlines()[2:] == [
        "| MaxText, no flags | 4.00 |  | 8.00 |  | 1.00 |",
        "| mupax, no flags | 2.00 | 0.500 | 4.00 | 0.500 | 0.50 |",
    ]


def test_without_maxtext_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(maxtext.MaxTextError, match=r"pip install 'maxtext\[tpu\]==0\.2\.5'"):
        maxtext.main([])
