"""A preset for models of any framework: what the parameters become in the forward pass, and how far each moves."""

from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mupax import presets, train, zoo
from mupax.presets import ParamSpec, PresetError, Role
from mupax.train.core import factors, optimizer
from mupax.train.core.factors import hyperparams

D, F, L, V, H, N = 6, 14, 2, 11, 2, 5
HEAD = ("heads", "head_dim")


def block(role: Role, axes: tuple[str, ...], fan_in: tuple[str, ...]) -> ParamSpec:
    return ParamSpec(role=role, axes=axes, fan_in=fan_in, in_block=True)


SPECS = {
    "token": ParamSpec(role=Role.TOKEN_EMBEDDING, axes=("vocab", "embed")),
    "*.query": block(Role.QUERY, ("embed", *HEAD), ("embed",)),
    "*.out": block(Role.ATTENTION_OUT, (*HEAD, "embed"), HEAD),
    "*.out_bias": block(Role.ATTENTION_OUT, (*HEAD, "embed"), HEAD).bias,
    "*.down": block(Role.MLP_OUT, ("mlp", "embed"), ("mlp",)),
    "readout": ParamSpec(role=Role.READOUT, axes=("embed", "vocab"), fan_in=("embed",)),
}


def shapes() -> dict:
    each = {"query": (D, H * N), "out": (H * N, D), "out_bias": (D,), "down": (F, D)}
    tree = {"token": (V, D), "readout": (D, V), "blocks": [each] * L}
    return jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, jnp.float32), tree, is_leaf=lambda x: isinstance(x, tuple)
    )


def normal_arrays(seed: int = 0) -> dict:
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda w: random.normal(size=w.shape).astype("f"), shapes())


def model() -> zoo.FunctionDefinition:
    return zoo.define_function(
        lambda params: params, shapes(), SPECS, sizes={"layers": L, "heads": H}
    )


BASE = {"embed": 3, "mlp": 7, "heads": 1, "kv_heads": 1, "head_dim": 5, "layers": 1}
EVEN = presets.get("mup", base={**BASE, "heads": 2, "layers": 2, "head_dim": 2.5})
ADAMW = train.OptimizerConfig(
    name="adamw", peak_lr=0.5, weight_decay=0.25, eps=0.1, schedule="constant"
)


def test_what_a_preset_sets_acts_through_parameters():
    # Mean-field: the readout's multiplier is its whole scale; branches by 1/sqrt(L) of L = 2 times the base's.
    preset = presets.get("depth-mup", base=BASE, alpha_l=1.0, form="mean-field")
    mup = train.parameterize(model(), preset, ADAMW)
    params = jax.jit(mup.init)(3)
    acting = jax.jit(mup.forward)(params)
    sizes, own = mup.definition.sizes, N**-0.5
    multiplier = {name: float(x) for name, x in mup.factors.multiplier.items()}
    branch = preset.residual_scale(sizes, 0, "attention")[1]
    assert branch == pytest.approx(1 / 2)
    for layer in range(L):
        was = params["blocks"][layer]
        now = acting["blocks"][layer]
        scales = {"query": preset.logit_scale(sizes) / own, "out": branch, "down": branch}
        for name, scale in scales.items():
            expected = was[name] * multiplier[f"blocks.{layer}.{name}"] * scale
            np.testing.assert_allclose(now[name], expected, rtol=1e-6)
    np.testing.assert_allclose(
        acting["readout"], params["readout"] * multiplier["readout"], rtol=1e-6
    )
    assert not np.any(params["blocks"][0]["out_bias"])
    assert float(np.std(params["token"])) == pytest.approx(1, rel=0.4)


def test_depth_is_counted_by_the_names_of_layers():
    """Layer 10 comes after layer 2."""
    names = {f"h_{i}.down": (F, D) for i in range(11)}
    leaves = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in names.items()}
    of = zoo.define_function(
        lambda params: params, leaves, {"*": SPECS["*.down"]}, sizes={"layers": 11}
    )
    ones = {name: jnp.ones((F, D)) for name in names}
    acting = of.forward(ones, {"branch": jnp.arange(22.0).reshape(11, 2)})
    assert {name: float(array[0, 0]) for name, array in acting.items()} == {
        f"h_{i}.down": 2.0 * i + 1 for i in range(11)
    }


def test_a_scaled_stream_is_refused():
    with pytest.raises(PresetError, match="scales the residual stream itself"):
        train.parameterize(
            model(), presets.get("u-mup"), dataclasses.replace(ADAMW, weight_decay=0.0)
        )


