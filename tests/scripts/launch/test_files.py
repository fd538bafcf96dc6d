"""Files and commands for SkyPilot, JobSet and XPK, as these projects read them."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mupax.train.config import cli
from mupax.train.config.recipes import RECIPES
from tests.scripts.launch.conftest import ROOT

pytestmark = pytest.mark.schedulers

FOLDER = ROOT / "scripts/launch"
GKE = "--name run --image r.io/p/m:1 --accelerator tpu-v5-lite-podslice --topology 16x16 --hosts 64 --chips 4 --slices 2"
XPK = "--xpk cluster --name run --image r.io/p/m:1 --topology v5litepod-256 --slices 2"

SKYPILOT = """
import json, sys, sky
task = sky.Task.from_yaml(sys.argv[1])
(resources,) = task.resources
print(json.dumps([task.num_nodes, resources.use_spot, resources.job_recovery, task.run, task.envs]))
"""
# A field that the models do not know is left out of what they give back; None is not written there.
JOBSET = """
import json, sys, yaml
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

def lost(wanted, read, path):
    if isinstance(wanted, dict):
        return [name for key in wanted for name in lost(wanted[key], (read or {}).get(key), f"{path}.{key}")]
    if isinstance(wanted, list):
        return [name for i, item in enumerate(wanted) for name in lost(item, read[i] if read else None, f"{path}[{i}]")]
    return [] if wanted == read or str(wanted) == str(read) else [path]

for path in sys.argv[1:]:
    wanted = yaml.safe_load(open(path))
    try:
        print(json.dumps(lost(wanted, JobsetV1alpha2JobSet.from_dict(wanted).to_dict(), "")))
    except ValueError as error:
        print(json.dumps([str(error)]))
"""
PARSED = """
import argparse, json, sys
from xpk.parser.core import set_parser
parser = argparse.ArgumentParser()
set_parser(parser=parser)
read = parser.parse_args(sys.argv[1:])
print(json.dumps([read.xpk_subcommands, read.tpu_type, read.num_slices, read.max_restarts, read.command]))
"""


def run(packages: Path, program: str, *words: str, home: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(packages), "HOME": str(home)}
    command = [sys.executable, "-c", program, *words]
    return subprocess.run(
        command, env=environment, cwd=home, capture_output=True, text=True, timeout=120
    )


def script(*words: str) -> str:
    done = subprocess.run(
        [str(FOLDER / "gke.sh"), *words], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout


def config(words: list[str]) -> Any:
    """The command of a recipe's command line, which must be one."""
    return cli.parse(words[0], RECIPES[words[0]], words[1:])


def test_skypilot(tool: Callable[..., Path], tmp_path: Path) -> None:
    packages = tool("skypilot")
    text = (FOLDER / "skypilot.yaml").read_text()
    done = run(packages, SKYPILOT, str(FOLDER / "skypilot.yaml"), home=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    nodes, spot, recovery, command, variables = json.loads(done.stdout.splitlines()[-1])
    assert (nodes, spot, recovery["strategy"]) == (2, True, "EAGER_NEXT_REGION")
    assert variables["WORKDIR"].startswith("gs://")

    told = {
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_RANK": "1",
    }
    shown = command.replace("exec .venv/bin/python -u -m train", r"printf '%s\n'")
    assert shown != command
    done = subprocess.run(
        ["bash", "-c", shown], env={**variables, **told}, capture_output=True, text=True, check=True
    )
    words = done.stdout.splitlines()
    words[words.index("--workdir") + 1] = "run"
    parsed = config(words)
    assert (parsed.restart, parsed.config.resume) == (5, True)
    place = parsed.config.distributed
    assert (place.coordinator, place.processes, place.process) == ("10.0.0.1:9911", 2, 1)

    (tmp_path / "wrong.yaml").write_text(text.replace("use_spot", "use_sput"))
    done = run(packages, SKYPILOT, str(tmp_path / "wrong.yaml"), home=tmp_path)
    assert done.returncode != 0
    assert "use_sput" in done.stderr


def test_jobset(tool: Callable[..., Path], tmp_path: Path) -> None:
    text = script(
        *GKE.split(), "--claim", "disk", "--dry-run", "--", "lm-1b", "--workdir", "/shared/run"
    )
    files = {
        ("", ""): "",
        ("maxRestarts:", "maxRestart:"): ".spec.failurePolicy.maxRestart",
        (
            "terminationGracePeriodSeconds: 300",
            "terminationGracePeriodSeconds: long",
        ): "terminationGracePeriodSeconds",
        ("- containerPort: 8471", "- port: 8471"): "containers[0].ports[0].port",
    }
    paths = [tmp_path / f"{number}.yaml" for number in range(len(files))]
    for path, (right, wrong) in zip(paths, files, strict=True):
        assert right in text
        path.write_text(text.replace(right, wrong) if right else text)
    done = run(tool("jobset"), JOBSET, *map(str, paths), home=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    read, *refused = map(json.loads, done.stdout.splitlines())
    assert read == []
    for field, errors in zip([*files.values()][1:], refused, strict=True):
        assert len(errors) == 1
        assert field in errors[0]


def test_xpk(tool: Callable[..., Path], tmp_path: Path) -> None:
    xpk_command = script(
        *XPK.split(), "--dry-run", "--", "lm-1b", "--workdir", "run", "--mesh.fsdp", "-1"
    )
    program, *words = shlex.split(xpk_command)
    done = run(tool("xpk"), PARSED, *words, home=tmp_path)
    assert (program, done.returncode) == ("xpk", 0), done.stderr[-3000:]
    *read, command = json.loads(done.stdout.splitlines()[-1])
    assert read == ["workload", "v5litepod-256", 2, "10"]
    words_of_run = shlex.split(command)
    assert config(words_of_run[words_of_run.index("train") + 1 :]).config.resume

    done = run(
        tool("xpk"),
        PARSED,
        *(word.replace("--tpu-type", "--tpu-tipe") for word in words),
        home=tmp_path,
    )
    assert done.returncode == 2
    assert "--tpu-type" in done.stderr
