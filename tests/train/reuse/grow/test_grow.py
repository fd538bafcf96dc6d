"""Growing: the larger model computes what the smaller one did, its gradients are those of before, and its new units learn."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mupax import presets
from mupax.presets import VECTORS, Preset, Role
from mupax.presets.optimizers import OPTIMIZERS
from mupax.train.config.run import OptimizerConfig
from mupax.train.core.factors import Factors, resolve
from mupax.train.core.optimizer import build
from mupax.train.reuse import plain, source, transplant
from mupax.train.reuse.grow import grow
from mupax.train.reuse.grow.axes import GrowError
from mupax.train.reuse.transplant import ScaledModel
from mupax.zoo.configs import DecoderConfig, ModelConfig, ViTConfig
from mupax.zoo.definition import definition
from mupax.zoo.transformer import RoutingConfig

pytestmark = pytest.mark.core

SMALL_EPS = 1e-12
"""Of the norms: a wider stream and folded skips are then exact to rounding."""
LM = DecoderConfig(
    width=12, depth=2, num_heads=4, num_kv_heads=2, head_dim=4, mlp_ratio=1.5, vocab_size=17, seq_len=5, positions="rotary",
    norm="rmsnorm", activation="swiglu", bias=False, norm_eps=SMALL_EPS,
)  # fmt: skip
TIED = DecoderConfig(
    width=12,
    depth=2,
    num_heads=3,
    mlp_ratio=1.5,
    vocab_size=17,
    seq_len=5,
    tied=True,
    norm="rmsnorm",
    norm_eps=SMALL_EPS,
)
VIT = ViTConfig(
    width=12,
    depth=2,
    num_heads=3,
    mlp_ratio=1.5,
    image_size=6,
    patch_size=3,
    num_classes=5,
    pool="cls",
    norm_eps=SMALL_EPS,
)
READS_BOTH = dataclasses.replace(VIT, pool="cls-mean", registers=2)
BARE = dataclasses.replace(VIT, norm_gain=False, bias=False, pool="mean")
LARGE: dict[str, tuple[ModelConfig, ModelConfig]] = {
    "lm": (
        LM,
        dataclasses.replace(
            LM, width=20, depth=3, num_heads=6, num_kv_heads=3, head_dim=8, mlp_ratio=2.0
        ),
    ),
    "tied": (
        TIED,
        dataclasses.replace(TIED, width=20, depth=3, num_heads=4, head_dim=6, mlp_ratio=2.0),
    ),
    "vit": (
        READS_BOTH,
        dataclasses.replace(READS_BOTH, width=20, depth=3, num_heads=4, head_dim=6, mlp_ratio=2.0),
    ),
    "bare": (
        BARE,
        dataclasses.replace(BARE, width=20, depth=3, num_heads=4, head_dim=6, mlp_ratio=2.0),
    ),
}
BASE = {"embed": 8, "heads": 2, "kv_heads": 1, "head_dim": 4, "mlp": 12, "layers": 2}
PRESETS = {
    "sp": presets.get("sp"),
    "mup": presets.get("mup", base=BASE),
    "mean-field": presets.get("mup", base=BASE, form="mean-field"),
    "depth-mup": presets.get("depth-mup", base=BASE, gamma0=0.5, beta0=2.0),
    "completep": presets.get("completep"),
    "u-mup": presets.get("u-mup"),
}


def side(model: ModelConfig, preset: Preset) -> tuple[ScaledModel, Factors]:
    built = definition(model)
    factors = resolve(preset, built, preset.optimizers[0])
    return ScaledModel(
        model, built, plain.scales(built, factors), source.plain.logits_of(built, factors)
    ), factors


def draw(at: ScaledModel, factors: Factors, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights of every parameter, so large that the model's products are of order one."""
    random, weights = np.random.default_rng(seed), {}
    for name, leaf in at.definition.abstract.items():
        spec, normal = at.definition.specs[name], random.standard_normal(leaf.shape)
        size = (
            0.3
            if spec.role in VECTORS
            else np.prod([at.definition.sizes[axis] for axis in spec.fan_in]) ** -0.5
        )
        value = float(spec.role is Role.NORM_GAIN) + size * normal
        a = factors.multiplier[name].reshape(-1, *[1] * (value.ndim - 1))
        weights[name] = (value / a).astype(np.float32).reshape(leaf.shape)
    return weights


