"""`transfer --predict` writes forecasts before the run, and refuses those that were changed."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from mupax.__main__ import main
from mupax.command_line import parse_known
from mupax.train.config.cli import parse, recipe
from mupax.train.config.record import to_json
from mupax.train.config.run import Config
from mupax.train.studies.forecast import points, record
from mupax.train.studies.forecast.fitted import fitted
from mupax.train.studies.forecast.record import ForecastError
from mupax.train.studies.sweep.rows import Row, Rows
from mupax.train.studies.sweep.sweep import key_of
from mupax.train.studies.transfer import command as transfer_command
from mupax.train.studies.transfer.planned import Transfer
from mupax.zoo import families
from mupax.zoo.configs import ConfigError

GROW = [
    "lm-tiny",
    "--steps",
    "100",
    "--grow",
    "head_dim=8,16,32,64",
    "--seeds",
    "2",
    "--max-seeds",
    "2",
]


class Trained:
    """Rows of a law that is known, written as a sweep writes them."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.rows, self.count = Rows(folder), 0

    def __call__(self, configs: Sequence[Config]) -> list[Row]:
        return [self.row(config) for config in configs]

    def row(self, config: Config) -> Row:
        self.count += 1
        name, seed = key_of(config, "data"), config.seed
        noise = 0.004 * np.random.default_rng([int(name, 16), seed]).normal()
        loss = math.exp(noise + 0.02 * (math.log2(config.optimizer.peak_lr) + 7) ** 2) * least(
            config
        )
        command = record.command_of(config)
        row = Row(name, command, loss, None, None, (loss,), config.steps, 1.0, "in turn")
        self.rows.add(row)
        return row


def least(config: Config) -> float:
    return 1.2 + 20 * families.params(config.model) ** -0.3


def study(folder: Path, *words: str) -> tuple[int, Trained]:
    argv = [*GROW, "--out", str(folder), *words]
    args, rest = parse_known(Transfer, "mupax transfer", argv)
    run = Trained(folder)
    return transfer_command.execute(args, rest, f"mupax transfer {' '.join(argv)}", run), run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("study")
    assert study(at, "--predict", "head_dim=128")[0] == 0
    return at


def test_a_forecast_is_written_with_date_digest_config_and_intervals(folder: Path):
    content = record.read(folder / "forecast-mup-head_dim-128.json")
    loss, rate = content["prediction"]["loss"], content["prediction"]["log2_lr"]
    assert list(loss.values()) == sorted(loss.values())
    config = record.config_of(content)
    assert loss["low90"] < least(config) < loss["high90"]
    assert rate["low90"] < -7 < rate["high90"]
    assert config.optimizer.peak_lr == pytest.approx(2.0 ** rate["value"], rel=1e-3)
    assert content["date"].endswith("+00:00")
    assert content["scale"]["parameters"] == families.params(config.model)
    assert content["beyond"]["parameters"] > 3
    assert any("extrapolates" in warning for warning in content["warnings"])
    assert len(content["rows"]["digest"]) == len(content["digest"]) == 64

    _, _, words = content["command"].partition("mupax train ")
    name, *flags = words.split()
    again = parse(name, recipe(name), flags).config
    assert again.model == config.model
    assert again.optimizer == config.optimizer


def test_the_same_rows_read_from_the_folder_have_the_same_digest(folder: Path):
    content = record.read(folder / "forecast-mup-head_dim-128.json")
    (point_set,) = points.load([folder])
    assert (point_set.label, point_set.digest, point_set.rows) == (
        "mup",
        content["rows"]["digest"],
        content["rows"]["count"],
    )
    assert content["law"]["parameters"] == record.parameters(fitted(point_set))


def test_rows_without_a_study_are_read_by_their_commands(folder: Path, tmp_path: Path):
    (tmp_path / "points.jsonl").write_bytes((folder / "points.jsonl").read_bytes())
    of_base, of_mup = points.load(
        [tmp_path]
    )  # of `mup` at its base no more is known than that it is `sp`
    (of_study,) = points.load([folder])
    assert (of_base.label, of_mup.label) == ("sp", "mup")
    (tmp_path / "transfer.json").write_text('{"studies": []}')
    with pytest.raises(points.PointsError, match=r"transfer\.json is of no transfer study"):
        points.load([tmp_path])
    scales = [setting.scale.tolist() for setting in (*of_base.settings, *of_mup.settings)]
    assert scales == [setting.scale.tolist() for setting in of_study.settings]
    with pytest.raises(points.PointsError, match=r"has no points\.jsonl"):
        points.load([tmp_path / "nowhere"])


def test_an_edited_forecast_is_refused(folder: Path, tmp_path: Path):
    content = json.loads((folder / "forecast-mup-head_dim-128.json").read_text())
    content["prediction"]["loss"]["high90"] += 1
    (tmp_path / "edited.json").write_text(json.dumps(content))
    with pytest.raises(ForecastError, match="not as it was written"):
        record.read(tmp_path / "edited.json")
    del content["digest"]
    (tmp_path / "edited.json").write_text(json.dumps(content))
    with pytest.raises(ForecastError, match="not as it was written"):
        record.read(tmp_path / "edited.json")
    (tmp_path / "edited.json").write_text("{}")
    with pytest.raises(ForecastError, match="is no forecast"):
        record.read(tmp_path / "edited.json")


def test_a_second_forecast_leaves_the_first_and_what_nothing_is_known_of_is_said(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    before = (folder / "forecast-mup-head_dim-128.json").read_text()
    whats = ("head_dim=128", "head_dim=128,tokens=409600", "lm-tiny")
    assert study(folder, *(word for what in whats for word in ("--predict", what)))[0] == 1
    output = " ".join(capsys.readouterr().out.split())
    assert (
        "no forecast of head_dim=128,tokens=409600 under mup: this run has tokens 409,600, and all "
        "measured runs have 204,800" in output
    )
    assert "no forecast of lm-tiny under mup: this run has tokens" in output
    assert record.read(folder / "forecast-mup-head_dim-128-2.json")["what"] == "head_dim=128"
    assert (folder / "forecast-mup-head_dim-128.json").read_text() == before


@pytest.mark.core
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--predict", "dim=128"], "no size is named 'dim'"),
        (["--predict", "tokens=100"], "no whole number of steps"),
        (["--predict", "lm-tny"], "no recipe is named 'lm-tny'"),
        (["--predict", "depth=8", "--predict", "depth=8"], "comes twice"),
    ],
)
def test_what_cannot_be_forecast_is_refused_before_training(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["transfer", *GROW, "--out", str(tmp_path / "x"), *words]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


@pytest.mark.core
def test_a_run_of_another_optimizer_names_what_differs():
    config = parse("lm-tiny", recipe("lm-tiny"), ["--optimizer.b2", "0.9"]).config
    assert [name for name, *_ in points.field_differences(config, recipe("lm-tiny")())] == [
        "optimizer.b2"
    ]
    assert not points.field_differences(config, config)
    assert to_json(config)
    with pytest.raises(ConfigError, match="different whole numbers"):
        transfer_command.execute(
            *parse_known(Transfer, "p", ["lm-tiny", "--grow", "depth=2,2"]), "c"
        )
