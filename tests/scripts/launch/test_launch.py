"""The launch scripts: what they would run (`--dry-run`), and what they refuse."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from mupax.train.config import cli
from mupax.train.config.recipes import RECIPES
from scripts import ROOT

pytestmark = pytest.mark.core

FOLDER = ROOT / "scripts" / "launch"
WORDS = ("lm-1b", "--workdir", "/shared/run", "--mesh.fsdp", "-1", "--mesh.data", "2", "--resume")
"""What every script must start in the end; --resume is added by the scripts."""

RESTART = ("--restart", "5")
"""Of the scripts whose scheduler does not start a run again."""


def launch(script: str, flags: str, *words: str, code: int = 0) -> str:
    """Run a script with flags, and words after them, and return what it prints."""
    command = [str(FOLDER / script), *shlex.split(flags), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd="/")
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def train_words(line: str) -> tuple[str, ...]:
    """The words after `-m train` of a command line."""
    words = shlex.split(line)
    return tuple(words[words.index("train") + 1 :])


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.sh")), ids=lambda path: path.name)
def test_scripts_are_sound_shell(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True)
    if checker := shutil.which("shellcheck"):
        subprocess.run([checker, str(path)], check=True)
    assert path.stat().st_mode & 0o111


def test_what_they_start_is_a_command_line_of_this_project() -> None:
    command = cli.parse("lm-1b", RECIPES["lm-1b"], [*WORDS[1:], *RESTART])
    config = command.config
    assert (config.mesh.fsdp, config.mesh.data, config.resume, command.restart) == (-1, 2, True, 5)


def test_slurm() -> None:
    flags = "--nodes 4 --gpus 8 --partition big --dry-run --"
    lines = launch("slurm.sh", flags, *WORDS[:-1]).splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    for option in (
        "nodes=4",
        "ntasks-per-node=1",
        "gpus-per-node=8",
        "partition=big",
        "signal=TERM@120",
    ):
        assert f"#SBATCH --{option}" in lines
    assert lines[-1].startswith("srun --kill-on-bad-exit=1 ")
    assert train_words(lines[-1]) == (*WORDS, *RESTART)
    assert "gpus-per-node" not in launch("slurm.sh", "--nodes 4 --gpus 0 --dry-run -- lm-1b")


def test_tpu_vm() -> None:
    flags = "--tpu pod --zone z --project p --dry-run --"
    output = launch("tpu_vm.sh", flags, *WORDS[:-1], "--seed", "1 2")
    archive, copy, install, run = output.splitlines()
    assert shlex.split(archive)[:2] == ["git", "archive"]
    for line in (copy, install, run):
        assert {"--zone=z", "--worker=all", "--project=p"} <= set(shlex.split(line))
    assert "uv pip install" in shlex.split(install)[-1]
    command = shlex.split(run)[-1].removeprefix("--command=")
    assert train_words(command) == (*WORDS[:-1], "--seed", "1 2", "--resume", *RESTART)


def test_gke() -> None:
    flags = "--name run --image r.io/p/m:1 --accelerator tpu-v5-lite-podslice --topology 16x16 --hosts 64 --chips 4 --slices 2"
    output = launch("gke.sh", f"{flags} --claim disk --dry-run --", *WORDS[:-1])
    assert "@" not in output
    jobset = yaml.safe_load(output)
    assert (jobset["kind"], jobset["metadata"]["name"]) == ("JobSet", "run")
    (job,) = jobset["spec"]["replicatedJobs"]
    assert (job["replicas"], job["template"]["spec"]["completions"]) == (2, 64)
    pod = job["template"]["spec"]["template"]["spec"]
    assert pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == "16x16"
    assert pod["volumes"] == [{"name": "shared", "persistentVolumeClaim": {"claimName": "disk"}}]
    (container,) = pod["containers"]
    assert container["image"] == "r.io/p/m:1"
    assert container["resources"]["limits"] == {"google.com/tpu": 4}
    assert train_words(container["command"][2]) == WORDS
    assert yaml.safe_load(launch("gke.sh", f"{flags} --dry-run -- lm-1b"))

    flags = "--xpk c --name run --image i --topology v5litepod-256 --slices 2 --dry-run --"
    output = launch("gke.sh", flags, *WORDS[:-1])
    words = shlex.split(output)
    assert words[:3] == ["xpk", "workload", "create"]
    assert {"--cluster=c", "--tpu-type=v5litepod-256", "--num-slices=2"} <= set(words)
    assert train_words(words[-1].removeprefix("--command=")) == WORDS


@pytest.mark.parametrize(
    ("script", "words", "message"),
    [
        ("slurm.sh", "--gpus 8 -- lm-1b", "error: --nodes is missing"),
        ("slurm.sh", "--nodes 2 --gpus 8", "error: the recipe is missing; write it after --"),
        (
            "slurm.sh",
            "--node 2",
            "error: no option is named --node; the recipe and its flags come after --",
        ),
        ("slurm.sh", "--nodes", "error: --nodes needs a value after it"),
        ("tpu_vm.sh", "--tpu a -- lm-1b", "error: --zone is missing"),
        ("gke.sh", "--name r --image i --topology 4x4 -- lm-1b", "error: --accelerator is missing"),
        ("gke.sh", "--name r; --xpk c --image i --topology t", "error: the recipe is missing"),
    ],
)
def test_what_is_missing_is_said_with_the_usage(script: str, words: str, message: str) -> None:
    text = launch(script, words, code=2)
    assert text.splitlines()[-1].startswith(message)
    assert f"scripts/launch/{script} --" in text


def test_a_name_that_would_change_the_template_is_refused() -> None:
    flags = "--image i --accelerator a --topology 4x4 --hosts 4 --chips 4 --dry-run -- x"
    refused = launch("gke.sh", f'--name "a\'b" {flags}', code=2)
    assert "error: a'b has a character that no name here has" in refused