def inputs_of(model: ModelConfig) -> jax.Array:
    random = np.random.default_rng(1)
    if isinstance(model, DecoderConfig):
        return jnp.asarray(random.integers(model.vocab_size, size=(2, model.seq_len)), jnp.int32)
    return jnp.asarray(
        random.standard_normal((2, model.image_size, model.image_size, model.channels)), jnp.float32
    )


@functools.cache
def program(model: ModelConfig) -> Any:
    """A model as one program for all presets: eagerly each of its operations were one, for each of its shapes."""
    return jax.jit(definition(model).apply)


def logits(at: ScaledModel, factors: Factors, params: Any) -> Any:
    return program(at.model)(params, factors.multiplier, factors.forward, inputs_of(at.model))


class Grown:
    """A random model and what it grew into."""

    def __init__(
        self, small: ModelConfig, large: ModelConfig, preset: Preset, silence: bool = True
    ) -> None:
        self.there, self.before = side(small, preset)
        self.here, self.after = side(large, preset)
        self.plan = grow.plan(self.there, self.here)
        self.old = draw(self.there, self.before)
        fresh = draw(self.here, self.after, seed=2)
        biases = {
            name for name, spec in self.here.definition.specs.items() if spec.role is Role.BIAS
        }
        fresh = {name: w * (name not in biases) for name, w in fresh.items()}
        fresh = self.plan.silenced(fresh) if silence else fresh
        self.new = transplant.parameters(self.plan.moves, self.old, fresh)

    def difference(self) -> float:
        want = np.asarray(logits(self.there, self.before, self.old))
        got = np.asarray(logits(self.here, self.after, self.new))
        assert np.abs(want).max() > 0.05
        return float(np.abs(got - want).max() / np.abs(want).max())


CASES = [
    (models, name)
    for models in LARGE
    for name in PRESETS
    if (models, name) != ("tied", "u-mup") and (models != "bare" or name == "mup")
]


@pytest.mark.parametrize(("models", "preset"), CASES)
def test_the_larger_model_is_the_same_function(models: str, preset: str) -> None:
    assert Grown(*LARGE[models], PRESETS[preset]).difference() < 3e-5


AXES = {
    "heads": (TIED, {"num_heads": 5, "head_dim": 4}),
    "head_dim": (TIED, {"head_dim": 7, "num_heads": 3}),
    "mlp": (TIED, {"mlp_ratio": 2.5}),
    "layers": (TIED, {"depth": 5}),
    "embed": (TIED, {"width": 14, "head_dim": 4, "mlp_ratio": 18 / 14}),
    "query heads of each key head": (LM, {"num_heads": 8}),
    "key heads, each of fewer query heads": (LM, {"num_kv_heads": 4}),
    "both": (LM, {"num_heads": 9, "num_kv_heads": 9}),
    "rotary heads": (LM, {"head_dim": 12}),
    "rotary heads, frequencies by theta": (LM, {"head_dim": 6, "rope_theta": LM.rope_theta**1.5}),
}


@pytest.mark.parametrize("case", AXES.values(), ids=AXES)
def test_each_axis_alone(case: tuple[ModelConfig, dict[str, Any]]) -> None:
    small, sizes = case
    grown = Grown(small, dataclasses.replace(small, **sizes), PRESETS["depth-mup"])
    assert grown.plan.notes == [] or "width" in sizes
    assert grown.difference() < 3e-5


def test_controls_what_is_not_silent_or_not_rescaled_shows() -> None:
    small, large = LARGE["lm"]
    assert Grown(small, large, PRESETS["mup"], silence=False).difference() > 1e-2
    grown = Grown(small, large, PRESETS["mup"])
    grown.new["block.attention.query"] = grown.new["block.attention.query"] / 2**0.5
    assert grown.difference() > 1e-3


