"""Runs as a person starts them, through the command line: what they write, print and return. Tiny models, a small text."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import gzip
import io
import json
import os
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout

from mupax.__main__ import main
from mupax.train.config.metrics import METRICS, row_name
from mupax.train.config.record import from_json
from mupax.train.core import step as core_step
from mupax.train.core.program import Program
from mupax.train.core.state import TrainState
from mupax.train.run.report import metrics
from mupax.zoo import families
from mupax.zoo.configs import ModelConfig
from tests.fixtures.programs import own_programs, shared_programs

__all__ = ["own_programs", "shared_programs"]  # fixtures

ROOT = Path(__file__).resolve().parents[3]
STEPS = 6
TINY = (
    "--model.width 16 --model.depth 1 --model.num-heads 2 --model.seq-len 16 --data.batch-size 16 --data.eval-batch-size 64 "
    f"--data.eval-examples 100 --optimizer.warmup-steps 2 --log.eval-every-steps 4 --checkpoint.every-steps 2 --steps {STEPS} "
    "--log.no-samples"
)
"""A decoder of 11 thousand parameters; 100 evaluation windows do not fill two batches of 64."""


@dataclasses.dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An empty folder with a text of short lines; prepared data lies in it too."""
    path = tmp_path_factory.mktemp("run")
    words, choose = (
        ("def", "return", "import", "class", "self", "value", "lambda", "yield", "while", "None"),
        random.Random(0),
    )
    (path / "text.txt").write_text(
        "\n".join(" ".join(choose.choice(words) for _ in range(9)) for _ in range(600))
    )
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(path):
        patch.setenv("MUPAX_DATA", str(path / "cache"))
        yield path


def train(*words: str, recipe: str = "lm-tiny", tiny: str = TINY) -> Done:
    """A run in this process, on its eight devices."""
    source = ["--data.name", "text:text.txt"] if recipe == "lm-tiny" else []
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["train", recipe, *source, *tiny.split(), *words])
    return Done(code, out.getvalue(), err.getvalue())


def elsewhere(words: Sequence[str], *, devices: int) -> Done:
    """The same in a process of its own, with so many devices."""
    environment = {
        **os.environ,
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": str(ROOT),
    }
    command = [
        sys.executable,
        "-m",
        "train",
        "lm-tiny",
        "--data.name",
        "text:text.txt",
        *TINY.split(),
        *words,
    ]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Done:
    """The run that the others are compared with."""
    return train("--workdir", "plain", tiny=TINY.replace("--log.no-samples", "--log.samples"))


def tiny_model(workdir: str) -> ModelConfig:
    return from_json(json.loads(Path(workdir, "config.json").read_text())["config"]).model


def rows(workdir: str) -> list[dict[str, Any]]:
    return [row for row in metrics.read(Path(workdir) / "metrics.jsonl") if "loss" in row]


def evaluations(workdir: str) -> list[dict[str, Any]]:
    return [row for row in metrics.read(Path(workdir) / "metrics.jsonl") if "eval_loss" in row]


# What a run leaves


def test_a_z_loss_is_trained_and_has_a_row(plain: Done) -> None:
    done = train("--workdir", "z", "--z-loss", "1e-4")
    assert (plain.code, done.code) == (0, 0), done.err
    assert json.loads(Path("z/config.json").read_text())["config"]["z_loss"] == 1e-4
    with_z, without = rows("z"), rows("plain")
    # Before its weight, and at first nearly the loss squared: targets' logits are 0 on average. The loss is without it.
    assert with_z[0]["logit_z_loss"] == pytest.approx(with_z[0]["loss"] ** 2, rel=0.2)
    assert with_z[0]["loss"] == without[0]["loss"]
    assert [row["loss"] for row in with_z] == pytest.approx(
        [row["loss"] for row in without], rel=0.02
    )
    # The controls: no row without it, and other weights with it.
    assert not any("logit_z_loss" in row for row in without)
    assert evaluations("z")[-1]["eval_loss"] != evaluations("plain")[-1]["eval_loss"]


