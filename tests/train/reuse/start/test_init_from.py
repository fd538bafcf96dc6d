"""`--init-from`: the function is kept under any preset, and what differs is refused unless named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mupax import presets
from mupax.train.config.run import InitConfig
from mupax.train.reuse import transplant
from mupax.train.reuse.start.init_from import InitError, plan
from mupax.train.reuse.transplant import TransplantError, resized
from mupax.zoo.configs import ConfigError, ModelConfig
from tests.train.reuse.scaled_models import (
    LM,
    PRESETS,
    TIED,
    VIT,
    changed,
    inputs_of,
    model_under,
)

pytestmark = pytest.mark.core

SP = PRESETS["sp"]
MUP = PRESETS["mup"]


class Begun:
    """Random weights of a model under a preset, and what another model starts with from them.

    Args:
        words: Flags of `--init-from`.
    """

    def __init__(
        self,
        source: ModelConfig,
        target: ModelConfig,
        before: Any = SP,
        after: Any = SP,
        **words: Any,
    ) -> None:
        self.source = model_under(source, before)
        self.target = model_under(target, after)
        config = InitConfig(init_from="x", **words)
        self.plan = plan(self.source.scaled, self.target.scaled, config)
        self.old = self.source.random_weights()
        self.fresh = self.target.random_weights(seed=5)
        self.new: Any = transplant.parameters(self.plan.moves, self.old, self.fresh)

    def action(self, name: str) -> tuple[str, str]:
        return next((row.action, row.reason) for row in self.plan.rows if row.name == name)

    def actions(self) -> set[str]:
        return {row.action for row in self.plan.rows}

    def logits(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the logits of the source and of the target."""
        return self.source.logits(self.old), self.target.logits(self.new)


@pytest.mark.parametrize("name", ["mup", "mean-field", "depth-mup", "u-mup"])
@pytest.mark.parametrize(
    "model", [LM, VIT, changed(LM, qk_norm=True)], ids=["lm", "vit", "qk_norm"]
)
def test_the_function_is_kept_under_another_preset(model: ModelConfig, name: str) -> None:
    preset = PRESETS[name]
    for before, after in ((SP, preset), (preset, MUP)):
        expected, logits = Begun(model, model, before, after).logits()
        np.testing.assert_allclose(logits, expected, atol=3e-5 * np.abs(expected).max())
        assert np.abs(logits).max() > 0.05


def test_the_same_preset_keeps_every_bit() -> None:
    for preset in (MUP, PRESETS["u-mup"]):
        begun = Begun(VIT, VIT, preset, preset)
        assert begun.actions() == {"kept"}
        for name, w in begun.old.items():
            np.testing.assert_array_equal(begun.new[name], w)


def test_a_tied_model_can_be_untied() -> None:
    begun = Begun(TIED, changed(TIED, tied=False), MUP, SP)
    assert begun.action("readout") == ("converted", "the embedding it was tied to")
    expected, logits = begun.logits()
    np.testing.assert_allclose(logits, expected, atol=3e-5 * np.abs(expected).max())
    untied = changed(TIED, tied=False)
    with pytest.raises(
        InitError,
        match=r"readout \(12, 17\) is missing from this run\nto start all the same, add --init-drop readout",
    ):
        Begun(untied, TIED)
    assert Begun(untied, TIED, init_drop=("readout",)).action("readout")[0] == "dropped"


def test_another_head() -> None:
    wider = changed(VIT, num_classes=7)
    with pytest.raises(InitError) as refused:
        Begun(VIT, wider)
    assert "readout is (12, 5) in the source and (12, 7) in this run" in str(refused.value)
    assert str(refused.value).endswith("add --init-new readout readout_bias")
    begun = Begun(VIT, wider, init_new=("readout",))
    np.testing.assert_array_equal(begun.new["readout"], begun.fresh["readout"])
    np.testing.assert_array_equal(begun.new["block.mlp.up"], begun.old["block.mlp.up"])
    begun = Begun(VIT, wider, MUP, MUP, init_resize=("readout",))
    assert begun.action("readout") == ("resized", "first 5 kept, 2 new")
    expected, logits = begun.logits()
    np.testing.assert_allclose(logits[:, :5], expected, atol=1e-5)
    # The same shape may be started anew too.
    assert Begun(VIT, VIT, init_new=("readout", "block.mlp.*")).action("block.mlp.down")[0] == "new"


def test_another_image_size_interpolates_positions() -> None:
    larger = changed(VIT, image_size=12)
    with pytest.raises(
        InitError,
        match=r"position is \(5, 12\) in the source and \(17, 12\) in this run\n"
        "to start all the same, add --init-resize position",
    ):
        Begun(VIT, larger)
    begun = Begun(VIT, larger, init_resize=("position",))
    assert begun.action("position") == ("resized", "bicubic, 2^2 to 4^2 patches")
    # The class token keeps its position.
    np.testing.assert_array_equal(begun.new["position"][0], begun.old["position"][0])
    assert begun.new["position"].shape == (17, 12)
    assert np.isfinite(begun.logits()[1]).all()


def test_another_grid_with_as_many_positions_is_interpolated() -> None:
    # 3^2 patches, a class token and 6 registers are 4^2 positions.
    source = changed(VIT, image_size=9, registers=6)
    target = changed(VIT, image_size=12, pool="mean")
    named = {"init_change": ("registers", "pool"), "init_drop": ("token_embedding",)}
    message = r"position has 3\^2 patches in the source and 4\^2 in this run\n"
    with pytest.raises(InitError, match=message):
        Begun(source, target, **named)
    begun = Begun(source, target, **named, init_resize=("position",))
    assert begun.action("position") == (
        "resized",
        "bicubic, 3^2 to 4^2 patches, 7 rows of class token or registers dropped",
    )
    expected = resized(begun.old["position"], source, target)
    np.testing.assert_array_equal(begun.new["position"], expected)
    assert not np.array_equal(begun.new["position"], begun.old["position"])


