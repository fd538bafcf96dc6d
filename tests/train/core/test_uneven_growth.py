"""Growing one width alone: what the computed theory allows and refuses, and that a model says the same when measured.

Measured is the first-order change of the output through one kind of weight, which is what an uneven growth upsets first.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mupax import presets
from mupax.presets import ParamSpec, PresetError, Role
from mupax.presets.analysis.limits import Limit
from mupax.presets.analysis.uneven import refuse_uneven
from mupax.train.config.run import OptimizerConfig
from mupax.train.core.factors import hyperparams, init_stds, resolve
from mupax.train.core.step import StepInputs, gradients
from mupax.zoo.configs import DecoderConfig
from mupax.zoo.definition import definition

BASE = DecoderConfig(
    width=32,
    num_heads=4,
    depth=1,
    mlp_ratio=1,
    vocab_size=17,
    seq_len=12,
    bias=False,
    norm_gain=False,
)
BY = 16
GROWN = {
    "mlp alone": (BASE, dataclasses.replace(BASE, mlp_ratio=BY)),
    "kv_heads alone": (
        dataclasses.replace(BASE, num_heads=BY, head_dim=8, num_kv_heads=1),
        dataclasses.replace(BASE, num_heads=BY, head_dim=8, num_kv_heads=BY),
    ),
}
AXIS = {"mlp alone": {"mlp": 1.0}, "kv_heads alone": {"kv_heads": 1.0}}
WEIGHT = {
    "mlp alone": ("MLP in", "block.mlp.up"),
    "kv_heads alone": ("value", "block.attention.value"),
}


@functools.cache
def changes(model: DecoderConfig, base: DecoderConfig, key: str) -> dict[str, float]:
    """rms over tokens of the first-order output change by weight `key` alone, per optimizer; mean over seeds."""
    built, preset = definition(model), presets.get("mup", base=base.base_sizes())
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 17, (8, 13)).astype(np.int32)
    batch = {
        "inputs": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "weights": np.ones((8, 12), np.float32),
    }
    runs = {
        name: StepInputs(resolve(preset, built, name), hyperparams(OptimizerConfig(name=name), 1))  # pyright: ignore[reportArgumentType]
        for name in ("adam", "sgd")
    }

    @jax.jit
    def measure(seed, stds, run, batch):
        params = built.initialize(seed, stds)
        grads, _ = gradients(built, params, run, batch, 1)

        def output(w):
            return built.apply(
                {**params, key: w}, run.factors.multiplier, run.factors.forward, batch["inputs"]
            )

        rms_changes = []
        for direction in (jnp.sign(grads[key]), grads[key]):
            rate = run.factors.lr[key].reshape(-1, *[1] * (direction.ndim - 1))
            _, change = jax.jvp(output, (params[key],), (rate * direction,))
            rms_changes.append(jnp.sqrt(jnp.mean(jnp.square(change))))
        return rms_changes

    stds = init_stds(preset, built)
    means = {"adam": [], "sgd": []}
    for seed in range(4):
        for index, name in enumerate(means):
            means[name].append(math.log(float(measure(seed, stds, runs[name], batch)[index])))
    return {name: float(np.mean(logs)) for name, logs in means.items()}


@pytest.mark.parametrize(
    ("growth", "optimizer_name", "computed", "slope"),
    [
        ("mlp alone", "adam", 0.5, 0.5),
        ("mlp alone", "sgd", 0.0, 0.0),
        ("kv_heads alone", "adam", 0.0, 0.5),
        ("kv_heads alone", "sgd", 1.0, 1.0),
    ],
)
def test_measured_growth_is_the_computed_one(
    growth: str, optimizer_name: str, computed: float, slope: float
):
    """Within 0.2: a factor of sixteen from one MLP entry per width, or one head, is short of a limit.

    Of key heads under Adam the values' share rises as (G/H)^1/2, which ends where each head has its own: theory, which lets an axis
    grow without end, has 0.
    """
    base, grown = GROWN[growth]
    name, key = WEIGHT[growth]
    preset = presets.get("mup", base=base.base_sizes())
    assert Limit(preset, optimizer_name, AXIS[growth]).first_order(name) == computed
    measured = (
        changes(grown, base, key)[optimizer_name] - changes(base, base, key)[optimizer_name]
    ) / math.log(BY)
    assert measured == pytest.approx(slope, abs=0.2)


@pytest.mark.core
def test_uneven_growth_is_refused_with_the_axes_named():
    preset, sizes = presets.get("mup", base=BASE.base_sizes()), BASE.sizes()
    with pytest.raises(
        PresetError,
        match=r"mup under adam does not allow growing .*mlp x4.*: change of the .* explodes as mlp\^0.5; grow",
    ):
        refuse_uneven(preset, {**sizes, "mlp": 4 * sizes["mlp"]})
    refuse_uneven(preset, {**sizes, "mlp": 4 * sizes["mlp"]}, "sgd")
    with pytest.raises(
        PresetError,
        match=r"mup under sgd does not allow growing .*kv_heads x4.* explodes as kv_heads\^",
    ):
        refuse_uneven(preset, {**sizes, "kv_heads": 4 * sizes["kv_heads"]}, "sgd")
    refuse_uneven(preset, {**sizes, "kv_heads": 4 * sizes["kv_heads"]}, "adam")
    for by in (
        {"head_dim": 4, "embed": 4, "mlp": 4},
        {"heads": 4, "kv_heads": 4, "embed": 4, "mlp": 4},
        {"layers": 9},
        {},
    ):
        for name in ("mup", "sp", "depth-mup", "maximal-update"):
            grown = {axis: size * by.get(axis, 1) for axis, size in sizes.items()}
            even = presets.get(name, base=BASE.base_sizes())
            assert even.grows_evenly(grown)  # so that a run need not ask
            refuse_uneven(even, grown)
    for axes in (
        ("mlp",),
        ("kv_heads",),
        ("heads", "embed", "mlp"),
        ("head_dim", "heads", "kv_heads", "embed", "mlp"),
    ):
        assert not preset.grows_evenly(
            {axis: size * (4 if axis in axes else 1) for axis, size in sizes.items()}
        )
    refuse_uneven(
        preset,
        {
            axis: size * {"heads": 4, "embed": 4, "mlp": 4}.get(axis, 1)
            for axis, size in sizes.items()
        },
    )


@pytest.mark.core
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw"])
@pytest.mark.parametrize("name", ["mup", "mup-half", "completep", "sp", "maximal-update"])
def test_widths_of_a_model_without_attention_may_grow_together(name: str, optimizer: str):
    """Its heads do not grow, because there are none."""
    preset = presets.get(name, base={"embed": 64, "mlp": 64})
    in_block = ParamSpec(role=Role.MLP_IN, axes=("embed", "mlp"), fan_in=("embed",), in_block=True)
    refuse_uneven(preset, {"embed": 256, "mlp": 256}, optimizer, [in_block])


@pytest.mark.core
def test_a_chain_of_layers_has_no_stream_to_upset():
    preset = presets.get("mup", base={"embed": 64, "mlp": 64})
    sizes = {"embed": 64, "mlp": 1024}
    layer = ParamSpec(role=Role.MLP_IN, axes=("embed", "mlp"), fan_in=("embed",))
    refuse_uneven(preset, sizes, "adamw", [layer])
    with pytest.raises(PresetError, match="does not allow growing"):
        refuse_uneven(preset, sizes, "adamw", [dataclasses.replace(layer, in_block=True)])
