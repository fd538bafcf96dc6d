"""Configs from disk, which may be anyone's: they come back as they were, or are refused by name; nothing else happens."""

from __future__ import annotations

import copy
import dataclasses
import json
import random
from typing import Any

import pytest

from mupax.errors import MupaxError
from mupax.train.config.preset import preset_of
from mupax.train.config.recipes import RECIPES
from mupax.train.config.record import from_json, model_from_json, model_to_json, to_json
from mupax.train.config.run import CheckpointConfig, DataConfig, InitConfig, MeshConfig, OptimizerConfig, PresetConfig
from mupax.zoo.configs import CONFIGS, ConfigError

pytestmark = pytest.mark.core

NASTY: list[Any] = [
    None, True, 0, -1, 3, 2**63, 10**40, 0.5, 1e308, float("nan"), float("inf"), "", "x", "../x", "lm-tiny", "\0", [], {}, [1],
    [[]], {"a": 1}, ["a=b"], [None],
]  # fmt: skip


def as_read(value: Any) -> Any:
    return json.loads(json.dumps(value))


@pytest.mark.parametrize("name", CONFIGS)
def test_every_model_comes_back(name: str) -> None:
    assert model_from_json(as_read(model_to_json(CONFIGS[name]))) == CONFIGS[name]


def test_fields_newer_than_the_file_have_their_defaults() -> None:
    fields = as_read(model_to_json(CONFIGS["gpt2"]))
    del fields["norm_eps"], fields["compute"]
    assert model_from_json(fields) == CONFIGS["gpt2"]


@pytest.mark.parametrize(
    "changed",
    [
        {"mesh": MeshConfig(rules=("mlp=fsdp",), slices=("data=2",))},
        {"freeze": ("bias",), "train_only": ("readout", "bias")},
        {"resume": True, "resume_change": ("schedule",)},
        {"init": InitConfig(init_from="run", init_new=("readout",), init_drop=("block.mlp.*",))},
        {"preset": PresetConfig(constants=("c_a=0.5",))},
    ],
)
def test_lists_of_json_are_tuples_again(changed: dict[str, Any]) -> None:
    config = dataclasses.replace(RECIPES["lm-tiny"](), **changed)
    assert from_json(as_read(to_json(config))) == config


@pytest.mark.parametrize(
    ("owner", "field", "value", "message"),
    [
        ("model", "width", "64", "model.width is '64'; it must be int"),
        ("model", "width", 64.0, "model.width is 64.0"),
        ("model", "width", True, "model.width is True"),
        ("model", "width", 10**30, "model.width is 1000000"),
        ("model", "norm", "batchnorm", "model.norm is 'batchnorm'"),
        ("model", "mlp_ratio", float("nan"), "model.mlp_ratio is nan"),
        ("model", "compute", {"layers": 3}, "model.compute.layers is 3"),
        ("model", "family", ["vit"], "model.family is"),
        ("optimizer", "peak_lr", None, "optimizer.peak_lr is None"),
        ("optimizer", "name", [], r"optimizer.name is \[\]"),
        ("preset", "constants", [1], r"preset.constants is \[1\]"),
        ("data", "name", 7, "data.name is 7"),
    ],
)
def test_a_value_of_another_type_is_refused(owner: str, field: str, value: Any, message: str) -> None:
    fields = as_read(to_json(RECIPES["lm-tiny"]()))
    fields[owner][field] = value
    with pytest.raises(ConfigError, match=message):
        from_json(fields)


@pytest.mark.parametrize(
    "fields", [[], None, "x", {"model": []}, {"model": None}, {"model": {"family": "vit"}, "data": 1}]
)
def test_what_is_no_config_is_refused(fields: Any) -> None:
    with pytest.raises(ConfigError):
        from_json(fields)


@pytest.mark.parametrize("recipe", ["lm-tiny", "bordelon-vit"])
def test_broken_configs_are_read_or_refused(recipe: str) -> None:
    whole, draw, refused = as_read(to_json(RECIPES[recipe]())), random.Random(3), 0
    for _ in range(1500):
        fields = copy.deepcopy(whole)
        for _ in range(draw.choice([1, 1, 3])):
            owner = draw.choice([fields, *(value for value in fields.values() if isinstance(value, dict))])
            if not owner:
                continue
            key = draw.choice(list(owner))
            if draw.random() < 0.7:
                owner[key] = copy.deepcopy(draw.choice(NASTY))
            elif draw.random() < 0.5:
                del owner[key]
            else:
                owner[draw.choice(["x", "", "../x", draw.choice(list(owner))])] = owner[key]
        try:
            config = from_json(fields)
            preset_of(config)
            assert dataclasses.is_dataclass(config)
        except MupaxError:  # whose text says what to write; anything else is a defect
            refused += 1
    assert refused > 300


@pytest.mark.parametrize("name", RECIPES)
def test_a_config_survives_json(name: str) -> None:
    config = RECIPES[name]()
    assert from_json(json.loads(json.dumps(to_json(config)))) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stepz": 3}, "did you mean steps?"),
        ({"model": {"family": "cnn"}}, "model.family is 'cnn'; write one of vit, decoder"),
        ({"optimizer": {"peak_rl": 1.0}}, "did you mean optimizer.peak_lr?"),
        ({"data": {"name": "digits"}}, "batch_size"),
    ],
)
def test_a_wrong_config_on_disk(change: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        from_json({**to_json(RECIPES["lm-tiny"]()), **change})


def test_a_config_checks_itself() -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.keep is 0"):
        CheckpointConfig(keep=0)
    with pytest.raises(ConfigError, match=r"optimizer\.warmup_steps is -1"):
        OptimizerConfig(warmup_steps=-1)


@pytest.mark.parametrize(
    ("name", "task"),
    [("text:/some/file.txt", "tokens"), ("images:/some/folder", "images"), ("c4/en:3.0.1", "tokens"), ("my_set", None)],
)
def test_the_task_that_data_is_for(name: str, task: str | None) -> None:
    assert DataConfig(name=name, batch_size=1).task == task
