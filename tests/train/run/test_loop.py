"""Runs as a person starts them, by a command line: what they write, print and return."""

from __future__ import annotations

import errno
import gzip
import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout

from mupax.train.config.metrics import METRICS, row_name
from mupax.train.config.record import from_json
from mupax.train.core import step as core_step
from mupax.train.core.program import Program
from mupax.train.core.state import TrainState
from mupax.train.run.report import finish, metrics
from mupax.train.run.report.finish import loss_plot
from mupax.zoo import families
from tests.fixtures import small_runs
from tests.fixtures.commands import Done, command, last_of_each_flag, succeeded
from tests.fixtures.programs import own_programs, shared_programs
from tests.fixtures.small_runs import folder, losses, record_of
from tests.train.run.report.mirrors.test_media import shown

__all__ = ["folder", "own_programs", "shared_programs"]  # fixtures

STEPS = 6
RUN = f"{small_runs.RUN} --data.eval-examples 100 --log.eval-every-steps 4 --steps {STEPS}"
"""100 evaluation windows do not fill two batches of 64."""


def train(*words: str) -> Done:
    """Run `mupax train`, which succeeds, in this process on its eight devices."""
    return succeeded("train", last_of_each_flag(RUN, *words))


@pytest.fixture(scope="module")
def plain(folder: Path) -> Done:
    """The run that the others are compared with. It alone leaves a picture and a sample."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finish, "loss_plot", loss_plot)
        return train("--workdir plain --log.samples")


def rows(workdir: str) -> list[dict[str, Any]]:
    """Return the rows of steps, with their seconds."""
    return [row for row in metrics.read(Path(workdir, "metrics.jsonl")) if "loss" in row]


def evaluations(workdir: str) -> list[dict[str, Any]]:
    """Return the rows of evaluations."""
    return [row for row in metrics.read(Path(workdir, "metrics.jsonl")) if "eval_loss" in row]


def eval_losses(workdir: str) -> list[float]:
    return [row["eval_loss"] for row in evaluations(workdir)]


# What a run leaves


def test_a_z_loss_is_trained_and_has_a_row(plain: Done) -> None:
    train("--workdir z --z-loss 1e-4 --log.no-tensorboard")
    assert record_of("z")["config"]["z_loss"] == 1e-4
    with_z = rows("z")
    without = rows("plain")
    # Before its weight, and at first nearly the loss squared: targets' logits are 0 on average.
    # The loss is without it.
    assert with_z[0]["logit_z_loss"] == pytest.approx(with_z[0]["loss"] ** 2, rel=0.2)
    assert with_z[0]["loss"] == without[0]["loss"]
    assert losses("z") == pytest.approx(losses("plain"), rel=0.02)
    # The controls: no row without it, and other weights with it.
    assert not any("logit_z_loss" in row for row in without)
    assert eval_losses("z")[-1] != eval_losses("plain")[-1]


@pytest.mark.core
def test_a_run_ends_well(plain: Done) -> None:
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
    model = from_json(record_of("plain")["config"]).model
    before = 1  # The first step, which warms up, is left out.
    for row in speeds:  # One, or on a slow machine one every ten seconds.
        timed = [step for step in rows("plain") if before < step["step"] <= row["step"]]
        seconds = sorted(step["seconds"] for step in timed)
        median = seconds[(len(seconds) - 1) // 2]
        assert row["perf_step_seconds_p50"] == pytest.approx(median, rel=1e-3)
        assert row["perf_step_seconds_p99"] == pytest.approx(seconds[-1], rel=1e-3)
        flops = len(seconds) * 256 * families.train_flops(model)
        speed = flops / sum(seconds)
        assert row["perf_flops_per_second"] == pytest.approx(speed, rel=1e-2)
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
    done = train("--workdir profiled --profile 2:4 --steps 4 --log.no-tensorboard")
    profile = Path("profiled/profile")
    (trace,) = profile.rglob("*.xplane.pb")
    (timeline,) = profile.rglob("*.trace.json.gz")
    assert trace.stat().st_size > 1000
    events = json.loads(gzip.decompress(timeline.read_bytes()))["traceEvents"]
    steps = {int(event["args"]["step_num"]) for event in events if event.get("name") == "train"}
    assert steps == {2, 3}
    assert "profile from step 2 in" in done.text
    assert "xprof --port" in done.text


@pytest.mark.core
def test_the_files_of_a_run(plain: Done) -> None:
    left = {path.name for path in Path("plain").iterdir()}
    folders = {"assets", "checkpoints", "tensorboard"}
    assert left == {".lock", "config.json", "metrics.jsonl", "loss.png", "sample.txt", *folders}
    assert Path("plain/loss.png").read_bytes().startswith(b"\x89PNG")
    (command,) = re.findall(r"^next +(.+)$", plain.out, re.MULTILINE)
    *_, flag, prompt = shlex.split(command)
    assert flag == "--prompt"
    text = " ".join(Path("text.txt").read_text().split())
    assert f" {prompt} " in f" {text} "  # whole words of the text
    sample = Path("plain/sample.txt").read_text()
    assert sample.startswith(prompt)
    assert len(sample) > 100
    assert list(Path("plain/tensorboard").glob("events.*"))


def test_the_sample_of_a_language_model_is_in_tensorboard_as_text(plain: Done) -> None:
    summary = shown(Path("plain/tensorboard"))["sample/text_summary", STEPS]
    lines = summary.tensor.string_val[0].decode().splitlines()
    sample = Path("plain/sample.txt").read_text()
    assert lines == [f"    {line}" for line in sample.splitlines()]


@pytest.mark.core
def test_the_record_says_how_the_run_was_made(plain: Done) -> None:
    record = record_of("plain")
    config = from_json(record["config"])
    assert (config.recipe, config.steps) == ("lm-tiny", STEPS)
    assert config.model.sizes()["embed"] == 16
    assert config.data.name == "text:text.txt"
    versions = record["versions"]
    assert versions.keys() >= {"python", "jax", "flax", "optax", "mupax"}
    versions.pop("mupax")  # not installed in a checkout
    assert all(versions.values())
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
    model = "--model.width 16 --model.depth 1 --model.num-heads 2 --model.no-bias --model.pool cls"
    model = f"{model} --model.centered"
    optimizer = "--optimizer.name sgd --optimizer.peak-lr 0.1 --optimizer.warmup-steps 2"
    words = "--data.batch-size 16 --steps 4 --checkpoint.every-steps 4"
    done = succeeded("train vit-digits --workdir images", model, optimizer, words)
    steps = rows("images")
    assert [row["images"] for row in steps] == [16] * 4
    assert steps[0]["loss"] == pytest.approx(2.302585, rel=1e-5)  # centred: uniform over ten digits
    assert steps[0]["loss"] != steps[3]["loss"]
    assert Path("images/predictions.png").read_bytes().startswith(b"\x89PNG")
    assert "logistic regression" in done.out.lower()


# Layouts


def test_a_state_that_lies_as_the_compiler_likes_trains_alike(
    plain: Done, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stand in for the TPU compiler, which chooses layouts: here every matrix lies the other way round."""

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
    monkeypatch.setattr(Program, "free_layout", True)
    monkeypatch.setattr(core_step, "free_layout_format", reversed_)
    train("--workdir free --log.no-tensorboard")
    assert orders
    assert all(order == tuple(range(len(order)))[::-1] for order in orders)
    for name in ("loss", "grad_norm"):
        expected = [row[name] for row in rows("plain")]
        np.testing.assert_allclose([row[name] for row in rows("free")], expected, rtol=1e-5)
    assert eval_losses("free") == pytest.approx(eval_losses("plain"), rel=1e-5)
    orders.clear()
    resume = f"--resume --resume-change schedule --steps {STEPS + 1}"
    train("--workdir free --log.no-tensorboard", resume)
    assert orders