def test_what_is_not_exact_is_noted_and_changes_little() -> None:
    wide = {"width": 24, "head_dim": 4, "mlp_ratio": 1.5}
    layer_norm = dataclasses.replace(TIED, norm="layernorm")
    grown = Grown(layer_norm, dataclasses.replace(layer_norm, **wide), PRESETS["mup"])
    assert "token embeddings of mean 0" in grown.plan.notes[0]
    assert 1e-3 < grown.difference() < 1
    eps = dataclasses.replace(TIED, norm_eps=1e-3)
    grown = Grown(eps, dataclasses.replace(eps, **wide), PRESETS["mup"])
    assert "--set norm_eps=0.0005 is exact" in grown.plan.notes[0]
    assert 3e-5 < grown.difference() < 1e-2
    assert (
        Grown(eps, dataclasses.replace(eps, **wide, norm_eps=5e-4), PRESETS["mup"]).difference()
        < 3e-5
    )
    rotary = Grown(LM, dataclasses.replace(LM, head_dim=6), PRESETS["mup"])
    assert "turn at other frequencies" in rotary.plan.notes[0]
    assert rotary.difference() > 1e-3


SOFTMAX = RoutingConfig(gate="softmax")
UPCYCLED = {"experts": 3, "active_experts": 2, "expert_dim": 18, "routing": SOFTMAX}


@pytest.mark.parametrize(
    ("small", "change", "preset"),
    [
        (LM, {"expert_dim": 25, "depth": 3}, "depth-mup"),
        (VIT, {"width": 20, "num_heads": 4, "head_dim": 6, "expert_dim": 30}, "sp"),
    ],
)
def test_experts_that_are_copies_of_the_mlp_are_the_same_function(
    small: ModelConfig, change: dict[str, Any], preset: str
) -> None:
    grown = Grown(small, dataclasses.replace(small, **{**UPCYCLED, **change}), PRESETS[preset])
    assert grown.difference() < 3e-5
    rows = {row.name: row for row in grown.plan.rows}
    assert (rows["block.experts.router"].action, rows["block.experts.router"].old_shape) == (
        "grown",
        None,
    )
    reason = rows["block.experts.up"].reason
    assert "experts 1 to 3" in reason
    assert "every MLP 3 times" in reason
    assert "block.mlp.up" not in rows
    control = {**grown.new, "block.experts.down": grown.new["block.experts.down"].copy()}
    control["block.experts.down"][:, 0] *= 2  # an expert that is no copy
    want, got = (
        np.asarray(logits(grown.here, grown.after, params)) for params in (grown.new, control)
    )
    assert np.abs(got - want).max() > 1e-3 * np.abs(want).max()


def test_gradients_of_an_mlps_copies_add_up_to_its_own() -> None:
    grown = Grown(LM, dataclasses.replace(LM, **UPCYCLED), PRESETS["sp"])
    old, new = (
        gradients(grown.there, grown.before, grown.old),
        gradients(grown.here, grown.after, grown.new),
    )
    for name in ("up", "gate", "down"):
        move, whole = grown.plan.moves[f"block.experts.{name}"], old[f"block.mlp.{name}"]
        np.testing.assert_allclose(
            new[f"block.experts.{name}"].sum(1), whole, rtol=2e-3, atol=1e-4 * np.abs(whole).max()
        )
        np.testing.assert_allclose(move.moment(whole, 1).sum(1), whole, rtol=1e-5, atol=1e-9)


ROUTED = dataclasses.replace(LM, **UPCYCLED, shared_experts=1)
CHOOSY = RoutingConfig(capacity_factor=0.75, balance="bias")
SEEING = dataclasses.replace(
    VIT, depth=1, norm="rmsnorm", experts=3, active_experts=2, expert_dim=9, routing=CHOOSY
)
OF_EXPERTS = {**BASE, "experts": 3, "active": 2, "expert_dim": 4}


@pytest.mark.parametrize(
    ("small", "change", "preset"),
    [
        (ROUTED, {"depth": 3, "expert_dim": 20}, presets.get("sp")),
        (SEEING, {"width": 20, "head_dim": 6}, presets.get("mup", base=OF_EXPERTS)),
    ],
    ids=["softmax", "sigmoid"],
)
def test_copies_of_experts_are_the_same_function(
    small: Any, change: dict[str, Any], preset: Preset
) -> None:
    """Whatever the gate, beside shared experts, and with a capacity: all copies of an expert lack room for the same tokens."""
    large = dataclasses.replace(small, experts=6, active_experts=4, **change)
    assert Grown(small, large, preset).difference() < 3e-5


