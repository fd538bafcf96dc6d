"""Growing: the larger model computes what the smaller one did, and its new units learn."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest

from mupax import presets
from mupax.presets import Preset, Role
from mupax.presets.optimizers import OPTIMIZERS
from mupax.train.config.run import OptimizerConfig
from mupax.train.core.optimizer import build
from mupax.train.reuse import transplant
from mupax.train.reuse.grow import grow
from mupax.train.reuse.grow.grow import GrowError
from mupax.zoo.configs import ModelConfig
from mupax.zoo.transformer import RoutingConfig
from tests.train.reuse.scaled_models import BASE, LM, PRESETS, TIED, VIT, changed, model_under

pytestmark = pytest.mark.core

READS_BOTH = changed(VIT, pool="cls-mean", registers=2)
BARE = changed(VIT, norm_gain=False, bias=False, pool="mean")
LARGER: dict[str, Any] = {
    "width": 20,
    "depth": 3,
    "num_heads": 4,
    "head_dim": 6,
    "mlp_ratio": 2.0,
}
LARGE: dict[str, tuple[ModelConfig, ModelConfig]] = {
    "lm": (LM, changed(LM, **{**LARGER, "num_heads": 6, "num_kv_heads": 3, "head_dim": 8})),
    "tied": (TIED, changed(TIED, **LARGER)),
    "vit": (READS_BOTH, changed(READS_BOTH, **LARGER)),
    "bare": (BARE, changed(BARE, **LARGER)),
}
SP = PRESETS["sp"]
MUP = PRESETS["mup"]
DEPTH_MUP = PRESETS["depth-mup"]
EXACT = 3e-5
"""Largest relative difference of logits that is rounding."""


class Grown:
    """A random model and the model that it grew into.

    Args:
        silence: Whether new units write nothing at first, as in the product.
    """

    def __init__(
        self, small: ModelConfig, large: ModelConfig, preset: Preset, silence: bool = True
    ) -> None:
        self.small = model_under(small, preset)
        self.large = model_under(large, preset)
        self.plan = grow.plan(self.small.scaled, self.large.scaled)
        self.old = self.small.random_weights()
        fresh = self.large.random_weights(seed=2)
        for name, spec in self.large.scaled.definition.specs.items():
            if spec.role is Role.BIAS:
                fresh[name] = 0 * fresh[name]
        if silence:
            fresh = self.plan.silenced(fresh)
        self.new = transplant.parameters(self.plan.moves, self.old, fresh)

    def difference(self) -> float:
        """Return the largest difference of logits, relative to the largest logit."""
        expected = self.small.logits(self.old)
        largest = np.abs(expected).max()
        assert largest > 0.05
        return float(np.abs(self.large.logits(self.new) - expected).max() / largest)

    @functools.cached_property
    def old_gradients(self) -> dict[str, np.ndarray]:
        return self.small.gradients(self.old)

    @functools.cached_property
    def new_gradients(self) -> dict[str, np.ndarray]:
        return self.large.gradients(self.new)


CASES = [
    (models, preset)
    for models in LARGE
    for preset in PRESETS
    if (models, preset) != ("tied", "u-mup") and (models != "bare" or preset == "mup")
]


@pytest.mark.parametrize(("models", "preset"), CASES)
def test_the_larger_model_is_the_same_function(models: str, preset: str) -> None:
    assert Grown(*LARGE[models], PRESETS[preset]).difference() < EXACT


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
    grown = Grown(small, changed(small, **sizes), DEPTH_MUP)
    assert grown.plan.notes == [] or "width" in sizes
    assert grown.difference() < EXACT


def test_controls_new_units_that_write_and_heads_that_are_not_rescaled() -> None:
    assert Grown(*LARGE["lm"], MUP, silence=False).difference() > 1e-2
    grown = Grown(*LARGE["lm"], MUP)
    grown.new["block.attention.query"] = grown.new["block.attention.query"] / 2**0.5
    assert grown.difference() > 1e-3


WIDE = {"width": 24, "head_dim": 4, "mlp_ratio": 1.5}


@pytest.mark.parametrize(
    ("small", "change", "note", "least", "most"),
    [
        (changed(TIED, norm="layernorm"), WIDE, "token embeddings of mean 0", 1e-3, 1),
        (changed(TIED, norm_eps=1e-3), WIDE, "--set norm_eps=0.0005 is exact", EXACT, 1e-2),
        (changed(TIED, norm_eps=1e-3), {**WIDE, "norm_eps": 5e-4}, "", 0, EXACT),
        (LM, {"head_dim": 6}, "turn at other frequencies", 1e-3, np.inf),
    ],
)
def test_growth_that_is_not_exact_is_noted_and_changes_little(
    small: ModelConfig, change: dict[str, Any], note: str, least: float, most: float
) -> None:
    grown = Grown(small, changed(small, **change), MUP)
    if note:
        assert note in grown.plan.notes[0]
    assert least <= grown.difference() < most


# Experts

SOFTMAX = RoutingConfig(gate="softmax")
UPCYCLED: dict[str, Any] = {
    "experts": 3,
    "active_experts": 2,
    "expert_dim": 18,
    "routing": SOFTMAX,
}


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
    grown = Grown(small, changed(small, **{**UPCYCLED, **change}), PRESETS[preset])
    assert grown.difference() < EXACT
    rows = {row.name: row for row in grown.plan.rows}
    router = rows["block.experts.router"]
    assert (router.action, router.old_shape) == ("grown", None)
    reason = rows["block.experts.up"].reason
    assert "experts 1 to 3" in reason
    assert "every MLP 3 times" in reason
    assert "block.mlp.up" not in rows
    expected = grown.large.logits(grown.new)
    control = {**grown.new, "block.experts.down": grown.new["block.experts.down"].copy()}
    control["block.experts.down"][:, 0] *= 2  # an expert that is no copy
    difference = np.abs(grown.large.logits(control) - expected).max()
    assert difference > 1e-3 * np.abs(expected).max()


def test_gradients_of_an_mlps_copies_add_up_to_its_own() -> None:
    grown = Grown(LM, changed(LM, **UPCYCLED), SP)
    for name in ("up", "gate", "down"):
        move = grown.plan.moves[f"block.experts.{name}"]
        expected = grown.old_gradients[f"block.mlp.{name}"]
        summed = grown.new_gradients[f"block.experts.{name}"].sum(1)
        atol = 1e-4 * np.abs(expected).max()
        np.testing.assert_allclose(summed, expected, rtol=2e-3, atol=atol)
        moved = move.moment(expected, 1).sum(1)
        np.testing.assert_allclose(moved, expected, rtol=1e-5, atol=1e-9)


ROUTED = changed(LM, **UPCYCLED, shared_experts=1)
CHOOSY = RoutingConfig(capacity_factor=0.75, balance="bias")
SEEING = changed(
    VIT, depth=1, norm="rmsnorm", experts=3, active_experts=2, expert_dim=9, routing=CHOOSY
)
BASE_OF_EXPERTS = {**BASE, "experts": 3, "active": 2, "expert_dim": 4}
DOUBLED = {"experts": 6, "active_experts": 4}


@pytest.mark.parametrize(
    ("small", "change", "preset"),
    [
        (ROUTED, {"depth": 3, "expert_dim": 20}, SP),
        (SEEING, {"width": 20, "head_dim": 6}, presets.get("mup", base=BASE_OF_EXPERTS)),
    ],
    ids=["softmax", "sigmoid"],
)
def test_copies_of_experts_are_the_same_function(
    small: ModelConfig, change: dict[str, Any], preset: Preset
) -> None:
    """With any gate, beside shared experts, and with a capacity.

    All copies of an expert lack room for the same tokens.
    """
    assert Grown(small, changed(small, **DOUBLED, **change), preset).difference() < EXACT


def test_copies_of_experts_part_at_the_first_step() -> None:
    grown = Grown(SEEING, changed(SEEING, **DOUBLED), SP)
    down = grown.new["block.experts.down"]
    assert np.abs(down[:, 0::2] - down[:, 1::2]).min() > 0
    alike = {**grown.new, "block.experts.down": down.copy()}  # the control
    mean = (down[:, 0::2] + down[:, 1::2]) / 2
    alike["block.experts.down"][:, 0::2] = mean
    alike["block.experts.down"][:, 1::2] = mean
    gradients = {"parted": grown.new_gradients, "alike": grown.large.gradients(alike)}
    for short_name, axis in {"router": 2, "up": 1, "down": 1}.items():
        name = f"block.experts.{short_name}"
        expected = grown.old_gradients[name]
        for case, new in gradients.items():
            first = np.take(new[name], range(0, 6, 2), axis)
            second = np.take(new[name], range(1, 6, 2), axis)
            atol = 1e-3 * np.abs(expected).max()
            np.testing.assert_allclose(first + second, expected, rtol=5e-3, atol=atol)
            differ = np.abs(first - second).max() > 0.05 * np.abs(first).max()
            # A last matrix reads what is alike until the others have moved.
            assert differ == (case == "parted" and short_name != "down")
        moved = np.take(grown.plan.moves[name].moment(expected, 1), range(0, 6, 2), axis)
        np.testing.assert_allclose(moved * 2, expected, rtol=1e-5)


# Gradients and moments


def test_moments_go_where_the_gradients_are() -> None:
    grown = Grown(*LARGE["tied"], DEPTH_MUP)
    for name, move in grown.plan.moves.items():
        for power in (1, 2):
            moved = move.moment(grown.old_gradients[name] ** power, power)
            expected = np.where(move.transplanted(), grown.new_gradients[name] ** power, 0)
            atol = 2e-4 * np.abs(expected).max()
            np.testing.assert_allclose(moved, expected, rtol=2e-3, atol=atol, err_msg=name)


def test_new_units_learn_and_no_two_are_alike() -> None:
    grown = Grown(*LARGE["lm"], MUP)
    first = grown.new_gradients
    is_new = ~np.asarray(grown.plan.moves["block.mlp.down"].transplanted())[:, :, 0]
    rows = first["block.mlp.down"][is_new]
    assert (np.abs(rows).max(1) > 0).all()
    assert len(np.unique(rows.round(9), axis=0)) == len(rows)
    new_up = first["block.mlp.up"].swapaxes(1, 2)[is_new]
    assert np.abs(new_up).max() == 0  # nothing reads them yet
    moved = {name: w - 0.1 * np.sign(first[name]) for name, w in grown.new.items()}
    later = grown.large.gradients(moved)
    new_up = later["block.mlp.up"].swapaxes(1, 2)[is_new]
    assert (np.abs(new_up).max(1) > 0).all()
    assert len(np.unique(new_up.round(9), axis=0)) == len(new_up)
    assert np.abs(later["block.attention.query"][:, :, -1]).max() > 0


@pytest.fixture(scope="module")
def grown_lm() -> Grown:
    return Grown(*LARGE["lm"], SP)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizers_state_goes_along(name: Any, grown_lm: Grown) -> None:
    moves = grown_lm.plan.moves
    large_specs = grown_lm.large.scaled.definition.specs
    small_optimizer = build(OptimizerConfig(name=name), grown_lm.small.scaled.definition.specs)
    large_optimizer = build(OptimizerConfig(name=name), large_specs)
    small_state = jax.eval_shape(small_optimizer.init, grown_lm.old)
    old = jax.tree.map(lambda leaf: np.full(leaf.shape, 3, leaf.dtype), small_state)
    large_state = jax.eval_shape(large_optimizer.init, grown_lm.new)
    new = transplant.optimizer_state(moves, old, large_state, name)
    assert jax.tree.map(np.shape, new) == jax.tree.map(np.shape, large_state)
    counts = [leaf for leaf in jax.tree.leaves(new) if np.ndim(leaf) == 0]
    assert all(count == 3 for count in counts)
    moments = [
        leaf
        for path, leaf in jax.tree.leaves_with_path(new)
        if "block.mlp.down" in jax.tree_util.keystr(path)
    ]
    assert set(np.unique(moments[0])) == {0, 3}
    other_name = "lion" if name != "lion" else "adamw"
    other = build(OptimizerConfig(name=other_name), large_specs)
    other_state = jax.eval_shape(other.init, grown_lm.new)
    with pytest.raises(
        transplant.TransplantError, match="moments of one optimizer mean nothing to another"
    ):
        transplant.optimizer_state(moves, old, other_state, name)


@pytest.mark.parametrize(("name", "b2"), [("adam", 0.95), ("adam", 0.999), ("muon", 0.999)])
def test_how_far_adams_first_steps_on_new_entries_go(name: str, b2: float) -> None:
    """Moments of 0 under a count that is not 0 give (1-b1^t) g over the root of (1-b2^t) g^2."""
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
            changed(LM, num_heads=6),
            {"num_kv_heads": 3},
            "a key head serves 3 query heads and would serve 2",
        ),
        (changed(LM, qk_norm=True), {"head_dim": 8}, "keep head_dim 4 and add heads"),
        (changed(LM, centered=True), {"depth": 3}, "a centred model"),
        (
            changed(TIED, norm_gain=False),
            {"width": 24},
            "needs a norm gain before a tied readout",
        ),
        (
            changed(LM, window=3, full_every=2, window_theta=5.0),
            {"head_dim": 8},
            r"different rates \(window_theta\); keep head_dim 4",
        ),
        (
            changed(LM, post_norm=True),
            {"depth": 3},
            r"norms after the branches \(post_norm\) .* keep width",
        ),
        (
            changed(VIT, layer_scale=0.1),
            {"width": 24, "head_dim": 4},
            r"gains after them \(layer_scale\)",
        ),
        (
            changed(LM, head_dim=8),
            {"rope_theta": 1.5},
            "has no 4 frequencies near those of 10000.0; keep it",
        ),
    ],
)
def test_what_cannot_grow_is_refused(small: ModelConfig, change: dict[str, Any], text: str) -> None:
    large = model_under(changed(small, **change), SP)
    with pytest.raises(GrowError, match=text):
        grow.plan(model_under(small, SP).scaled, large.scaled)


def test_another_family_is_refused() -> None:
    with pytest.raises(GrowError, match="is a decoder and --to a vit"):
        grow.plan(model_under(LM, SP).scaled, model_under(VIT, SP).scaled)
