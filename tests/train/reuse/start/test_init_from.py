"""`--init-from`: the function is kept under any preset, what differs is refused unless named."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from mupax import presets
from mupax.train.config.run import InitConfig
from mupax.train.reuse import transplant
from mupax.train.reuse.start.init_from import InitError, plan
from mupax.train.reuse.transplant import Plan, TransplantError, resized
from mupax.zoo.configs import ConfigError, ModelConfig
from tests.train.reuse.grow.test_grow import BASE, LM, TIED, VIT, draw, inputs_of, logits, side

pytestmark = pytest.mark.core

SP, MUP = presets.get("sp"), presets.get("mup", base=BASE)
FORMS = {
    "mup": MUP,
    "mean-field": presets.get("mup", base=BASE, form="mean-field"),
    "depth-mup": presets.get("depth-mup", base=BASE, gamma0=0.5, beta0=2.0),
    "u-mup": presets.get("u-mup"),
}


def init_config(**words: Any) -> InitConfig:
    return InitConfig(init_from="x", **words)


class Begun:
    """Random weights of one model under one preset, and what another model starts with from them."""

    def __init__(
        self, there: ModelConfig, here: ModelConfig, before: Any = SP, after: Any = SP, **words: Any
    ) -> None:
        (self.there, self.before), (self.here, self.after) = side(there, before), side(here, after)
        self.plan: Plan = plan(self.there, self.here, init_config(**words))
        self.old: Any
        self.old, self.fresh = draw(self.there, self.before), draw(self.here, self.after, seed=5)
        self.new = transplant.parameters(self.plan.moves, self.old, self.fresh)

    def action(self, name: str) -> tuple[str, str]:
        return next((row.action, row.reason) for row in self.plan.rows if row.name == name)

    def logits(self) -> tuple[np.ndarray, np.ndarray]:
        return np.asarray(logits(self.there, self.before, self.old)), np.asarray(
            logits(self.here, self.after, self.new)
        )


@pytest.mark.parametrize("after", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize(
    "model", [LM, VIT, dataclasses.replace(LM, qk_norm=True)], ids=["lm", "vit", "qk_norm"]
)
def test_the_function_is_kept_under_another_preset(model: ModelConfig, after: Any) -> None:
    for one, other in ((SP, after), (after, MUP)):
        begun = Begun(model, model, one, other)
        before, now = begun.logits()
        np.testing.assert_allclose(now, before, atol=3e-5 * np.abs(before).max())
    assert np.abs(now).max() > 0.05


def test_the_same_preset_keeps_every_bit() -> None:
    for preset in (MUP, FORMS["u-mup"]):
        begun = Begun(VIT, VIT, preset, preset)
        assert {row.action for row in begun.plan.rows} == {"kept"}
        for name, w in begun.old.items():
            np.testing.assert_array_equal(begun.new[name], w)


def test_a_tied_model_can_be_untied() -> None:
    begun = Begun(TIED, dataclasses.replace(TIED, tied=False), MUP, SP)
    assert begun.action("readout") == ("converted", "the embedding it was tied to")
    before, now = begun.logits()
    np.testing.assert_allclose(now, before, atol=3e-5 * np.abs(before).max())
    untied = dataclasses.replace(TIED, tied=False)
    with pytest.raises(
        InitError,
        match=r"readout \(12, 17\) is not here\nto start all the same, add --init-drop readout",
    ):
        Begun(untied, TIED)
    assert Begun(untied, TIED, init_drop=("readout",)).action("readout")[0] == "dropped"


def test_another_head() -> None:
    wider = dataclasses.replace(VIT, num_classes=7)
    with pytest.raises(InitError) as refused:
        Begun(VIT, wider)
    assert "readout is (12, 5) there and (12, 7) here" in str(refused.value)
    assert str(refused.value).endswith("add --init-new readout readout_bias")
    begun = Begun(VIT, wider, init_new=("readout",))
    np.testing.assert_array_equal(begun.new["readout"], begun.fresh["readout"])
    np.testing.assert_array_equal(begun.new["block.mlp.up"], begun.old["block.mlp.up"])
    begun = Begun(VIT, wider, MUP, MUP, init_resize=("readout",))
    assert begun.action("readout") == ("resized", "first 5 kept, 2 new")
    before, now = begun.logits()
    np.testing.assert_allclose(now[:, :5], before, atol=1e-5)
    # The same shape may be started anew too.
    assert Begun(VIT, VIT, init_new=("readout", "block.mlp.*")).action("block.mlp.down")[0] == "new"


def test_another_image_size_interpolates_positions() -> None:
    larger = dataclasses.replace(VIT, image_size=12)
    with pytest.raises(
        InitError,
        match=r"position is \(5, 12\) there and \(17, 12\) here\nto start all the same, add --init-resize position",
    ):
        Begun(VIT, larger)
    begun = Begun(VIT, larger, init_resize=("position",))
    assert begun.action("position") == ("resized", "bicubic, 2^2 to 4^2 patches")
    np.testing.assert_array_equal(
        begun.new["position"][0], begun.old["position"][0]
    )  # the class token's
    assert begun.new["position"].shape == (17, 12)
    assert np.isfinite(begun.logits()[1]).all()


def test_interpolated_positions() -> None:
    small, large = dataclasses.replace(VIT, image_size=15), dataclasses.replace(VIT, image_size=30)
    y, x = np.mgrid[:5, :5].astype(np.float32)
    plane = np.stack([0 * x + 3, x, 2 * y - x], -1).reshape(25, 3)
    cls = np.full((1, 3), 7, np.float32)
    out = resized(np.concatenate([cls, plane]), small, large)
    np.testing.assert_array_equal(out[0], cls[0])
    grid = out[1:].reshape(10, 10, 3)
    np.testing.assert_allclose(grid[..., 0], 3, rtol=1e-6)
    inner = (
        np.arange(10) / 2 - 0.25
    )  # pixel centres; bicubic reproduces a plane away from the border
    np.testing.assert_allclose(grid[3:-3, 3:-3, 1], np.broadcast_to(inner[3:-3], (4, 4)), atol=1e-5)
    np.testing.assert_allclose(
        grid[3:-3, 3:-3, 2], 2 * inner[3:-3, None] - inner[None, 3:-3], atol=1e-5
    )
    mean = dataclasses.replace(small, pool="mean")
    np.testing.assert_array_equal(resized(plane, mean, mean), plane)
    np.testing.assert_array_equal(resized(plane, mean, small)[1:], plane)
    np.testing.assert_array_equal(resized(np.concatenate([cls, plane]), small, mean), plane)
    more = resized(np.concatenate([cls, plane]), small, dataclasses.replace(small, registers=2))
    np.testing.assert_array_equal(more, np.concatenate([cls, np.zeros((2, 3)), plane]))


def test_a_longer_context_and_another_vocabulary() -> None:
    longer = dataclasses.replace(TIED, seq_len=8)
    with pytest.raises(InitError, match="add --init-resize position"):
        Begun(TIED, longer)
    begun = Begun(TIED, longer, MUP, SP, init_resize=("position",))
    before, now = begun.logits()
    same = logits(begun.here, begun.after, begun.new)
    assert same.shape[1] == 8
    inputs = inputs_of(longer)[:, :5]
    first = begun.there.definition.apply(
        begun.old, begun.before.multiplier, begun.before.forward, inputs
    )
    np.testing.assert_allclose(now[:, :5], first, atol=1e-4 * np.abs(before).max())
    # Rotary positions need nothing.
    assert {row.action for row in Begun(LM, dataclasses.replace(LM, seq_len=9)).plan.rows} == {
        "kept"
    }
    more = Begun(LM, dataclasses.replace(LM, vocab_size=21), init_resize=("token", "readout"))
    assert more.action("token") == ("resized", "first 17 kept, 4 new")
    fewer = Begun(LM, dataclasses.replace(LM, vocab_size=11), init_resize=("token", "readout"))
    assert fewer.action("token") == ("resized", "first 11 of 17 kept")


@pytest.mark.parametrize(
    ("there", "here", "words", "text"),
    [
        (LM, VIT, {}, "it is a decoder, and this run trains a vit"),
        (dataclasses.replace(LM, centered=True), LM, {}, "a centred model is its network minus"),
        (LM, dataclasses.replace(LM, activation="relu"), {}, "--init-change activation"),
        (LM, dataclasses.replace(LM, rope_theta=5e5), {}, "--model.rope-theta 10000.0"),
        (LM, LM, {"init_change": ("width",)}, "--init-change width: write one of activation"),
        (LM, dataclasses.replace(LM, depth=3), {}, "mupax grow"),
        (LM, dataclasses.replace(LM, depth=1), {}, "--init-new block.attention.key"),
        (
            VIT,
            dataclasses.replace(VIT, bias=False),
            {},
            "and 7 more\nto start all the same, add --init-drop",
        ),
    ],
)
def test_what_differs_is_refused(
    there: ModelConfig, here: ModelConfig, words: dict[str, Any], text: str
) -> None:
    with pytest.raises(InitError) as refused:
        Begun(there, here, **words)
    assert text in str(refused.value)
    assert len(str(refused.value).splitlines()) <= 9


def test_what_is_named_may_differ() -> None:
    relu = dataclasses.replace(LM, rope_theta=5e5, norm_eps=1e-6)
    assert Begun(LM, relu, init_change=("rope_theta", "norm_eps")).plan.moves
    bare = Begun(VIT, dataclasses.replace(VIT, bias=False), init_drop=("*bias",))
    assert {row.action for row in bare.plan.rows} == {"kept", "dropped"}
    for words, text in (
        (
            {"init_new": ("redout",)},
            "--init-new redout: no parameter has this role or name; did you mean readout",
        ),
        ({"init_resize": ("nothing.*",)}, "--init-resize nothing.*: no parameter"),
        ({"init_drop": ("x",)}, "--init-drop x: no parameter"),
    ):
        with pytest.raises(ConfigError) as refused:
            Begun(LM, LM, **words)
        assert text in str(refused.value)


def test_what_no_parameter_can_carry() -> None:
    gainless = dataclasses.replace(LM, qk_norm=True, norm_gain=False)
    assert Begun(gainless, gainless, MUP, MUP).plan.moves
    with pytest.raises(TransplantError, match="attention logits are taken times"):
        Begun(gainless, gainless, SP, presets.get("mup"))
    bare = dataclasses.replace(TIED, norm_gain=False)
    with pytest.raises(TransplantError, match="the tied readout is taken times"):
        Begun(bare, bare, SP, presets.get("mup"))