def test_copies_of_experts_part_at_the_first_step() -> None:
    large = dataclasses.replace(SEEING, experts=6, active_experts=4)
    grown, equal = Grown(SEEING, large, PRESETS["sp"]), Grown(SEEING, large, PRESETS["sp"])
    down = equal.new["block.experts.down"]
    assert np.abs(down[:, 0::2] - down[:, 1::2]).min() > 0
    down[:, 0::2] = down[:, 1::2] = (
        down[:, 0::2] + down[:, 1::2]
    ) / 2  # the control: nothing tells them apart
    old = gradients(grown.there, grown.before, grown.old)
    parted, alike = (gradients(grown.here, grown.after, one.new) for one in (grown, equal))
    for name, axis in {"router": 2, "up": 1, "down": 1}.items():
        name, whole = f"block.experts.{name}", old[f"block.experts.{name}"]
        for new, part in ((parted[name], True), (alike[name], False)):
            one, other = (np.take(new, range(first, 6, 2), axis) for first in (0, 1))
            np.testing.assert_allclose(
                one + other, whole, rtol=5e-3, atol=1e-3 * np.abs(whole).max()
            )
            # A last matrix reads what is alike until the others have moved.
            assert (np.abs(one - other).max() > 0.05 * np.abs(one).max()) == (
                part and "down" not in name
            )
        move = grown.plan.moves[name].moment(whole, 1)
        np.testing.assert_allclose(np.take(move, range(0, 6, 2), axis) * 2, whole, rtol=1e-5)


def gradients(at: ScaledModel, factors: Factors, params: Any) -> Any:
    goal = jnp.asarray(np.random.default_rng(3).standard_normal(logits(at, factors, params).shape))
    return jax.device_get(
        jax.jit(jax.grad(lambda p: jnp.mean(goal * logits(at, factors, p))))(params)
    )


def test_moments_go_where_the_gradients_are() -> None:
    grown = Grown(*LARGE["tied"], PRESETS["depth-mup"])
    old, new = (
        gradients(grown.there, grown.before, grown.old),
        gradients(grown.here, grown.after, grown.new),
    )
    for name, move in grown.plan.moves.items():
        for power in (1, 2):
            moved, want = (
                move.moment(old[name] ** power, power),
                np.where(move.transplanted(), new[name] ** power, 0),
            )
            np.testing.assert_allclose(
                moved, want, rtol=2e-3, atol=2e-4 * np.abs(want).max(), err_msg=name
            )


def test_new_units_learn_and_no_two_are_alike() -> None:
    grown = Grown(*LARGE["lm"], PRESETS["mup"])
    first = gradients(grown.here, grown.after, grown.new)
    fresh = ~np.asarray(grown.plan.moves["block.mlp.down"].transplanted())[:, :, 0]
    rows = first["block.mlp.down"][fresh]
    assert (np.abs(rows).max(1) > 0).all()
    assert len(np.unique(rows.round(9), axis=0)) == len(rows)
    new_up = first["block.mlp.up"].swapaxes(1, 2)[fresh]
    assert np.abs(new_up).max() == 0  # nothing reads them yet
    moved = {name: w - 0.1 * np.sign(first[name]) for name, w in grown.new.items()}
    later = gradients(grown.here, grown.after, moved)
    new_up = later["block.mlp.up"].swapaxes(1, 2)[fresh]
    assert (np.abs(new_up).max(1) > 0).all()
    assert len(np.unique(new_up.round(9), axis=0)) == len(new_up)
    assert np.abs(later["block.attention.query"][:, :, -1]).max() > 0


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizers_state_goes_along(name: Any) -> None:
    grown = Grown(*LARGE["lm"], PRESETS["sp"])
    config = OptimizerConfig(name=name)
    one, other = (build(config, at.definition.specs) for at in (grown.there, grown.here))
    old = jax.tree.map(lambda leaf: np.full(leaf.shape, 3, leaf.dtype), one.init(grown.old))
    new = transplant.optimizer_state(
        grown.plan.moves, old, jax.eval_shape(other.init, grown.new), name
    )
    shapes = jax.tree.map(np.shape, jax.eval_shape(other.init, grown.new))
    assert jax.tree.map(np.shape, new) == shapes
    counts = [leaf for leaf in jax.tree.leaves(new) if np.ndim(leaf) == 0]
    assert all(count == 3 for count in counts)
    mu = next(
        leaf
        for path, leaf in jax.tree.leaves_with_path(new)
        if "block.mlp.down" in jax.tree_util.keystr(path)
    )
    assert set(np.unique(mu)) == {0, 3}
    other_kind = build(
        OptimizerConfig(name="lion" if name != "lion" else "adamw"), grown.here.definition.specs
    )
    with pytest.raises(
        transplant.TransplantError, match="moments of one optimizer mean nothing to another"
    ):
        transplant.optimizer_state(
            grown.plan.moves, old, jax.eval_shape(other_kind.init, grown.new), name
        )


