"""Weights & Biases and trackio beside metrics.jsonl: what they are given, what they cannot stop, and that a missing one is told first."""

import dataclasses
import json
import sys
import threading
import types
from typing import Any

import pytest

from mupax import MupaxError
from mupax.__main__ import main
from mupax.train.config.sections import LogConfig
from mupax.train.run.report import metrics
from tests.train.run.report.test_metrics import ROW, steps_of, write

pytestmark = pytest.mark.core


class Fake(types.ModuleType):
    """Stands for a tracker's package: records what it is given, and by which thread."""

    errors = types.SimpleNamespace(Error=type("Error", (Exception,), {}))

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.started: list[dict[str, Any]] = []
        self.logged: list[dict[str, Any]] = []
        self.threads: set[str] = set()
        self.finished, self.online, self.broken = 0, True, False

    def init(self, project: str, **options: Any) -> types.SimpleNamespace:
        if not self.online:
            raise self.errors.Error("no API key")
        print("* started")  # as trackio does
        self.started.append({"project": project, **options})
        return types.SimpleNamespace(
            id=options.get("id") or f"id{len(self.started)}",
            define_metric=lambda *_, **__: None,
            log=self.log,
            finish=lambda: setattr(self, "finished", self.finished + 1),
        )

    def log(self, numbers: dict[str, Any], step: int | None = None) -> None:
        if self.broken:
            raise RuntimeError("the server is gone")
        self.threads.add(threading.current_thread().name)
        self.logged.append(numbers if step is None else {"step": step, **numbers})


@pytest.fixture(params=["wandb", "trackio"])
def fake(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Fake:
    module = Fake(request.param)
    monkeypatch.setitem(sys.modules, request.param, module)
    return module


def logging_to(tracker: Fake) -> LogConfig:
    return dataclasses.replace(LogConfig(tensorboard=False), **{tracker.__name__: "project"})


def test_it_gets_rows_and_a_resume_continues_its_run(tmp_path, fake, capsys):
    log = logging_to(fake)
    write(tmp_path, [1, 2], log=log)
    write(tmp_path, [2], log=log, resume_step=1)
    write(tmp_path, [1], log=log)
    first, resumed, new = fake.started
    assert {each["project"] for each in fake.started} == {"project"}
    if fake.__name__ == "wandb":
        assert [each["id"] for each in fake.started] == [None, "id1", None]
    else:
        assert [each["resume"] for each in fake.started] == ["never", "allow", "never"]
        assert resumed["name"] == first["name"] != new["name"]
        assert first["name"].startswith(f"{tmp_path.name}-")
        assert "* started" not in capsys.readouterr().out
    assert fake.logged[0] == {"step": 1, **{f"train/{key}": value for key, value in ROW.items()}}
    assert [each["step"] for each in fake.logged] == [1, 2, 2, 1]
    assert (fake.finished, fake.threads) == (3, {"mirrors"})


def test_one_that_fails_is_left_out_and_the_rows_are_there(tmp_path, fake, capsys):
    fake.broken = True
    path = write(tmp_path, [1, 2], log=logging_to(fake))
    assert steps_of(path) == [1, 2]
    assert (
        "is left out from here on: the server is gone; metrics.jsonl has every row"
        in capsys.readouterr().err
    )


def test_one_that_does_not_start_says_what_to_do(tmp_path, fake):
    path = write(tmp_path, [1])
    fake.online = False
    what = (
        r"wandb login.*WANDB_MODE=offline"
        if fake.__name__ == "wandb"
        else r"hf auth login.*leave --log.trackio out"
    )
    with pytest.raises(MupaxError, match=rf"no API key.*{what}"):
        metrics.MetricsWriter(tmp_path, log=logging_to(fake))
    assert len(metrics.read(path)) == 1, "the old rows are untouched"


def test_the_config_keeps_the_project(capsys):
    assert main(["train", "lm-tiny", "--log.trackio", "mine", "--print-config"]) == 0
    assert json.loads(capsys.readouterr().out)["log"]["trackio"] == "mine"