def test_registers_alone_add_rows_and_leave_the_patches() -> None:
    target = changed(VIT, registers=2)
    begun = Begun(
        VIT,
        target,
        init_change=("registers",),
        init_new=("token_embedding",),
        init_resize=("position",),
    )
    assert begun.action("position") == ("resized", "2 rows of class token or registers new")
    np.testing.assert_array_equal(begun.new["position"][3:], begun.old["position"][1:])


def test_interpolated_positions() -> None:
    small = changed(VIT, image_size=15)
    large = changed(VIT, image_size=30)
    y, x = np.mgrid[:5, :5].astype(np.float32)
    plane = np.stack([0 * x + 3, x, 2 * y - x], -1).reshape(25, 3)
    cls = np.full((1, 3), 7, np.float32)
    out = resized(np.concatenate([cls, plane]), small, large)
    np.testing.assert_array_equal(out[0], cls[0])
    grid = out[1:].reshape(10, 10, 3)
    np.testing.assert_allclose(grid[..., 0], 3, rtol=1e-6)
    # Pixel centres. Bicubic interpolation reproduces a plane away from the border.
    inner = np.arange(10) / 2 - 0.25
    np.testing.assert_allclose(grid[3:-3, 3:-3, 1], np.broadcast_to(inner[3:-3], (4, 4)), atol=1e-5)
    np.testing.assert_allclose(
        grid[3:-3, 3:-3, 2], 2 * inner[3:-3, None] - inner[None, 3:-3], atol=1e-5
    )
    mean = changed(small, pool="mean")
    np.testing.assert_array_equal(resized(plane, mean, mean), plane)
    np.testing.assert_array_equal(resized(plane, mean, small)[1:], plane)
    np.testing.assert_array_equal(resized(np.concatenate([cls, plane]), small, mean), plane)
    more = resized(np.concatenate([cls, plane]), small, changed(small, registers=2))
    np.testing.assert_array_equal(more, np.concatenate([cls, np.zeros((2, 3)), plane]))


def test_new_entries_without_initial_values_are_refused() -> None:
    begun = Begun(VIT, changed(VIT, num_classes=7), init_resize=("readout",))
    needed = {name: begun.fresh[name] for name in begun.plan.fresh()}
    params = transplant.parameters(begun.plan.moves, begun.old, needed)
    assert params.keys() == begun.new.keys()
    del needed["readout"]
    with pytest.raises(TransplantError, match="readout has new entries and no initial values"):
        transplant.parameters(begun.plan.moves, begun.old, needed)


def test_a_longer_context_and_another_vocabulary() -> None:
    longer = changed(TIED, seq_len=8)
    with pytest.raises(InitError, match="add --init-resize position"):
        Begun(TIED, longer)
    begun = Begun(TIED, longer, MUP, SP, init_resize=("position",))
    logits = begun.target.logits(begun.new)
    assert logits.shape[1] == 8
    expected = begun.source.logits(begun.old, inputs_of(longer)[:, :5])
    np.testing.assert_allclose(logits[:, :5], expected, atol=1e-4 * np.abs(expected).max())
    # Rotary positions need nothing.
    assert Begun(LM, changed(LM, seq_len=9)).actions() == {"kept"}
    for vocab_size, reason in ((21, "first 17 kept, 4 new"), (11, "first 11 of 17 kept")):
        target = changed(LM, vocab_size=vocab_size)
        begun = Begun(LM, target, init_resize=("token", "readout"))
        assert begun.action("token") == ("resized", reason)


@pytest.mark.parametrize(
    ("source", "target", "words", "text"),
    [
        (
            LM,
            VIT,
            {},
            "family decoder, and this run trains one of the family vit; write a recipe and",
        ),
        (changed(LM, centered=True), LM, {}, "a centred model is its network minus"),
        (LM, changed(LM, activation="relu"), {}, "--init-change activation"),
        (LM, changed(LM, rope_theta=5e5), {}, "--model.rope-theta 10000.0"),
        (LM, LM, {"init_change": ("width",)}, "--init-change width: write one of activation"),
        (LM, changed(LM, depth=3), {}, "mupax grow"),
        (LM, changed(LM, depth=1), {}, "--init-new block.attention.key"),
        (
            VIT,
            changed(VIT, bias=False),
            {},
            "and 7 more\nto start all the same, add --init-drop",
        ),
    ],
)
def test_what_differs_is_refused(
    source: ModelConfig, target: ModelConfig, words: dict[str, Any], text: str
) -> None:
    with pytest.raises(InitError) as refused:
        Begun(source, target, **words)
    assert text in str(refused.value)
    assert len(str(refused.value).splitlines()) <= 9


def test_what_is_named_may_differ() -> None:
    relu = changed(LM, rope_theta=5e5, norm_eps=1e-6)
    assert Begun(LM, relu, init_change=("rope_theta", "norm_eps")).plan.moves
    bare = Begun(VIT, changed(VIT, bias=False), init_drop=("*bias",))
    assert bare.actions() == {"kept", "dropped"}
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
    gainless = changed(LM, qk_norm=True, norm_gain=False)
    assert Begun(gainless, gainless, MUP, MUP).plan.moves
    with pytest.raises(TransplantError, match="the source multiplies attention logits by"):
        Begun(gainless, gainless, SP, presets.get("mup"))
    bare = changed(TIED, norm_gain=False)
    with pytest.raises(TransplantError, match="the source multiplies its tied readout by"):
        Begun(bare, bare, SP, presets.get("mup"))
