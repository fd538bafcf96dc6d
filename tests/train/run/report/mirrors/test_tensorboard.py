"""Modules that the TensorBoard mirror loads; `test_metrics.py` reads what it writes."""

import subprocess
import sys
from pathlib import Path


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
