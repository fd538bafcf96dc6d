"""`mupax plan` prints a command that runs, and `plan score` holds a forecast against its run."""

from __future__ import annotations

import gzip
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mupax.__main__ import main
from mupax.train.config.cli import parse, recipe
from mupax.train.pods import search, topology
from mupax.train.studies.forecast import points, ranges, record
from mupax.train.studies.plan import command, score
from mupax.train.studies.sweep.rows import COMPRESSED_NAME, FILE_NAME
from tests.train.studies.forecast.test_predict_command import Trained, least, study

QUIET = ["--log.no-samples", "--log.no-tensorboard", "--log.no-progress"]
TINY = shlex.split(
    "--model.depth 1 --model.seq-len 16 --data.batch-size 8 --data.eval-examples 8 "
    "--optimizer.warmup-steps 0"
)
BASE = "embed=32,heads=4,kv_heads=4,head_dim=8,mlp=80,layers=1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("study")
    assert study(at, *TINY, "--steps", "2")[0] == 0
    return at


def plan(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(["plan", *words]) == code
    return " ".join(capsys.readouterr().out.split())


def planned(
    folder: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[dict[str, Any], str]:
    """A plan at half the smallest width, which is soon trained, and what was printed."""
    words = shlex.split(
        f"--model.width 16 --preset.base {BASE} --steps 2 --from {folder} "
        "--price 2 --tokens-per-second 128"
    )
    output = plan(capsys, "lm-tiny", *words, *TINY, "--out", str(out))
    return json.loads(out.read_text()), output


def test_the_printed_command_trains_and_is_scored(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    content, output = planned(folder, tmp_path / "plan.json", capsys)
    lines = {line["what"]: line for line in content["numbers"]}
    assert lines["parameters"]["value"] == f"{content['forecast']['scale']['parameters']:,}"
    assert lines["peak rate"]["interval"].startswith("2^-")
    assert f"law over {folder}" in lines["loss"]["from"]
    assert lines["time"]["value"] == "2.0 s, 1 s a step"
    assert lines["weight decay"]["from"] == "recipe lm-tiny"
    assert {
        "mesh",
        "remat",
        "memory",
        "FLOPs",
        "cost",
        "warm-up",
        "betas",
        "eps",
        "schedule",
    } <= set(lines)
    assert any(
        "times the parameters of the smallest model measured" in caution
        for caution in content["cautions"]
    )
    assert content["command"] in output

    # Two steps on this machine, by the command that was printed.
    monkeypatch.chdir(tmp_path)
    words = shlex.split(content["command"])
    assert words[:2] == ["mupax", "train"]
    assert main([*words[1:], "--workdir", "run", *QUIET]) == 0
    capsys.readouterr()
    assert main(["plan", "score", "plan.json", "run"]) == 1  # the study's losses are of no real run
    out = capsys.readouterr().out
    assert "outside the 90 % interval" in out
    assert "caution" not in out

    # An evaluation that is not finite is a result, too.
    rows = Path("run/metrics.jsonl").read_text()
    Path("run/metrics.jsonl").write_text(re.sub(r'"eval_loss": [\d.]+', '"eval_loss": null', rows))
    evaluated = {**content["forecast"], "metric": "evaluation"}
    evaluated["digest"] = record.digest(evaluated)
    Path("evaluated.json").write_text(json.dumps(evaluated))
    assert main(["plan", "score", "evaluated.json", "run"]) == 1
    assert "loss inf against" in capsys.readouterr().out

    # The same run, begun before.
    for path in (tmp_path / "run").rglob("*"):
        os.utime(path, (10**9, 10**9))
    assert main(["plan", "score", "plan.json", "run"]) == 2
    assert "began at 2001-09-09 01:46:40 UTC, before the forecast" in capsys.readouterr().err


def test_rows_are_scored_by_their_own_config(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    content, _ = planned(folder, tmp_path / "plan.json", capsys)
    config = record.config_of(content["forecast"])
    Trained(tmp_path / "rows").row(config)
    plan_path = tmp_path / "plan.json"
    assert main(["plan", "score", str(plan_path), str(tmp_path / "rows")]) == 0
    out = capsys.readouterr().out
    assert f"loss {least(config):.1f}"[:-1] in out
    assert "inside the 90 % interval" in out
    assert "rows carry no date" in out
    # Rows may be kept compressed, without points.jsonl.
    rows = tmp_path / "rows" / FILE_NAME
    (tmp_path / "rows" / COMPRESSED_NAME).write_bytes(gzip.compress(rows.read_bytes()))
    rows.unlink()
    assert main(["plan", "score", str(plan_path), str(tmp_path / "rows")]) == 0
    assert capsys.readouterr().out == out

    assert main(["plan", "score", str(plan_path), str(folder)]) == 2
    assert "has no row of the run that is forecast" in capsys.readouterr().err
    other = parse("lm-tiny", recipe("lm-tiny"), ["--optimizer.b2", "0.9"]).config
    fields = [name for name, *_ in score.other_fields(content["forecast"], other)]
    assert {"optimizer.b2", "steps", "model.width"} <= set(fields)
    content["forecast"]["prediction"]["loss"]["high90"] = 9.0
    plan_path.write_text(json.dumps(content))
    assert main(["plan", "score", str(plan_path), str(folder)]) == 2
    assert "not as it was written" in capsys.readouterr().err


@pytest.mark.core
def test_an_outcome_is_inside_or_outside():
    loss = {"low90": 2.0, "low50": 2.1, "value": 2.2, "high50": 2.3, "high90": 2.4}
    content = {"prediction": {"loss": loss}}
    inside = score.score(content, score.Outcome(2.35, 3, None))
    assert inside == {
        "loss": 2.35,
        "seed": 3,
        "error": 0.068182,
        "inside90": True,
        "inside50": False,
    }
    assert not score.score(content, score.Outcome(float("inf"), 0, None))["inside90"]


def test_a_plan_for_chips_takes_the_compilers_mesh(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(topology, "ready", lambda topology_name: None)
    flags = "--mesh.data 1 --mesh.fsdp 16 --model.compute.remat block --accumulation-steps 2"
    report = {
        "flags": flags,
        "fits": True,
        "mesh": {"fsdp": 16},
        "compute": {"remat": "block"},
        "accumulation_steps": 2,
    }
    report |= {
        "peak_bytes_per_device": 2**33,
        "hbm_bytes_per_device": 2**34,
        "roofline": {"step_seconds": 3.6, "mfu": 0.5},
    }
    monkeypatch.setattr(search, "search", lambda *args: [report])
    output = plan(capsys, "gpt2-c4", "--tokens", "10b", "--chips", "v5e:4x4", "--price", "1")
    assert "--mesh.fsdp 16" in output
    assert "--model.compute.remat block" in output
    assert "--accumulation-steps 2" in output
    assert "19.1 h, 3.6 s a step" in output  # 19,073 steps
    assert "cost 305.17" in output
    assert "caution: no study: nothing is predicted of the loss" in output
    report |= {"fits": False, "peak_bytes_per_device": 2**35, "roofline": None}
    assert "does not fit v5e:4x4 by 16 GiB" in plan(capsys, "gpt2-c4", "--chips", "v5e:4x4", code=1)


def test_without_the_compiler_the_formula_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def missing(topology_name: str) -> None:
        raise topology.TopologyError("the TPU compiler is not installed")

    monkeypatch.setattr(topology, "ready", missing)
    output = plan(capsys, "gpt2-c4", "--tokens", "1b", "--chips", "v5e:4x4", "--mfu", "0.5")
    assert "formula: state alone, split over all chips" in output
    assert (
        "memory of activations, mesh and remat are not known: the TPU compiler is not installed"
        in output
    )


def test_a_study_of_other_data_gives_its_rate_and_no_loss(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    words = ["--preset.base", BASE, *TINY, "--from", str(folder), "--tokens-per-second", "1e3"]
    out = str(tmp_path / "plan.json")
    words += ["--tokens", "1m", "--optimizer.b2", "0.99", "--out", out]
    output = plan(capsys, "lm-tiny", *words)
    assert "no loss is predicted" in output
    assert "optimizer.b2 0.99 (measured: 0.95)" in output
    assert "that it stays is the preset's claim" in output
    assert "published rules contradict each other at 3.91e+03 times the tokens" in output
    assert "not used" not in output
    assert "step-law" in output
    assert main(["plan", "score", out, str(tmp_path)]) == 2
    assert "without a forecast (no loss is predicted: this run differs" in capsys.readouterr().err


def test_an_interrupted_study_is_not_read_as_a_sweep_of_another_preset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    rounds = iter(range(2))
    train = Trained.__call__

    def interrupted(self: Trained, configs: Any) -> Any:
        if next(rounds, None) is None:
            raise KeyboardInterrupt
        return train(self, configs)

    monkeypatch.setattr(Trained, "__call__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        study(tmp_path, *TINY, "--steps", "2")
    # Its points at the base are trained as `sp`, which is not its preset.
    assert main(["plan", "lm-proxy", "--from", str(tmp_path), "--tokens", "1m"]) == 2
    error = capsys.readouterr().err
    assert f"the study of {tmp_path} is not finished" in error
    assert "go on with `mupax transfer lm-tiny --steps 100 --grow" in error


def test_rates_that_the_first_seed_lacks_are_no_rates_at_which_it_diverged() -> None:
    config = recipe("lm-tiny")()
    losses = np.full((5, 2), np.nan)
    losses[::2, 0] = [2.2, 2.0, 2.1]
    losses[1::2, 1] = [2.1, 2.0]
    curve = points.Setting(config, np.arange(-8.0, -5.5, 0.5), losses).curve
    assert curve.x.tolist() == [-8, -7, -6]
    assert curve.mean.tolist() == [2.2, 2.0, 2.1]


def test_rules_published_for_adam_do_not_contradict_each_other_about_muon(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert study(tmp_path, *TINY, "--steps", "2", "--optimizer.name", "muon")[0] == 0
    flags = ["--optimizer.name", "muon", "--preset.base", BASE, "--tokens", "1m"]
    output = plan(
        capsys, "lm-tiny", *TINY, *flags, "--from", str(tmp_path), "--optimizer.b2", "0.99"
    )
    assert "that it stays is the preset's claim" in output
    assert "published rules contradict" not in output


def test_the_same_preset_is_found_however_it_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    # A tuned preset writes constants that a sweep leaves out, and the base's sizes for its name.
    words = [
        "lm-tiny",
        "--preset.base",
        BASE,
        *TINY,
        "--from",
        str(folder),
        "--tokens-per-second",
        "1e3",
    ]
    words += ["--model.width", "16", "--steps", "2"]
    written = plan(capsys, *words, "--preset.alpha-a", "1.0")
    assert "law over" in written
    assert "preset.alpha_a" not in written
    assert "no study of mup" in plan(capsys, *words, "--preset.alpha-a", "0.75")


@pytest.mark.parametrize("flags", ["--model.vocab-size 300", "--data.seed 1 --seed 3"])
def test_a_rate_from_other_data_comes_with_a_caution(
    flags: str, folder: Path, capsys: pytest.CaptureFixture[str]
):
    words = [
        "lm-tiny",
        "--preset.base",
        BASE,
        *TINY,
        "--from",
        str(folder),
        "--tokens-per-second",
        "1e3",
        "--tokens",
        "1m",
    ]
    output = plan(capsys, *words, *shlex.split(flags))
    differs = "vocab" in flags
    assert ("is used, and may be another here" in output) == differs
    if differs:
        assert "model.vocab_size 300 (measured: 256)" in output


def test_a_model_alone_is_planned_as_the_studys_run_was(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    # Its data, batch, clip and base are the study's. A name behind --model is enough.
    options = ["--from", str(folder), "--tokens-per-second", "1e3", "--out", str(tmp_path / "plan")]
    config = {}
    for way, words in {
        "flag": ["--model", "lm-proxy", *options],
        "word": ["lm-proxy", *options],
        "longer": ["--tokens", "1m", "--model=lm-proxy", *options, "--optimizer.clip-norm", "0.5"],
    }.items():
        plan(capsys, *words)
        content = json.loads((tmp_path / "plan").read_text())
        lines = {
            line["what"]: (line["value"], line["interval"], line["from"])
            for line in content["numbers"]
        }
        _, _, flags = content["command"].partition("mupax train lm-tiny ")
        config[way] = parse("lm-tiny", recipe("lm-tiny"), shlex.split(flags)).config
        assert lines["batch"] == ("8 x 128 tokens", "", f"study {folder}")
        assert lines["loss"][:2] == (
            "not predicted",
            "no interval",
        )  # its sequences are longer than the study's
        cautions = " ".join(content["cautions"])
        assert "model.seq_len 128 (measured: 16)" in cautions
        if way == "longer":
            assert (
                "not used: it is another at optimizer.clip_norm 0.5 (measured: 1.0); "
                "write --optimizer.clip-norm 1.0" in cautions
            )
            assert lines["peak rate"][1:] == ("", "the recipe")
        else:
            assert lines["peak rate"][1] == "no interval"
            assert "best of the largest of" in lines["peak rate"][2]
    assert config["flag"] == config["word"]
    assert config["longer"].steps == round(1e6 / (8 * 128))
    assert config["longer"].preset.base == config["flag"].preset.base == BASE
    assert config["flag"].data.eval_examples == 8
    assert config["flag"].optimizer.warmup_steps == 0


def test_a_recipe_with_another_base_is_told_what_to_write(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    """And what it is told to write is enough."""
    words = ["lm-tiny", "--from", str(folder), "--tokens-per-second", "1e3"]
    output = plan(capsys, *words)
    assert (
        f"not used: it is another at preset.base lm-proxy (measured: {BASE}); "
        f"write --preset.base {BASE} to" in output
    )
    assert "not used" not in plan(capsys, *words, "--preset.base", BASE)
    assert (
        f"no study of mup-half: --from has mup; write --preset.base {BASE} --preset.name mup for"
        in plan(capsys, *words, "--preset", "mup-half")
    )


def test_time_memory_and_cost_have_a_range_or_say_that_they_have_none(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    words = [
        "--model",
        "lm-proxy",
        "--from",
        str(folder),
        "--price",
        "2",
        "--out",
        str(tmp_path / "plan"),
    ]

    def interval(*more: str) -> dict[str, str]:
        plan(capsys, *words, *more)
        lines = json.loads((tmp_path / "plan").read_text())["numbers"]
        return {line["what"]: line["interval"] for line in lines}

    # Every row of the study took a second, so its largest model was the fastest, and no model is
    # faster than the plan assumes.
    low, high = (
        float(word)
        for word in interval("--tokens", "1b")["time"]
        .replace(" h", "")
        .replace(",", "")
        .split(" to ")
    )
    assert high > 4 * low
    assert interval()["memory"].count(" MiB") == 2
    intervals = interval("--tokens-per-second", "1e3")
    assert intervals["time"] == intervals["cost"] == "no interval"


@pytest.mark.core
def test_a_roofline_is_the_lower_end_of_a_time():
    (low, high), why = (
        ranges.of_roofline(2.0, 0.426)[0] or (0, 0),
        ranges.of_roofline(2.0, 0.426)[1],
    )
    assert (low, high) == (2.0, pytest.approx(4.0))
    assert "2204.02311" in why
    band, why = ranges.of_roofline(
        2.0, 0.1
    )  # the control: what is bound by memory has no published upper end
    assert ranges.text(band, 1.0) == "at least 2.0"
    assert "no upper end" in why


@pytest.mark.tpu
def test_a_plan_by_the_compiler_itself(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    # Mesh, memory and time of a small decoder are the TPU compiler's, and the command has the mesh.
    words = [
        "--model",
        "lm-proxy",
        "--data.batch-size",
        "16",
        "--tokens",
        "10m",
        "--from",
        str(folder),
        "--price",
        "1",
    ]
    output = plan(
        capsys, *words, "--chips", "v5e:2x2", "--limit", "2", "--out", str(tmp_path / "plan")
    )
    content = json.loads((tmp_path / "plan").read_text())
    lines = {line["what"]: line for line in content["numbers"]}
    assert lines["mesh"]["from"] == lines["memory"]["from"] == "TPU compiler for v5e:2x2"
    assert lines["mesh"]["value"].endswith("(4 chips)")
    assert lines["batch"]["value"] == "16 x 128 tokens"  # of which rate and steps are
    assert "roofline of the compiled step" in lines["time"]["from"]
    assert "to" in lines["time"]["interval"] or "at least" in lines["time"]["interval"]
    assert lines["cost"]["interval"] != "no interval"
    assert content["command"] in output
    _, _, flags = content["command"].partition("mupax train lm-tiny ")
    config = parse("lm-tiny", recipe("lm-tiny"), shlex.split(flags)).config
    assert config.data.batch_size == 16
    assert config.steps == round(1e7 / (16 * 128))


def test_a_rate_that_is_asked_for_stays(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """And the loss is the one at that rate."""
    losses = []
    for words in ((), ("--optimizer.peak-lr", "0.03125")):
        options = [
            "lm-tiny",
            "--preset.base",
            BASE,
            *TINY,
            "--steps",
            "2",
            "--from",
            str(folder),
            "--out",
            str(tmp_path / "plan"),
        ]
        output = plan(capsys, *options, *words)
        losses.append(
            json.loads((tmp_path / "plan").read_text())["forecast"]["prediction"]["loss"]["value"]
        )
    assert "peak rate 0.03125 = 2^-5 asked for" in output
    assert re.search(r"steps 2, [\d,]+ tokens, [\d.e-]+ per parameter asked for", output)
    assert losses[1] / losses[0] == pytest.approx(
        1.08, abs=0.03
    )  # two octaves, at 0.02 of the log of the loss each


@pytest.mark.core
def test_the_compilers_environment_is_set_before_jax_is_imported() -> None:
    # JAX reads its platform and its cache's flag from the environment when it is imported.
    code = """
import os, sys
from mupax.train.pods import topology
topology.ready = lambda chips: os._exit(10 + ("jax" in sys.modules))
from mupax.__main__ import main
main(["plan", "lm-tiny", "--chips", "v5e:4x4"])
"""

    def exit_code(program: str) -> int:
        return subprocess.run([sys.executable, "-c", program], check=False).returncode

    assert exit_code(code) == 10
    assert exit_code("import jax" + code) == 11  # the control


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lm-tny"], "no recipe is named 'lm-tny'"),
        (["gpt2-medium"], "say how long gpt2-medium will train: write --tokens N"),
        (["--model", "gpt2-medium"], "say how long gpt2-medium will train: write --tokens N"),
        (
            ["gpt2-medium", "--tokens", "1b", "--steps", "5"],
            "--steps needs a recipe, and gpt2-medium is a model",
        ),
        (
            ["t5-base", "--tokens", "1b"],
            "nothing is known of the learning rate of a model such as t5-base",
        ),
        (
            ["gpt2", "--model", "gpt2-medium"],
            "gpt2 and --model gpt2-medium are two models; write one of them",
        ),
        (
            ["lm-tiny", "--model", "gpt2-c4"],
            "lm-tiny and --model gpt2-c4: gpt2-c4 is a recipe; write one of them",
        ),
        (["--model", "gpt3-medium"], "gpt3-medium"),
        (["--tokens", "1b"], "needs RECIPE|FILE|MODEL"),
        (["lm-tiny", "--tokens", "many"], "--tokens is many; write a number such as 10b"),
        (["lm-tiny", "--tokens", "1b", "--steps", "3"], "both say how long the run is"),
        (["lm-tiny", "--mfu", "2"], "a share in (0, 1]"),
        (["lm-tiny", "--chips", "v9:2x2"], "no chip is named 'v9'"),
        (["lm-tiny", "--from", "nowhere"], "nowhere has no points.jsonl"),
        (["lm-tiny", "--batch", "3"], "no flag is named --batch"),
        (["score", "nowhere.json", "x"], "no such file"),
    ],
)
def test_bad_input(words: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", *words]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_the_conclusion_has_the_whole_time() -> None:
    rows = [
        ranges.PlanRow("peak rate", "0.01", "", "recipe"),
        ranges.PlanRow("time", "583,946.2 h, 8 days of it compiling", "", "estimate"),
        ranges.PlanRow("loss", "2.5", "2.4 to 2.6", "law"),
    ]
    config = recipe("lm-tiny")()
    text = command._conclusion("lm-tiny", config, rows, fits=True)
    assert text.endswith("should end at a loss of 2.5 [2.4 to 2.6], in 583,946.2 h")


def test_without_a_study_the_table_says_which_values_were_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = plan(capsys, "lm-tiny", "--optimizer.peak-lr", "0.01")
    assert "peak rate 0.01 = 2^-6.64 asked for" in output
    assert "2 per parameter recipe lm-tiny" in output
    assert "peak rate 0.008 = 2^-6.97 the recipe" in plan(capsys, "lm-tiny")


def test_a_run_that_does_not_fit_says_how_much_it_needs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without the compiler's packages, whose absence is the last caution.
    def absent(_topology: str) -> None:
        raise topology.TopologyError("libtpu is not installed")

    monkeypatch.setattr(topology, "ready", absent)
    output = plan(capsys, "lm-8b", "--chips", "v5e:1x1", code=1)
    assert "do not fit the chips: 120 GiB of 16 GiB a chip" in output