@pytest.mark.parametrize(("name", "b2"), [("adam", 0.95), ("adam", 0.999), ("muon", 0.999)])
def test_how_far_adams_first_steps_on_new_entries_go(name: str, b2: float) -> None:
    """Moments of 0 under a count that is not: (1-b1^t) g over the root of (1-b2^t) g^2."""
    config = OptimizerConfig(name=name, b2=b2)
    steps = np.arange(1, 1000)
    expected = ((1 - config.b1**steps) / np.sqrt(1 - b2**steps)).max()
    assert transplant.overshoot(config) == pytest.approx(expected, rel=0.001)
    assert len(transplant.overshoot_notes(config)) == (b2 == 0.999)


@pytest.mark.parametrize("name", ["sgd", "lion"])
def test_new_entries_without_a_second_moment_do_not_go_too_far(name: str) -> None:
    assert transplant.overshoot(OptimizerConfig(name=name)) == pytest.approx(1)


@pytest.mark.parametrize(
    ("small", "change", "text"),
    [
        (LM, {"depth": 1}, "depth would shrink from 2 to 1; growth only adds"),
        (LM, {"mlp_ratio": 1.0}, "mlp_dim would shrink"),
        (LM, {"activation": "relu"}, "add --set activation=swiglu"),
        (
            LM,
            {**UPCYCLED, "expert_dim": None},
            "expert_dim would shrink from 18 to 9.*add expert_dim=18 to --set",
        ),
        (
            LM,
            {**UPCYCLED, "routing": RoutingConfig()},
            "gate sigmoid .* do not add up to 1: .*routing.gate=softmax",
        ),
        (
            LM,
            {**UPCYCLED, "routing": RoutingConfig(gate="softmax-all")},
            "shares of a softmax over all experts",
        ),
        (LM, {**UPCYCLED, "shared_experts": 1}, "leave shared_experts out"),
        (
            ROUTED,
            {"experts": 4},
            "would become 4 and 2: .* write --set experts=6 active_experts=4, or keep",
        ),
        (ROUTED, {"experts": 6}, "crowd out the next ones; write --set experts=6 active_experts=4"),
        (LM, {"vocab_size": 19}, "model.vocab_size is 17 in the checkpoint and 19 in --to"),
        (LM, {"num_kv_heads": 2, "num_heads": 6, "qk_norm": True}, "model.qk_norm is False"),
        (
            dataclasses.replace(LM, num_heads=6),
            {"num_kv_heads": 3},
            "a key head serves 3 query heads and would serve 2",
        ),
        (dataclasses.replace(LM, qk_norm=True), {"head_dim": 8}, "keep head_dim 4 and add heads"),
        (dataclasses.replace(LM, centered=True), {"depth": 3}, "a centred model"),
        (
            dataclasses.replace(TIED, norm_gain=False),
            {"width": 24},
            "needs a norm gain before a tied readout",
        ),
        (
            dataclasses.replace(LM, window=3, full_every=2, window_theta=5.0),
            {"head_dim": 8},
            r"different rates \(window_theta\); keep head_dim 4",
        ),
        (
            dataclasses.replace(LM, post_norm=True),
            {"depth": 3},
            r"norms after the branches \(post_norm\) .* keep width",
        ),
        (
            dataclasses.replace(VIT, layer_scale=0.1),
            {"width": 24, "head_dim": 4},
            r"gains after them \(layer_scale\)",
        ),
        (
            dataclasses.replace(LM, head_dim=8),
            {"rope_theta": 1.5},
            "has no 4 frequencies near those of 10000.0; keep it",
        ),
    ],
)
def test_what_cannot_grow_is_refused(small: ModelConfig, change: dict[str, Any], text: str) -> None:
    large = dataclasses.replace(small, **change)
    with pytest.raises(GrowError, match=text):
        grow.plan(side(small, PRESETS["sp"])[0], side(large, PRESETS["sp"])[0])
    with pytest.raises(GrowError, match="is a decoder and --to a vit"):
        grow.plan(side(LM, PRESETS["sp"])[0], side(VIT, PRESETS["sp"])[0])