@pytest.mark.core
def test_a_run_ends_well(plain: Done) -> None:
    assert plain.code == 0
    assert not plain.err
    assert f"{STEPS} steps done" in plain.out
    assert "parameters under mup relative to lm-proxy" in plain.out


@pytest.mark.core
def test_metrics_have_a_row_per_step_and_per_evaluation(plain: Done) -> None:
    training_names = {name for name, metric in METRICS.items() if metric.in_training}
    assert training_names >= {"loss", "loss_per_byte", "accuracy"}
    steps = rows("plain")
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    for row in steps:
        assert row.keys() == {"step", "lr", "grad_norm", "tokens", "seconds"} | training_names
        assert row["tokens"] == 16 * 16
        assert row["loss"] > 0 < row["grad_norm"]
    assert steps[0]["lr"] == pytest.approx(steps[1]["lr"] / 2)
    assert steps[-1]["loss"] < steps[0]["loss"] - 1
    evaluation_names = {
        row_name(name) for name, metric in METRICS.items() if metric.shown != "eval"
    }
    assert evaluation_names >= {"eval_loss", "eval_loss_per_byte", "eval_accuracy"}
    records = evaluations("plain")
    assert [row["step"] for row in records] == [4, STEPS]
    for row in records:
        assert row.keys() == {"step"} | evaluation_names
        assert 0 < row["eval_accuracy"] < 1
    assert records[1]["eval_loss"] < records[0]["eval_loss"] < steps[0]["loss"]


