"""`mupax transfer`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from mupax.__main__ import main
from mupax.command_line import parse_known
from mupax.presets import PresetError
from mupax.train.config.run import Config
from mupax.train.studies.sweep import sweep
from mupax.train.studies.sweep.rows import Row
from mupax.train.studies.transfer import command as transfer_command
from mupax.train.studies.transfer import planned
from mupax.train.studies.transfer.tuned import NoMinimum
from mupax.zoo.configs import ConfigError
from tests.train.studies.transfer.test_study import Trained


def command(folder: Path, *words: str, run: Callable[..., list[Row]] | None = None) -> int:
    argv = ["lm-tiny", "--grow", "head_dim=16,32,64", "--out", str(folder), *words]
    args, rest = parse_known(transfer_command.Transfer, "mupax transfer", argv)
    return transfer_command.execute(args, rest, "mupax transfer ...", run or Trained())


def test_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = Trained()
    assert (
        command(
            tmp_path, "--compare", "depth-mup,alpha_l=1", "--control", "sp", "--steps", "7", run=run
        )
        == 0
    )
    out = capsys.readouterr().out
    keep = out.index(
        "With mup, keep the learning rate: tuned at head_dim 16 and used at head_dim 64 it costs 0.000 nats ["
    )
    assert "Under sp it would diverge." in out
    # The answer, then what to type, then the numbers.
    assert (
        keep
        < out.index("Next: train head_dim 64 at the rate of head_dim 16")
        < out.index("95 %, octaves")
    )
    assert "mup transfers in head_dim" in out
    assert "sp drifts in head_dim" in out
    assert "its drift is apart from that of sp" in out
    assert "head_dim 64 at 2^-6 (diverges)" in out
    assert "by inf" not in out
    assert {c.steps for c in run.configs} == {7}

    record = json.loads((tmp_path / "transfer.json").read_text(), parse_constant=pytest.fail)
    assert [s["preset"] for s in record["studies"]] == ["mup", "depth-mup alpha_l=1", "sp"]
    assert [c["apart"] for c in record["comparison"]] == [True, True]
    assert sum(len(size["points"]) for s in record["studies"] for size in s["sizes"]) == len(
        run.configs
    )
    assert record["versions"]["jax"]
    assert record["config"]["steps"] == 7

    page = (tmp_path / "transfer.html").read_text()
    assert re.findall(r'(?:src|href)="(?!data:image/png;base64,)', page) == []
    assert "http" not in re.sub(r"base64,[^\"]*", "", page)
    assert "sp drifts in head_dim" in page
    assert page.index("keep the learning rate") < page.index("<img") < page.index("<table")
    assert "mupax transfer ..." in page
    assert (tmp_path / "head_dim.png").stat().st_size < 200_000


def test_what_is_not_decided_says_how_many_seeds_would_and_the_command_decides_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    # The optima of seeds differ by so much that three of them leave the verdict open.
    assert command(tmp_path, "--max-seeds", "3", "--minutes", "99", run=Trained(0.4)) == 0
    out = capsys.readouterr().out
    seeds = 3
    for _ in range(
        4
    ):  # the number of seeds is what would probably decide: what it says is typed until it does
        lines = out.splitlines()
        answers = [line for line in lines if line.startswith("Not decided: ")]
        if not answers:
            break
        more = int(re.findall(r"(\d+) more seeds? \(", answers[0])[0])
        typed = lines[lines.index("Next: add seeds; what is trained is used again:") + 1]
        words = typed[typed.index("--max-seeds") :].split()
        assert words[:2] == ["--max-seeds", f"{seeds + more}"]
        assert command(tmp_path, *words[:2], "--minutes", "99", run=Trained(0.4)) == 0
        out = capsys.readouterr().out
        # Seeds are added one by one, and each says how many may follow and how long they take.
        added = f"mup in head_dim is undecided after {seeds} seeds"
        assert re.search(rf"{added} \(drift .* at most {more} more, about [\d.]+ minutes", out)
        seeds += more
    assert seeds > 3
    assert any(line.startswith(("Keep the learning rate", "Retune")) for line in out.splitlines())


def typed_next(out: str, sentence: str) -> list[str]:
    """Return the words of the command that is proposed below a sentence."""
    lines = out.splitlines()
    index = next(i for i, line in enumerate(lines) if line.startswith(sentence))
    return shlex.split(lines[index + 1])


def test_a_best_rate_beyond_all_rates_is_found_by_the_command_that_is_proposed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    words = ["--save-tuned", "far", "--minutes", "99"]
    with pytest.raises(NoMinimum, match=r"no rate to save: .* --optimizer.peak-lr \S+ searches"):
        command(tmp_path, *words, run=Trained(optimum=6.2))
    out = capsys.readouterr().out
    assert "head_dim 16 has no best learning rate, because its best rate is at the end of" in out
    assert "train at" not in out
    rate = typed_next(out, "Next: search head_dim 16 from the end of its rates on")[-2:]
    assert rate[0] == "--optimizer.peak-lr"
    assert command(tmp_path, *words, *rate, run=Trained(optimum=6.2)) == 0
    assert "Next: train head_dim 64 at the rate of head_dim 16" in capsys.readouterr().out


def test_a_largest_size_whose_rates_all_fall_is_swept_by_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert command(tmp_path, "--minutes", "99", run=Trained(moves=-12)) == 0
    out = capsys.readouterr().out
    typed = typed_next(out, "Next: search head_dim 64 by itself")
    assert typed[1:3] == ["sweep", "lm-tiny"]
    assert main([*typed[1:], "--dry-run"]) == 0
    assert "9 points, rates 2^-17.5 2^-17 2^-16.5 " in capsys.readouterr().out


def test_minutes_that_end_the_search_for_rates_are_more_in_the_command_that_is_proposed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = Trained(moves=-3, seconds=60)
    assert command(tmp_path, "--minutes", "60", run=run) == 0
    minutes = typed_next(
        capsys.readouterr().out, "Next: find the best rate of head_dim 64 in more minutes"
    )[-2:]
    assert minutes[0] == "--minutes"
    assert command(tmp_path, *minutes, run=Trained(moves=-3, seconds=60)) == 0
    assert "Retune the learning rate" in capsys.readouterr().out


def test_one_seed_is_never_decided(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def worse_if_larger(configs: Sequence[Config]) -> list[Row]:
        pairs = zip(configs, Trained()(configs), strict=True)
        return [
            dataclasses.replace(row, loss=row.loss + 0.02 * config.model.sizes()["head_dim"])
            for config, row in pairs
        ]

    assert command(tmp_path, "--seeds", "1", "--max-seeds", "1", run=worse_if_larger) == 0
    out = capsys.readouterr().out
    assert "Not decided: " in out
    assert "one seed has no interval" in out
    assert re.search(r"bigger is worse at (\d) of \1 rates, by one seed: head_dim 32 at", out)
    assert "5 rates, 1 seed\n" in out
    assert not re.search(r"\b1 (seed|rate|step|point)s\b", out)
    assert "--max-seeds 3" in out


def test_a_dry_run_trains_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = Trained()
    assert command(tmp_path / "x", "--dry-run", run=run) == 0
    assert "64 (width 256)" in capsys.readouterr().out
    assert not run.configs
    assert not (tmp_path / "x").exists()


def test_constants_of_another_base_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    constants = ["--preset.constants", "rates.token_embedding=8"]
    for words in (constants, ["--compare", "mup,rates.token_embedding=8"]):
        assert command(tmp_path, "--dry-run", *words) == 0
        noted = " ".join(capsys.readouterr().err.split())
        assert noted.startswith("the constants of mup rates.token_embedding=8 are factors at")
        assert "the recipe's base is lm-proxy" in noted
        assert "add --preset.base lm-proxy" in noted
    # Without constants no number depends on the base, and a base that is typed is the study's own.
    for words in ([], [*constants, "--preset.base", "lm-proxy"]):
        assert command(tmp_path, "--dry-run", *words) == 0
        assert not capsys.readouterr().err


def test_key_heads_are_grown_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    # At as many heads, relative to one key head. Numbers that do not share the heads are refused.

    def of(*words: str) -> int:
        return main(["transfer", "lm-tiny", *words, "--dry-run", "--out", str(tmp_path / "x")])

    assert of("--grow", "kv_heads=1,2,4") == 0
    out = capsys.readouterr().out
    assert (
        "mup, kv_heads 1 (width 128), 2 (width 128), 4 (width 128), base embed=128,heads=4,kv_heads=1"
        in out
    )
    assert not (tmp_path / "x").exists()
    assert of("--grow", "kv_heads=1,3") == 2
    assert "num_heads 4 is not a multiple of model.num_kv_heads 3" in " ".join(
        capsys.readouterr().err.split()
    )


def test_a_frugal_search_without_rates_does_not_say_that_every_size_has_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    def falling(configs: Sequence[Config]) -> list[Row]:
        return [
            Row("", "", 2 - config.optimizer.peak_lr, None, None, (), 4, 1.0, "in turn")
            for config in configs
        ]

    assert command(tmp_path, "--search", "frugal", run=falling) == 1
    out = capsys.readouterr().out
    assert "growing head_dim: 3 of 3 sizes have no best rate" in out
    assert "every size has its best rate" not in out


def test_what_the_minutes_do_not_hold_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert command(tmp_path, "--minutes", "0.0001", run=Trained()) == 1
    assert "; the same command with more --minutes goes on" in capsys.readouterr().out


def test_seeds_of_an_earlier_command_are_counted_where_the_study_says_why_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    trained = Trained(0.6)
    monkeypatch.setattr(sweep.Sweep, "run", lambda self, configs, *_: trained(configs))
    monkeypatch.setattr(
        sweep.Sweep, "has_rows", lambda self, configs: all(config.seed < 4 for config in configs)
    )
    words = ["transfer", "lm-tiny", "--grow", "head_dim=16,32,64", "--out", str(tmp_path)]
    assert main([*words, "--max-seeds", "3"]) == 0
    out = capsys.readouterr().out
    assert "from 4 seeds at every size" in out
    assert "ended because all 4 seeds are used" in out


@pytest.mark.parametrize("search", ["grid", "frugal"])
def test_a_report_of_another_command_is_named_before_it_is_replaced(
    search: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    def printed(*words: str, recorded: str) -> str:
        grown = ["lm-tiny", "--grow", "head_dim=16,32,64", "--search", search]
        argv = [*grown, "--out", str(tmp_path), *words]
        args, rest = parse_known(transfer_command.Transfer, "mupax transfer", argv)
        assert transfer_command.execute(args, rest, recorded, Trained()) == 0
        return capsys.readouterr().err

    first = "mupax transfer lm-tiny --grow head_dim=16,32,64"
    assert "replaced" not in printed(recorded=first)
    assert "replaced" not in printed("--max-seeds", "9", recorded=f"{first} --max-seeds 9")
    printed("--preset", "sp", recorded=f"{first} --preset sp")
    note = printed(recorded=first)
    assert "another command and is replaced" in note
    assert note.rstrip().endswith(f"{first} --preset sp")


@pytest.mark.core
@pytest.mark.parametrize(
    ("joint", "control"), [("none", None), ("sde", "mup")], ids=["no control", "no joint rule"]
)
def test_none_as_a_control_leaves_the_joint_rule_out_if_there_is_one(
    joint: str, control: str | None
):
    base = "" if joint == "none" else "--preset.base lm-proxy,batch=8,tokens=100000"
    words = ["lm-tiny", "--grow", "head_dim=16,32", "--joint", joint, "--control", "none"]
    args, recipe_words = parse_known(planned.Transfer, planned.PROG, [*words, *base.split()])
    recipe, _ = planned.parsed(args, recipe_words)
    assert planned.planned(args, recipe.config, recipe.config.preset.base)[1] == control


@pytest.mark.core
@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (["--grow", "size=1,2"], ConfigError, "one of head_dim"),
        (["--grow", "depth=2"], ConfigError, "at least two sizes"),
        (["--grow", "head_dim=2,4"], ConfigError, "names an axis twice"),
        (["--control", "spp"], PresetError, "did you mean 'sp'"),
        (["--control", "mup"], ConfigError, "the preset of the study itself"),
        (["--joint", "sde", "--control", "sde"], ConfigError, "such as --control sp"),
        (["--compare", "mup,alpha_l=1"], PresetError, "alpha_l"),
        (
            ["--compare", "ntk", "--optimizer.name", "muon"],
            PresetError,
            "ntk has no rule for the optimizer 'muon'",
        ),
        (["--minutes", "0"], ConfigError, "above 0"),
        (["--seeds", "9"], ConfigError, "seeds <= max-seeds"),
        (["--workdir", "x"], ConfigError, "--out"),
        (["--control", "step-law"], PresetError, "step-law is only shown"),
        (
            ["--joint", "sde", "--control", "none", "--optimizer.name", "lion"],
            PresetError,
            "says nothing about lion",
        ),
    ],
)
def test_bad_input(tmp_path: Path, words: list[str], error: type[ValueError], message: str):
    with pytest.raises(error, match=message):
        command(tmp_path, *words)


@pytest.mark.core
def test_the_command_is_there(capsys: pytest.CaptureFixture[str]):
    assert main(["transfer", "--help"]) == 0
    assert "--control" in capsys.readouterr().out
    assert main(["transfer", "lm-tiny"]) == 2
    assert "say what grows: write --grow" in capsys.readouterr().err
    assert main(["transfer", "lm-tny", "--grow", "depth=2,4"]) == 2
    assert "no recipe is named 'lm-tny'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            "preset: {name: sp}\ndata: {batch_size: 8}",
            "was trained with preset.name mup, now sp: its command no longer",
        ),
        (
            "preset: {name: mup}\ndata: {batch_size: 4}",
            "was trained with data.batch_size 8, now 4: its command no longer plans the runs of",
        ),
    ],
)
def test_a_plan_from_a_study_whose_config_file_changed_ends_in_one_line(
    changed: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    trained = Trained()
    monkeypatch.setattr(sweep.Sweep, "run", lambda self, configs, *_: trained(configs))
    monkeypatch.setattr(sweep.Sweep, "has_rows", lambda self, configs: False)
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("recipe: lm-tiny\npreset: {name: mup}\ndata: {batch_size: 8}\n")
    out = tmp_path / "out"
    assert main(["transfer", str(recipe), "--grow", "head_dim=16,32", "--out", str(out)]) == 0
    (out / "points.jsonl").touch()
    plan = ["plan", "lm-tiny", "--from", str(out)]
    # The control: fields that do not change what a run learns.
    recipe.write_text(recipe.read_text() + "log: {every: 7}\nmodel: {compute: {dtype: bfloat16}}\n")
    capsys.readouterr()
    assert main(plan) == 2
    assert "no longer plans" not in capsys.readouterr().err
    recipe.write_text(f"recipe: lm-tiny\n{changed}\n")
    assert main(plan) == 2
    assert message in " ".join(capsys.readouterr().err.split())
