"""Modules that the TensorBoard mirror loads; `test_metrics.py` reads what it writes."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from mupax.train.run.report.mirrors.trackers import TensorBoard


def test_tensorboard_is_imported_without_what_it_takes_for_tensors_and_buckets(tmp_path):
    """Put a stand-in in the place of torch, which every run would load where it is installed."""
    for name in ("torch", "boto3"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('loaded')")
    program = (
        "import pathlib, sys; sys.path[:0] = sys.argv[1:]; from mupax.train.run.report.mirrors.trackers import TensorBoard; "
        "board = TensorBoard(pathlib.Path(sys.argv[1]), None); board.write({'step': 1, 'loss': 0.5}, 0.0); board.close(); "
        "sys.exit(', '.join({'torch', 'boto3', 'google.cloud.storage', 'jax', 'matplotlib'} & set(sys.modules)) or 0)"
    )
    root = Path(__file__).resolve().parents[5]
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), str(root)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_sessions_of_one_second_have_files_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1_700_000_000.0)
    for step in (1, 2, 3):
        board = TensorBoard(tmp_path, resume_step=None)
        board.write({"step": step, "loss": 1 / step}, 0.0)
        board.close()
    contents = [path.read_bytes() for path in sorted(tmp_path.iterdir())]
    assert len(contents) == 3
    assert all(b"loss" in content for content in contents)