@pytest.mark.usefixtures("own_programs")
def test_the_same_words_give_the_same_numbers_by_a_step_that_is_traced_once(
    plain: Done, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluations, checkpoints and a learning rate that changes with every step need no new trace."""
    make = core_step.make_train_step
    traced: list[Any] = []

    def counted(*arguments: Any, **options: Any) -> Any:
        step = chex.assert_max_traces(make(*arguments, **options), n=1)
        traced.append(step)
        return step

    monkeypatch.setattr(core_step, "make_train_step", counted)
    train("--workdir again --log.no-tensorboard")
    assert len(traced) == 1
    assert losses("again") == losses("plain")
    assert evaluations("again") == evaluations("plain")
    assert not Path("again/tensorboard").exists()


def test_control_a_second_trace_is_an_error() -> None:
    step = jax.jit(chex.assert_max_traces(lambda x: 2 * x, n=1))
    step(np.ones(2))
    with pytest.raises(AssertionError, match="traced > 1 times"):
        step(np.ones(3))


# The same run otherwise


@pytest.mark.core
def test_accumulation_and_split_parameters_from_the_command_line(plain: Done) -> None:
    words = "--accumulation-steps 2 --mesh.data 1 --mesh.fsdp 8"
    done = train("--workdir split --log.no-tensorboard", words)
    assert not done.err
    assert "fsdp 8" in done.out
    # float32 sums in another order, five Adam steps long.
    assert losses("split") == pytest.approx(losses("plain"), rel=1e-3)
    assert losses("split")[0] == pytest.approx(losses("plain")[0], rel=1e-6)
    assert [row["tokens"] for row in rows("split")] == [256] * STEPS
    assert not Path("split/sample.txt").exists()


@pytest.mark.parametrize("words", ["--seed 1", "--preset sp"])
def test_a_seed_and_a_preset_change_the_run(words: str, plain: Done, tmp_path: Path) -> None:
    short = f"--workdir {tmp_path}/run --steps 2 --log.no-tensorboard"
    train(words, short)
    assert losses(tmp_path / "run")[0] != pytest.approx(losses("plain")[0], rel=1e-4)


# What goes wrong (more in test_loop_errors.py)


def test_a_full_disk_ends_a_run_that_then_goes_on(
    plain: Done, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = os.fsync
    calls: list[str] = []

    def full(file: int) -> None:
        calls.append(Path(f"/proc/self/fd/{file}").resolve().name)
        if calls[-1] == "metrics.jsonl" and calls.count(calls[-1]) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(file)

    with monkeypatch.context() as patch:
        patch.setattr(metrics.os, "fsync", full)
        failed = command("train", last_of_each_flag(RUN, "--workdir full --log.no-tensorboard"))
    assert failed.code == 1
    assert failed.err.startswith("error: could not write")
    assert "No space left on device" in failed.err
    assert len(failed.err.splitlines()) == 1
    train("--workdir full --resume --log.no-tensorboard")
    assert losses("full") == losses("plain")


def test_a_sample_that_cannot_be_made_does_not_end_a_finished_run(
    plain: Done, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> str:
        raise ValueError("the logits are not finite")

    monkeypatch.setattr(finish, "_sample", broken)
    done = train("--workdir sampleless --log.no-tensorboard --log.samples")
    assert "the sample is left out: ValueError: the logits" in " ".join(done.out.split())
    assert "sample.txt" not in done.out
    assert losses("sampleless") == losses("plain")
