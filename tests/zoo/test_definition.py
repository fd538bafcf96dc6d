"""Models taken apart and put together again, and how their parameters start: sizes, bits, and what define() refuses."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mupax import presets
from mupax.presets import ParamSpec, Preset, PresetError, Role
from mupax.train.config.run import MeshConfig, OptimizerConfig
from mupax.train.core import optimizer, state
from mupax.train.core.factors import hyperparams, init_stds, resolve
from mupax.train.core.step import StepInputs, trace_train_step
from mupax.train.parallel.sharding import MeshLayout, make_mesh
from mupax.zoo.configs import DecoderConfig, ModelConfig, ViTConfig
from mupax.zoo.definition import Definition, Factor, define, definition, initial_value, normals

pytestmark = pytest.mark.core

DECODER = DecoderConfig(
    width=22,
    depth=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=4,
    mlp_ratio=1.5,
    vocab_size=17,
    seq_len=7,
)
VIT = ViTConfig(
    width=20,
    depth=2,
    num_heads=5,
    mlp_ratio=1.3,
    image_size=9,
    patch_size=3,
    channels=2,
    num_classes=7,
    pool="cls",
)
BASE = {"embed": 11, "heads": 3, "kv_heads": 1, "head_dim": 2, "mlp": 11, "layers": 2}


def weight(role: Role, axes: tuple[str, ...], shape: tuple[int, ...], **more: Any) -> nnx.Param:
    return nnx.Param(jnp.ones(shape), spec=ParamSpec(role=role, axes=axes, **more))


class Classifier(nnx.Module):
    """A model of a user's own: features [B, 3] through two separate layers to logits [B, 5]. No scan, no attention."""

    def __init__(self) -> None:
        self.read_in = weight(Role.PATCH_EMBEDDING, ("input", "embed"), (3, 11), fan_in=("input",))
        self.layers = nnx.List(
            [
                weight(Role.HIDDEN, ("embed", "mlp"), (11, 11), fan_in=("embed",), in_block=True)
                for _ in range(2)
            ]
        )
        self.readout = weight(Role.READOUT, ("embed", "classes"), (11, 5), fan_in=("embed",))

    def __call__(self, x: jax.Array) -> jax.Array:
        h = x @ self.read_in[...]
        for layer in self.layers:
            h = h + jnp.tanh(h @ layer[...])
        return h @ self.readout[...]


# A model of a user's own


def test_a_users_own_model_comes_apart_and_together() -> None:
    model_definition = define(Classifier, sizes={"layers": 2})
    assert {name: leaf.shape for name, leaf in model_definition.abstract.items()} == {
        "read_in": (3, 11), "layers.0": (11, 11), "layers.1": (11, 11), "readout": (11, 5),
    }  # fmt: skip
    assert model_definition.sizes == {"layers": 2, "input": 3, "embed": 11, "mlp": 11, "classes": 5}
    assert model_definition.specs["layers.1"].role is Role.HIDDEN
    assert not model_definition.factors
    assert model_definition.count() == 33 + 121 + 121 + 55
    random = np.random.default_rng(0)
    params = {
        name: jnp.asarray(random.standard_normal(leaf.shape), jnp.float32)
        for name, leaf in model_definition.abstract.items()
    }
    x = random.standard_normal((2, 3)).astype(np.float32)
    h = x @ params["read_in"]
    for layer in range(2):
        h = h + jnp.tanh(h @ (3 * params[f"layers.{layer}"]))
    multipliers = {name: jnp.float32(3.0 if name.startswith("layers") else 1.0) for name in params}
    np.testing.assert_allclose(
        model_definition.apply(params, multipliers, {}, jnp.asarray(x)),
        h @ params["readout"],
        rtol=1e-5,
    )


