"""Configs from disk, which may be anyone's: they come back as they were, or are refused by name; nothing else happens."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mupax import MupaxError
from mupax.train.config.preset import preset_of
from mupax.train.config.recipes import RECIPES
from mupax.train.config.record import from_json, model_from_json, model_to_json, to_json
from mupax.train.config.run import (
    CheckpointConfig,
    DataConfig,
    InitConfig,
    MeshConfig,
    OptimizerConfig,
    PresetConfig,
)
from mupax.zoo.configs import CONFIGS, ConfigError
from scripts.campaigns.injection.broken import broken_json
from tests.fixtures.properties import PROPERTY

pytestmark = pytest.mark.core


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
        # Some clip at a norm that no gradient has.
        {"optimizer": OptimizerConfig(clip_norm=1e30)},
        {"seed": 2**32 - 1},
    ],
)
def test_what_is_written_is_read_again(changed: dict[str, Any]) -> None:
    config = dataclasses.replace(RECIPES["lm-tiny"](), **changed)
    assert from_json(as_read(to_json(config))) == config


@pytest.mark.parametrize(
    ("owner", "field", "value", "message"),
    [
        ("model", "width", "64", "model.width is '64'; it must be int"),
        ("model", "width", 64.0, "model.width is 64.0"),
        ("model", "width", True, "model.width is True"),
        ("model", "width", 10**30, "model.width is 1000000"),
        ("model", "norm", "batchnorm", "model.norm is 'batchnorm'; it must be '"),
        ("model", "mlp_ratio", float("nan"), "model.mlp_ratio is nan"),
        ("model", "compute", {"layers": 3}, "model.compute.layers is 3"),
        (
            "model",
            "compute",
            {"dtype": "bfloat17"},
            r"it must be 'float32' or 'bfloat16'; did you mean bfloat16\?",
        ),
        ("model", "family", ["vit"], "model.family is"),
        ("optimizer", "peak_lr", None, "optimizer.peak_lr is None"),
        ("optimizer", "name", [], r"optimizer.name is \[\]"),
        ("preset", "constants", [1], r"preset.constants is \[1\]; it must be a list of str"),
        ("optimizer", "clip_norm", "1", "clip_norm is '1'; it must be float or None"),
        ("data", "name", 7, "data.name is 7"),
    ],
)
def test_a_value_of_another_type_is_refused(
    owner: str, field: str, value: Any, message: str
) -> None:
    fields = as_read(to_json(RECIPES["lm-tiny"]()))
    fields[owner][field] = value
    with pytest.raises(ConfigError, match=message):
        from_json(fields)


@pytest.mark.parametrize(
    "fields",
    [[], None, "x", {"model": []}, {"model": None}, {"model": {"family": "vit"}, "data": 1}],
)
def test_what_is_no_config_is_refused(fields: Any) -> None:
    with pytest.raises(ConfigError):
        from_json(fields)


@pytest.mark.parametrize("recipe", ["lm-tiny", "bordelon-vit"])
def test_broken_configs_are_read_or_refused(recipe: str) -> None:
    content = json.dumps(to_json(RECIPES[recipe]())).encode()
    refused = 0

    @PROPERTY
    @given(st.randoms(use_true_random=False))
    def is_read_or_refused(draw: random.Random) -> None:
        nonlocal refused
        fields = json.loads(broken_json(content, draw))
        try:
            config = from_json(fields)
            preset_of(config)
            assert dataclasses.is_dataclass(config)
        except MupaxError:  # whose text says what to write; anything else is a defect
            refused += 1

    is_read_or_refused()
    assert refused > 10


@PROPERTY
@given(
    steps=st.integers(1, 2**40),
    seed=st.integers(0, 2**31 - 1),
    peak_lr=st.floats(1e-12, 1e3),
    weight_decay=st.floats(0, 1e3),
    name=st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
)
def test_any_numbers_and_names_survive_json(
    steps: int, seed: int, peak_lr: float, weight_decay: float, name: str
) -> None:
    config = RECIPES["lm-tiny"]()
    optimizer = dataclasses.replace(config.optimizer, peak_lr=peak_lr, weight_decay=weight_decay)
    log = dataclasses.replace(config.log, trackio=name)
    config = dataclasses.replace(config, steps=steps, seed=seed, optimizer=optimizer, log=log)
    assert from_json(as_read(to_json(config))) == config


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
    [
        ("text:/some/file.txt", "tokens"),
        ("images:/some/folder", "images"),
        ("c4/en:3.0.1", "tokens"),
        ("my_set", None),
    ],
)
def test_the_task_that_data_is_for(name: str, task: str | None) -> None:
    assert DataConfig(name=name, batch_size=1).task == task
