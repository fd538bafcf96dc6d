"""What a model family gets for its one file: a third family, `examples/mlp_mixer.py`, through everything that asks about models."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from examples.mlp_mixer import MixerConfig
from mupax import presets
from mupax.__main__ import main
from mupax.presets import PresetError
from mupax.presets.analysis import table
from mupax.presets.roles import ParamSpec, Role
from mupax.train.checkpoints import saved_run
from mupax.train.config.record import from_json
from mupax.train.config.run import (
    CheckpointConfig,
    Config,
    DataConfig,
    LogConfig,
    MeshConfig,
    OptimizerConfig,
    PresetConfig,
)
from mupax.train.core.program import assemble
from mupax.train.reuse import runs
from mupax.train.run import loop
from mupax.train.studies.check import check
from mupax.zoo import families
from mupax.zoo.configs import CONFIGS, FAMILIES, ConfigError, ModelConfig, family_class
from mupax.zoo.definition import definition
from tests.fixtures.devices import one_device
from tests.fixtures.programs import shared_programs

__all__ = ["one_device", "shared_programs"]  # fixtures: runs of this file share what is compiled

MIXER = MixerConfig(
    width=16,
    depth=3,
    mixing=10,
    mlp_ratio=2,
    image_size=8,
    patch_size=2,
    channels=1,
    num_classes=10,
)
BASE = PresetConfig(name="mup", base="embed=8,mlp=16,layers=3")


def run_of(workdir: Path, **changes: Any) -> Config:
    return Config(
        recipe="mixer",
        model=MIXER,
        data=DataConfig(name="digits", batch_size=16, eval_examples=32),
        preset=BASE,
        optimizer=OptimizerConfig(peak_lr=3e-3, schedule="constant"),
        log=LogConfig(progress=False, tensorboard=False),
        checkpoint=CheckpointConfig(every_steps=3),
        workdir=str(workdir),
        **{"steps": 5, **changes},
    ).resolved()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_listed_family_is_where_the_table_says(name: str) -> None:
    assert family_class(name).family == name
    assert name in {model.family for model in CONFIGS.values()}


@pytest.mark.parametrize("model", [*CONFIGS.values(), MIXER], ids=[*CONFIGS, "mixer"])
def test_a_module_is_made_of_what_its_config_declares(model: ModelConfig) -> None:
    built, sizes = definition(dataclasses.replace(model, centered=False)), model.sizes()
    assert built.specs == dict(sorted(model.parameters().items()))
    for name, spec in built.specs.items():
        assert built.abstract[name].shape == tuple(sizes[axis] for axis in spec.axes), name
    assert built.factors.keys() == model.factors().keys()
    assert built.count() == families.params(model)


def test_a_module_of_other_parameters_is_refused() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Gated(MixerConfig):
        def parameters(self) -> dict[str, ParamSpec]:
            gate = ParamSpec(
                role=Role.MLP_IN, axes=("layers", "embed", "mlp"), fan_in=("embed",), in_block=True
            )
            return {**super().parameters(), "block.gate": gate}

    with pytest.raises(
        PresetError,
        match=r"block\.gate: .* its module makes none; make it with init\.param\('gate'\)",
    ):
        definition(
            Gated(**{field.name: getattr(MIXER, field.name) for field in dataclasses.fields(MIXER)})
        )


class Unsized(MixerConfig):
    """A family that forgets the size of an axis."""

    def base_sizes(self) -> dict[str, int]:
        sizes = super().base_sizes()
        del sizes["mlp"]
        return sizes


class Undeclared(MixerConfig):
    """A family whose module makes a parameter that the config does not declare."""

    def parameters(self) -> dict[str, ParamSpec]:
        specs = super().parameters()
        del specs["block.up"]
        return specs


FIELDS = {field.name: getattr(MIXER, field.name) for field in dataclasses.fields(MIXER)}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Unsized(**FIELDS), "Unsized declares the axis 'mlp' and gives it no size; add it to"),
        (Undeclared(**FIELDS), "Undeclared declares no such parameter; add it to parameters()"),
        (object(), "the model 'mine' is of the type object; extend TokenModel or ImageModel"),
    ],
)
def test_a_family_that_is_not_complete_is_refused(
    model: Any, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(CONFIGS, "mine", model)
    words = "--model mine --preset.base None --data.name digits --dry-run"
    assert main(["train", "vit-digits", *words.split()]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    if not isinstance(model, Undeclared):  # which makes its parameters in the module alone
        assert main(["models"]) == 2
        assert message in " ".join(capsys.readouterr().err.split())


def test_its_table() -> None:
    preset = presets.get("mup", base={"embed": 8, "mlp": 16, "layers": 3})
    rows = {row["name"]: row for row in table.rows(preset, MIXER.parameters(), MIXER.sizes())}
    assert rows["block.up"]["shape"] == [3, 16, 32]
    assert (rows["block.up"]["lr"], rows["block.mix"]["lr"]) == (
        1 / 2,
        1,
    )  # what mixes positions stays finite
    assert rows["readout"]["role"] == "readout"
    assert rows["readout"]["multiplier"] * rows["readout"]["init_std"] < 1


def test_its_flops() -> None:
    patches, width, hidden = 16, 16, 32
    assert families.forward_terms(MIXER) == {
        "read-in": 2 * 4 * width * patches,
        "hidden": 3 * 2 * 2 * patches * 10 * width,
        "mlp": 3 * 2 * 2 * width * hidden * patches,
        "readout": 2 * width * 10,
    }
    assert families.train_flops(MIXER) == 3 * families.forward_flops(MIXER)
    assert families.params(MIXER) == 4 * 16 + 3 * (2 * 16 * 10 + 2 * 16 * 32) + 16 * 10


def test_it_is_sharded_over_eight_devices(tmp_path: Path) -> None:
    program = assemble(run_of(tmp_path, mesh=MeshConfig(data=2, fsdp=2, tensor=2)))
    state = program.initial_state()
    shapes = {name: w.addressable_shards[0].data.shape for name, w in state.params.items()}
    assert shapes["block.up"] == (3, 8, 16)
    assert shapes["block.mix"] == (3, 16, 10)
    assert all(len(w.sharding.device_set) == 8 for w in state.params.values())
    single = assemble(run_of(tmp_path, mesh=MeshConfig(data=1)), jax.devices()[:1]).initial_state()
    for name, w in single.params.items():
        np.testing.assert_array_equal(np.asarray(w), np.asarray(state.params[name]), err_msg=name)


@pytest.mark.parametrize(("name", "passes"), [("mup", True), ("sp", False)])
def test_it_passes_the_coordinate_check_under_mup_alone(name: str, passes: bool) -> None:
    models = [dataclasses.replace(MIXER, width=width, depth=2) for width in (32, 64, 128)]
    preset = presets.get(name, base=None if presets.get(name).baseless else models[0].base_sizes())
    adam = OptimizerConfig(name="adam", peak_lr=4e-3, schedule="constant", eps=1e-12)
    findings = check.study(
        [definition(model) for model in models], preset, adam, check.batch(models[0]), seeds=2
    )
    assert any(finding.observable.startswith("movement/block.mlp") for finding in findings)
    assert check.passes(findings) == passes


def test_it_trains_is_saved_and_goes_on_bitwise(tmp_path: Path) -> None:
    whole, part = tmp_path / "whole", tmp_path / "part"
    assert loop.run(run_of(whole)) == 0
    assert loop.run(run_of(part, steps=3)) == 0
    assert loop.run(run_of(part, resume=True)) == 0
    states = []
    losses = []
    for folder in (whole, part):
        config = runs.on_one_device(saved_run.find(folder).config)
        states.append(runs.whole_state(folder / "checkpoints" / "5", config))
        rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        losses.append([row["loss"] for row in rows if "loss" in row])
    assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])
    for expected, actual in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_array_equal(np.asarray(actual), np.asarray(expected))
    assert losses[0] == losses[1]
    assert len(losses[0]) == 5
    recorded = json.loads((whole / "config.json").read_text())["config"]
    assert recorded["model"]["family"] == "examples.mlp_mixer:MixerConfig"
    assert from_json(recorded) == run_of(whole)
    assert saved_run.find(whole).config.model == MIXER


@pytest.mark.parametrize(
    "name",
    ["nothing", "examples.mlp_mixer:Mixer", "examples.nothing:Config", "os:path", "a b:C", ""],
)
def test_a_family_that_is_none(name: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"model\.family.*(encoder-decoder, or module:Class|--plugin examples.nothing)",
    ):
        family_class(name)


def test_what_needs_a_transformer_says_so() -> None:
    with pytest.raises(
        ConfigError,
        match=r"growing one size knows the zoo's transformers only, and the model is a examples\.",
    ):
        check.smallest(MIXER)


def test_a_declaration_is_read_without_jax() -> None:
    code = """
import sys
from mupax.__main__ import main

main("presets table mup --model lm-tiny".split())
print("next")
main("models describe lm-tiny".split())
print({"jax", "flax"} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for printed in done.stdout.split("next"):
        assert "readout" in printed
    assert done.stdout.splitlines()[-1] == "set()"