def test_a_users_own_model_trains() -> None:
    model_definition = define(Classifier, sizes={"layers": 2})
    preset = presets.get("depth-mup", base={"embed": 5, "mlp": 5, "layers": 1})
    config = OptimizerConfig(peak_lr=0.02, schedule="constant")
    layout = MeshLayout(make_mesh(MeshConfig(data=1), jax.devices()[:1]))
    tx = optimizer.build(config, model_definition.specs)
    abstract = state.abstract_state(model_definition, tx, layout)
    run = StepInputs(resolve(preset, model_definition, config.name), hyperparams(config, 30))
    random = np.random.default_rng(1)
    inputs = random.standard_normal((32, 3)).astype(np.float32)
    batch = {
        "inputs": inputs,
        "targets": np.argmax(inputs, axis=1).astype(np.int32),
        "weights": np.ones(32, np.float32),
    }
    train = trace_train_step(model_definition, tx, abstract, layout, run, batch).lower().compile()
    now = state.Initializer(model_definition, tx, abstract).state(
        0, init_stds(preset, model_definition)
    )
    losses = []
    for _ in range(30):
        now, metrics = train(now, run, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.5 * losses[0]


def test_nothing_is_allocated() -> None:
    huge = definition(dataclasses.replace(DECODER, width=6_000_000, vocab_size=50_000_017))
    assert huge.count() > 1e14


def test_a_zoo_model_round_trips() -> None:
    model = dataclasses.replace(DECODER, tied=True, qk_norm=True, depth=1)
    built = model.module(nnx.Rngs(3))
    model_definition = definition(model)
    arrays = {
        ".".join(map(str, path)): variable.get_value()
        for path, variable in nnx.to_flat_state(nnx.state(built))
    }
    assert arrays.keys() == model_definition.specs.keys() | model_definition.factors.keys()
    again = model_definition.bind(
        {n: arrays[n] for n in model_definition.specs},
        {n: arrays[n] for n in model_definition.factors},
    )
    tokens = jnp.arange(7)[None]
    first, second = (jax.jit(lambda x, m=m: m(x))(tokens) for m in (built, again))  # pyright: ignore[reportCallIssue]
    np.testing.assert_array_equal(first, second)


# What define() refuses


class Owner(nnx.Module):
    def __init__(self, **state: Any) -> None:
        for name, value in state.items():
            setattr(self, name, value)


GAIN = ParamSpec(role=Role.NORM_GAIN, axes=("embed",))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Owner(w=nnx.Param(jnp.ones((2, 3)))), r"parameter w \(2, 3\) has no spec; write nnx\.Param\(value, spec="),
        (lambda: Owner(w=nnx.Param(jnp.ones(3), spec="embed")), "has no spec"),
        (lambda: Owner(inner=Owner(w=nnx.Param(jnp.ones((2, 3)), spec=GAIN))), r"inner\.w has shape \(2, 3\) but axes"),
        (lambda: Owner(a=nnx.Param(jnp.ones(3), spec=GAIN), b=nnx.Param(jnp.ones(5), spec=GAIN)), "'embed' is 5 in b but 3 in a"),
        (lambda: Owner(w=nnx.Param(jnp.ones(7), spec=GAIN)), "'embed' is 7 in w but 11 in the sizes given"),
        (lambda: Owner(mean=nnx.BatchStat(jnp.ones(3))), "mean is BatchStat; only nnx.Param and Factor state"),
        (lambda: Owner(drop=nnx.Dropout(0.5, rngs=nnx.Rngs(0))), "only nnx.Param and Factor state"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(make: Callable[[], nnx.Module], message: str) -> None:
    sizes = {"embed": 11} if "sizes given" in message else None
    with pytest.raises(PresetError, match=message):
        define(make, sizes=sizes)


def test_a_stack_without_its_layer_axis_is_refused() -> None:
    # What nnx.vmap makes of a module whose specs do not name the axis it adds.
    def make() -> nnx.Module:
        return nnx.vmap(lambda rngs: Owner(w=nnx.Param(jnp.ones(3), spec=GAIN)))(
            nnx.Rngs(0).split(2)
        )

    with pytest.raises(PresetError, match=r"shape \(2, 3\) but axes \('embed',\)"):
        define(make)


def test_a_factor_of_an_unknown_kind_is_refused() -> None:
    model_definition = define(lambda: Owner(scale=Factor(jnp.ones(()), kind="tempreature")))
    with pytest.raises(
        ValueError,
        match="no factor is of kind 'tempreature'; write logits, skip, branch or readout",
    ):
        resolve(presets.get("sp"), model_definition)


# How parameters start


@functools.cache
def initializer(model: ModelConfig) -> tuple[Definition, Callable[..., dict[str, jax.Array]]]:
    model_definition = definition(model)
    return model_definition, jax.jit(functools.partial(model_definition.initialize, draw=normals))


def started(model: ModelConfig, preset: Preset, seed: int = 0) -> dict[str, np.ndarray]:
    """A model's parameters as a run makes them, on one device."""
    model_definition, initialize = initializer(model)
    return jax.device_get(initialize(np.uint32(seed), init_stds(preset, model_definition)))


WIDE = dataclasses.replace(
    DECODER, width=352, head_dim=16, num_heads=22, num_kv_heads=11, vocab_size=53, seq_len=29
)


@pytest.mark.parametrize("name", ["sp", "mup", "mup-half", "depth-mup"])
@pytest.mark.parametrize(
    "model", [WIDE, dataclasses.replace(VIT, width=320, image_size=24)], ids=["decoder", "vit"]
)
def test_the_spread_of_every_parameter_is_the_declared_one(model: Any, name: str) -> None:
    model_definition = definition(model)
    preset = presets.get(name, base=BASE)
    declared, params = init_stds(preset, model_definition), started(model, preset)
    for parameter, spec in model_definition.specs.items():
        value = params[parameter]
        if spec.role in (Role.BIAS, Role.NORM_GAIN):
            assert (value == (0.0 if spec.role is Role.BIAS else 1.0)).all()
            continue
        # The readout's multiplier form keeps the base's spread at every width.
        sizes = (
            {**model_definition.sizes, **BASE}
            if spec.role is Role.READOUT and name != "sp"
            else model_definition.sizes
        )
        expected = (
            1.0
            if spec.role is Role.PATCH_EMBEDDING
            else np.prod([sizes[axis] for axis in spec.fan_in]) ** -0.5
        )
        np.testing.assert_allclose(declared[parameter], expected, rtol=1e-6)
        # A std measured from n numbers is off by 1/sqrt(2n), a mean by 1/sqrt(n); 4.5 of those once in 1e5 draws.
        rows = value.reshape(len(value), -1) if spec.axes[0] == "layers" else value.reshape(1, -1)
        for row in rows:
            assert abs(row.std() / expected - 1) < 4.5 / np.sqrt(2 * row.size), parameter
            assert abs(row.mean() / expected) < 4.5 / np.sqrt(row.size), parameter


def test_control_a_wrong_spread_of_ten_percent_is_seen() -> None:
    value = 1.1 * np.random.default_rng(0).standard_normal(352 * 53)
    assert abs(value.std() - 1) > 4.5 / np.sqrt(2 * value.size)


def test_stacked_parameters_start_as_separate_layers_would() -> None:
    key, std = jax.random.key(5), jnp.array([0.5, 2.0, 3.0])
    stacked = ParamSpec(
        role=Role.QUERY, axes=("layers", "embed", "heads"), fan_in=("embed",), in_block=True
    )
    single = ParamSpec(role=Role.QUERY, axes=("embed", "heads"), fan_in=("embed",), in_block=True)
    together = jax.jit(lambda key: initial_value(key, stacked, (3, 5, 7), std, jnp.float32))(key)
    for layer in range(3):
        alone = jax.jit(
            lambda key, s=std[layer]: initial_value(key, single, (5, 7), s, jnp.float32)
        )
        np.testing.assert_array_equal(together[layer], alone(jax.random.fold_in(key, layer)))


def test_numbers_drawn_in_one_loop_are_those_drawn_by_themselves() -> None:
    stacked = ParamSpec(
        role=Role.QUERY, axes=("layers", "embed", "heads"), fan_in=("embed",), in_block=True
    )
    single = ParamSpec(role=Role.READOUT, axes=("embed", "vocab"), fan_in=("embed",))
    deeper = dataclasses.replace(stacked, part="encoder", axes=("encoder_layers", "embed", "heads"))
    specs = {
        "small": stacked,
        "large": single,
        "bias": ParamSpec(role=Role.BIAS, axes=("vocab",)),
        "encoder": deeper,
    }  # 3 x 1 block, 2, none, 4 x 1
    shapes = {"small": (3, 5, 7), "large": (257, 67), "bias": (67,), "encoder": (4, 5, 7)}
    keys = dict(zip(specs, jax.random.split(jax.random.key(2), len(specs)), strict=True))

    def start(drawn: dict[str, jax.Array]) -> dict[str, jax.Array]:
        std = np.float32(0.37)
        return {
            n: initial_value(keys[n], s, shapes[n], std, jnp.float32, drawn.get(n))
            for n, s in specs.items()
        }

    one, each = jax.jit(lambda: start(normals(keys, specs, shapes)))(), jax.jit(lambda: start({}))()
    for name in specs:
        np.testing.assert_array_equal(one[name], each[name], err_msg=name)
    assert len(np.unique(one["large"])) > 17_000
    with jax.threefry_partitionable(False):  # other bits
        assert normals(keys, specs, shapes) == {}


def test_a_deeper_model_starts_with_the_layers_of_a_shallower_one() -> None:
    preset = presets.get("mup", base=BASE)
    shallow, deep = (started(dataclasses.replace(DECODER, depth=depth), preset) for depth in (2, 3))
    for name, value in shallow.items():
        np.testing.assert_array_equal(
            value, deep[name][:2] if name.startswith("block.") else deep[name]
        )
    assert not (deep["block.mlp.up"][0] == deep["block.mlp.up"][1]).any()


def test_seeds_and_names_draw_apart() -> None:
    preset = presets.get("sp", base=BASE)
    model_definition = definition(DECODER)
    first, again, other = (started(DECODER, preset, seed) for seed in (0, 0, 1))
    drawn = [
        name
        for name, spec in model_definition.specs.items()
        if spec.role not in (Role.BIAS, Role.NORM_GAIN)
    ]
    for name in drawn:
        np.testing.assert_array_equal(first[name], again[name])
        assert not (first[name] == other[name]).any()
    heads = [first[n].reshape(-1)[:12] / first[n].std() for n in drawn]
    assert len({round(float(numbers[0]), 5) for numbers in heads}) == len(drawn)


def test_a_zero_readout_is_zero_and_nothing_else_changes() -> None:
    plain = started(DECODER, presets.get("mup", base=BASE))
    zero = started(DECODER, presets.get("mup", base=BASE, zero_readout=True))
    assert (zero.pop("readout") == 0).all()
    assert plain.pop("readout").all()
    for name, value in zero.items():
        np.testing.assert_array_equal(value, plain[name])


# Factors


def test_factors_have_a_number_per_layer_of_what_is_stacked() -> None:
    model_definition = definition(dataclasses.replace(DECODER, tied=True))
    factors = resolve(presets.get("depth-mup", base=BASE), model_definition)
    for column in (factors.multiplier, factors.lr, factors.eps, factors.weight_decay):
        assert column.keys() == model_definition.specs.keys()
        for name, number in column.items():
            assert number.dtype == np.float32
            assert number.shape == ((3,) if name.startswith("block.") else ())
    assert {name: number.shape for name, number in factors.forward.items()} == {
        "block.attention.logit_scale": (3,), "block.branch": (3, 2), "tied_readout": (),
    }  # fmt: skip


def test_forward_factors_are_the_presets() -> None:
    tied = dataclasses.replace(DECODER, tied=True)
    preset = presets.get("depth-mup", base=BASE, alpha_a=0.75, alpha_l=0.6, gamma0=0.5, beta0=3.0)
    forward = resolve(preset, definition(tied)).forward
    # Base: head_dim 2, layers 2, embed 11; here 4, 3, 22.
    np.testing.assert_allclose(
        forward["block.attention.logit_scale"], 2**-0.5 * 2**-0.75, rtol=1e-6
    )
    np.testing.assert_allclose(forward["block.branch"], 3.0 * 1.5**-0.6, rtol=1e-6)
    np.testing.assert_allclose(forward["tied_readout"], 11**-0.5 / 2 / 0.5, rtol=1e-6)


def test_a_skip_is_a_factor_only_where_a_preset_moves_it() -> None:
    model_definition, preset = definition(DECODER), presets.get("mup", base=BASE)
    assert "block.skip" in model_definition.factors
    assert "block.skip" not in resolve(preset, model_definition).forward

    class Damped(Preset):
        def residual_scale(self, sizes: Any, layer: int, branch: Any) -> tuple[float, float]:
            return 1 - 0.1 * layer, {"attention": 2.0, "mlp": 3.0}[branch]

    damped = Damped(
        **{field.name: getattr(preset, field.name) for field in dataclasses.fields(preset)}
    )
    forward = resolve(damped, model_definition).forward
    np.testing.assert_allclose(forward["block.skip"], [[1, 1], [0.9, 0.9], [0.8, 0.8]], rtol=1e-6)
    np.testing.assert_allclose(forward["block.branch"], [[2, 3]] * 3)


@pytest.mark.core
@pytest.mark.parametrize("drawn_together", [False, True])
def test_numbers_are_of_the_declared_distribution(drawn_together: bool) -> None:
    """Against Flax's initializers: the same quantiles, and nothing beyond their bounds."""
    n, initializers, key = 300, jax.nn.initializers, jax.random.key(3)
    theirs = {
        "uniform": initializers.xavier_uniform()(key, (n, n)),
        "truncated": initializers.lecun_normal()(key, (n, n)),
        "normal": initializers.variance_scaling(1.0, "fan_in", "normal")(key, (n, n)),
    }
    specs = {
        name: ParamSpec(
            role=Role.HIDDEN, axes=("input", "output"), fan_in=("input",), distribution=name
        )  # pyright: ignore
        for name in theirs
    }
    keys = {name: jax.random.fold_in(key, i) for i, name in enumerate(specs)}
    draws = normals(keys, specs, dict.fromkeys(specs, (n, n))) if drawn_together else {}
    quantiles = np.linspace(0.01, 0.99, 99)
    for name, spec in specs.items():
        ours = initial_value(
            keys[name], spec, (n, n), n**-0.5, jnp.dtype("float32"), draws.get(name)
        )
        # The standard error of a quantile of 90,000 numbers is below 1.2 % of their deviation in the outermost percent.
        apart = np.quantile(ours, quantiles) - np.quantile(theirs[name], quantiles)
        assert np.abs(apart).max() < 0.06 * n**-0.5, name
        bound = {
            "uniform": (6 / (n + n)) ** 0.5,
            "truncated": 2 * n**-0.5 / 0.87962566103423978,
        }.get(name, np.inf)
        assert np.abs(ours).max() <= bound * (1 + 1e-6), name
        assert name == "normal" or np.abs(ours).max() > 0.99 * bound
        assert float(jnp.std(ours)) == pytest.approx(n**-0.5, rel=0.01)