def test_a_tied_readout_scales_logits_and_what_is_inside_is_seen():
    tied = ParamSpec(role=Role.READOUT, axes=("vocab", "embed"), fan_in=("embed",), tied=True)
    table = {"token": jax.ShapeDtypeStruct((V, D), jnp.float32)}
    of = zoo.define_function(
        lambda params, x: x @ params["token"].T, table, {"token": SPECS["token"]}, tied_readout=tied,
        internals=lambda params, x: {"embedding": params["token"]},
    )  # fmt: skip
    preset = presets.get("mup", base={"embed": 3})
    mup = train.parameterize(of, preset, ADAMW)
    params, x = {"token": np.ones((V, D), np.float32)}, np.ones((1, D), np.float32)
    expected = preset.scales(tied, of.sizes).multiplier * float(mup.factors.multiplier["token"]) * D
    np.testing.assert_allclose(mup.apply(params, x), np.full((1, V), expected), rtol=1e-6)
    assert expected != pytest.approx(D)
    model = of.model(params, mup.factors.multiplier, mup.factors.forward)
    assert model.internals(x)["embedding"].shape == (V, D)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_transformation_is_the_loops_own_chain(name: str):
    """Every parameter's rate, decay and eps is the loop's, with each matrix read by its axes."""
    of = model()
    config = dataclasses.replace(ADAMW, name=name)
    tx = train.parameterize(of, EVEN, config).optimizer(4)
    chain = optimizer.build(config, of.specs)
    params, grads = normal_arrays(), normal_arrays(seed=1)
    numbers = {
        "factors": factors.resolve(EVEN, of, name),
        "hyper": hyperparams(config, 4).at(jnp.int32(0)),
    }

    @jax.jit
    def updates(params, grads):
        named = of.arrays(params)
        return tx.update(grads, tx.init(params), params), chain.update(
            of.arrays(grads), chain.init(named), named, **numbers
        )

    (moved, state), (expected, _) = updates(params, grads)
    chex.assert_trees_all_close(of.arrays(moved), expected, rtol=1e-6)
    chex.assert_trees_all_equal_shapes(moved, params)
    assert int(state.step) == 1


def test_muons_adam_part_keeps_its_peak_when_another_is_given():
    of = model()
    one = dataclasses.replace(ADAMW, name="muon", weight_decay=0.0)
    mup = train.parameterize(of, EVEN, dataclasses.replace(one, adam_lr=0.25))
    params, grads = normal_arrays(), normal_arrays(seed=1)

    @jax.jit
    def first_updates(peak_lr):
        tx = mup.optimizer(4, peak_lr)
        return of.arrays(tx.update(grads, tx.init(params), params)[0])

    one_tx = train.parameterize(of, EVEN, one).optimizer(4)
    shared = of.arrays(one_tx.update(grads, one_tx.init(params), params)[0])
    for peak_lr in (0.5, 2.0):
        updates = first_updates(peak_lr)
        for name, update in updates.items():
            is_matrix = of.specs[name].role in (Role.QUERY, Role.ATTENTION_OUT, Role.MLP_OUT)
            ratio = peak_lr / 0.5 if is_matrix and "bias" not in name else 0.5
            np.testing.assert_allclose(update, ratio * shared[name], rtol=1e-5, err_msg=name)


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.read, self.out = (
            nnx.Linear(3, 8, rngs=rngs),
            nnx.Linear(8, 2, use_bias=False, rngs=rngs),
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(self.read(x))


def test_an_optimizer_of_nnx_takes_it():
    read = ParamSpec(role=Role.PATCH_EMBEDDING, axes=("patch", "embed"), fan_in=("patch",))
    specs = {"read.kernel": read, "read.bias": read.bias}
    specs["out.kernel"] = ParamSpec(role=Role.READOUT, axes=("embed", "classes"), fan_in=("embed",))
    net = Net(nnx.Rngs(0))
    graph, state = nnx.split(net)
    of = zoo.define_function(lambda params, x: nnx.merge(graph, params)(x), state, specs)
    mup = train.parameterize(
        of,
        presets.get("mup", base={"embed": 4}, form="plain"),
        dataclasses.replace(ADAMW, eps=1e-8),
    )
    nnx.update(net, jax.jit(mup.init)(0))
    tx = nnx.Optimizer(net, mup.optimizer(10), wrt=nnx.Param)
    before = nnx.state(net, nnx.Param)
    before = jax.tree.map(np.asarray, before)
    grads = nnx.grad(lambda model: jnp.sum(model(jnp.ones((1, 3)))))(net)
    tx.update(net, grads)
    moved = np.abs(np.asarray(net.out.kernel[...]) - before["out"]["kernel"][...])
    # Adam's first step is the rate, of a readout twice as wide as the base half of the peak; decay moves it a little.
    assert float(np.median(moved)) == pytest.approx(0.25, rel=0.3)
    assert mup.scales["out"]["kernel"].get_value().lr == pytest.approx(0.5)
    with pytest.raises(PresetError, match="is in the model alone"):
        mup.forward({"read": {"kernel": jnp.ones((3, 8))}})
    with pytest.raises(ValueError, match="reads the parameters"):
        mup.optimizer(1).update(before, mup.optimizer(1).init(before))