@pytest.mark.core
def test_a_run_says_how_fast_it_went(plain: Done) -> None:
    speeds = [row for row in metrics.read(Path("plain/metrics.jsonl")) if "perf_data_wait" in row]
    before = 1  # The first step, which warms up, is left out.
    for row in speeds:  # One, or on a slow machine one every ten seconds.
        seconds = sorted(
            each["seconds"] for each in rows("plain") if before < each["step"] <= row["step"]
        )
        assert row["perf_step_seconds_p50"] == pytest.approx(
            seconds[(len(seconds) - 1) // 2], rel=1e-3
        )
        assert row["perf_step_seconds_p99"] == pytest.approx(seconds[-1], rel=1e-3)
        flops_per_second = (
            len(seconds) * 256 * families.train_flops(tiny_model("plain")) / sum(seconds)
        )
        assert row["perf_flops_per_second"] == pytest.approx(flops_per_second, rel=1e-2)
        assert 0 <= row["perf_data_wait"] < 1
        # No peak is known of this machine, and it does not count memory.
        assert not {"perf_mfu", "perf_memory_peak_bytes"} & row.keys()
        before = row["step"]
    assert before == STEPS
    assert ["perf_compile_seconds" in row for row in speeds] == [True, *[False] * (len(speeds) - 1)]
    for words in ("FLOP/s", "median, p90", "waiting for data", "compile"):
        assert words in plain.out


@pytest.mark.core
def test_a_profile_of_the_steps_asked_for(folder: Path) -> None:
    done = train(
        "--workdir", "profiled", "--profile", "2:4", "--steps", "4", "--log.no-tensorboard"
    )
    assert done.code == 0, done.err
    (trace,), (timeline,) = (
        list(Path("profiled/profile").rglob(f"*{end}")) for end in (".xplane.pb", ".trace.json.gz")
    )
    assert trace.stat().st_size > 1000
    events = json.loads(gzip.decompress(timeline.read_bytes()))["traceEvents"]
    steps = {int(event["args"]["step_num"]) for event in events if event.get("name") == "train"}
    assert steps == {2, 3}
    output = " ".join(done.out.split())
    assert "profile from step 2 in" in output
    assert "xprof --port" in output


@pytest.mark.core
def test_the_files_of_a_run(plain: Done) -> None:
    left = {path.name for path in Path("plain").iterdir()}
    assert left == {
        ".lock",
        "assets",
        "config.json",
        "metrics.jsonl",
        "tensorboard",
        "checkpoints",
        "loss.png",
        "sample.txt",
    }
    assert Path("plain/loss.png").read_bytes().startswith(b"\x89PNG")
    (command,) = re.findall(r"^next +(.+)$", plain.out, re.MULTILINE)
    *_, flag, prompt = shlex.split(command)
    assert flag == "--prompt"
    assert (
        f" {prompt} " in f" {' '.join(Path('text.txt').read_text().split())} "
    )  # whole words of the text
    assert Path("plain/sample.txt").read_text().startswith(prompt)
    assert len(Path("plain/sample.txt").read_text()) > 100
    assert list(Path("plain/tensorboard").glob("events.*"))


@pytest.mark.core
def test_the_record_says_how_the_run_was_made(plain: Done) -> None:
    record = json.loads(Path("plain/config.json").read_text())
    config = from_json(record["config"])
    assert (config.recipe, config.steps, config.model.width, config.data.name) == (
        "lm-tiny",
        STEPS,
        16,
        "text:text.txt",
    )
    assert record["versions"].keys() >= {"python", "jax", "flax", "optax", "mupax"}
    assert all(
        version for name, version in record["versions"].items() if name != "mupax"
    )  # not installed in a checkout
    assert record["data"]["digest"]
    assert record["xla"] == {
        "options": {},
        "XLA_FLAGS": os.environ["XLA_FLAGS"],
        "LIBTPU_INIT_ARGS": "",
    }
    assert "mup" in record["preset"]
    assert record["git"] is None or len(record["git"].removesuffix("-dirty")) == 40


@pytest.mark.core
def test_the_summary_has_the_references_and_the_files(plain: Done) -> None:
    for words in (
        "evaluation loss",
        "nats/byte",
        "byte trigram",
        "byte 4-gram",
        "loss.png",
        "sample.txt",
        "metrics.jsonl",
    ):
        assert words in plain.out


def test_a_vision_run_leaves_a_picture(folder: Path) -> None:
    tiny = (
        "--model.width 16 --model.depth 1 --model.num-heads 2 --data.batch-size 16 --steps 4 --optimizer.warmup-steps 2 "
        "--optimizer.name sgd --optimizer.peak-lr 0.1 --checkpoint.every-steps 4 --model.pool cls --model.centered"
    )
    done = train("--workdir", "images", recipe="vit-digits", tiny=tiny)
    assert done.code == 0, done.err
    steps = rows("images")
    assert [row["images"] for row in steps] == [16] * 4
    assert steps[0]["loss"] == pytest.approx(2.302585, rel=1e-5)  # centred: uniform over ten digits
    assert steps[0]["loss"] != steps[3]["loss"]
    assert Path("images/predictions.png").read_bytes().startswith(b"\x89PNG")
    assert "logistic regression" in done.out.lower()


# Layouts


@pytest.mark.usefixtures("own_programs")
def test_a_state_that_lies_as_the_compiler_likes_trains_alike(
    plain: Done, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on TPU. Here the choice is made up: every matrix the other way round."""

    def reversed_(leaf: jax.ShapeDtypeStruct) -> Format:
        return Format(Layout(tuple(range(leaf.ndim))[::-1]), leaf.sharding)

    orders: list[tuple[int, ...]] = []

    def placed(self: Program, start: TrainState, step: jax.stages.Compiled) -> TrainState:
        state = unpatched(self, start, step)
        orders.extend(
            leaf.format.layout.major_to_minor for leaf in jax.tree.leaves(state) if leaf.ndim > 1
        )
        return state

    unpatched = Program.placed
    monkeypatch.setattr(Program, "placed", placed)
    monkeypatch.setattr(Program, "free", True)
    monkeypatch.setattr(core_step, "free_format", reversed_)
    assert train("--workdir", "free").code == 0
    assert orders
    assert all(order == tuple(range(len(order)))[::-1] for order in orders)
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(
            [r[name] for r in rows("free")], [r[name] for r in rows("plain")], rtol=1e-5
        )
    got, want = evaluations("free"), evaluations("plain")
    assert [r["eval_loss"] for r in got] == pytest.approx([r["eval_loss"] for r in want], rel=1e-5)
    orders.clear()
    words = ("--resume", "--resume-change", "schedule", "--steps", str(STEPS + 1))
    assert train("--workdir", "free", *words).code == 0
    assert orders


@pytest.mark.usefixtures("own_programs")
def test_a_run_traces_its_step_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps, evaluations, checkpoints and a learning rate that changes with every step: one trace, one program."""
    make, traced = core_step.make_train_step, []

    def counted(*arguments: Any) -> Any:
        step = chex.assert_max_traces(make(*arguments), n=1)
        traced.append(step)
        return step

    monkeypatch.setattr(core_step, "make_train_step", counted)
    assert train("--workdir", "traced").code == 0
    assert len(traced) == 1


def test_control_a_second_trace_is_an_error() -> None:
    step = jax.jit(chex.assert_max_traces(lambda x: 2 * x, n=1))
    step(np.ones(2))
    with pytest.raises(AssertionError, match="traced > 1 times"):
        step(np.ones(3))


# The same run otherwise


def losses(workdir: str) -> list[float]:
    return [row["loss"] for row in rows(workdir)]


@pytest.mark.core
def test_accumulation_from_the_command_line(plain: Done) -> None:
    done = train("--workdir", "accumulated", "--accumulation-steps", "2")
    assert done.code == 0, done.err
    # float32 sums in another order, five Adam steps long.
    assert losses("accumulated") == pytest.approx(losses("plain"), rel=1e-3)
    assert losses("accumulated")[0] == pytest.approx(losses("plain")[0], rel=1e-6)
    assert [row["tokens"] for row in rows("accumulated")] == [256] * STEPS
    assert not Path("accumulated/sample.txt").exists()


def test_two_devices_from_the_command_line(plain: Done) -> None:
    done = elsewhere(["--workdir", "two", "--mesh.data", "1", "--mesh.fsdp", "2"], devices=2)
    assert done.code == 0, done.err
    assert not done.err
    assert "fsdp 2" in done.out
    assert losses("two") == pytest.approx(losses("plain"), rel=1e-3)
    assert losses("two")[0] == pytest.approx(losses("plain")[0], rel=1e-6)


def test_the_same_words_give_the_same_numbers(plain: Done) -> None:
    assert train("--workdir", "again", "--log.no-tensorboard").code == 0
    assert losses("again") == losses("plain")
    assert evaluations("again") == evaluations("plain")
    assert not Path("again/tensorboard").exists()


def test_a_seed_changes_the_run(plain: Done) -> None:
    assert train("--workdir", "seeded", "--seed", "1", "--steps", "2").code == 0
    assert losses("seeded")[0] != pytest.approx(losses("plain")[0], rel=1e-4)


def test_preset_changes_the_run_and_nothing_else(plain: Done) -> None:
    assert train("--workdir", "standard", "--preset", "sp", "--steps", "2").code == 0
    assert losses("standard")[0] != pytest.approx(losses("plain")[0], rel=1e-4)


# What goes wrong (more in test_loop_errors.py)


def test_a_full_disk_ends_a_run_that_then_goes_on(
    plain: Done, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, calls = os.fsync, []

    def full(file: int) -> None:
        calls.append(Path(f"/proc/self/fd/{file}").resolve().name)
        if calls[-1] == "metrics.jsonl" and calls.count(calls[-1]) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(file)

    with monkeypatch.context() as patch:
        patch.setattr(metrics.os, "fsync", full)
        failed = train("--workdir", "full")
    assert failed.code == 1
    assert failed.err.startswith("error: could not write")
    assert "No space left on device" in failed.err
    assert len(failed.err.splitlines()) == 1
    assert train("--workdir", "full", "--resume").code == 0
    assert [row["loss"] for row in rows("full")] == [row["loss"] for row in rows("plain")]
