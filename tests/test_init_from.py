"""`--init-from`: the function is kept under any preset, what differs is refused unless named, and a run needs its source once."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import presets
from tests.test_grow import BASE, LM, TIED, VIT, draw, inputs_of, logits, side
from tests.test_pretrained import published
from train import carry, cli, command_line, init_from, positions, pretrained
from train.__main__ import main
from train.config import InitConfig
from train.init_plan import InitError, Plan, plan
from train.program import assemble
from train.recipes import RECIPES
from train.record import from_json
from zoo.configs import ConfigError, ModelConfig

pytestmark = pytest.mark.core

SP, MUP = presets.get("sp"), presets.get("mup", base=BASE)
FORMS = {
    "mup": MUP,
    "mean-field": presets.get("mup", base=BASE, form="mean-field"),
    "depth-mup": presets.get("depth-mup", base=BASE, gamma0=0.5, beta0=2.0),
    "u-mup": presets.get("u-mup"),
}


def asked(**words: Any) -> InitConfig:
    return InitConfig(init_from="x", **words)


class Begun:
    """Random weights of one model under one preset, and what another model starts with from them."""

    def __init__(self, there: ModelConfig, here: ModelConfig, before: Any = SP, after: Any = SP, **words: Any) -> None:
        (self.there, self.before), (self.here, self.after) = side(there, before), side(here, after)
        self.plan: Plan = plan(self.there, self.here, asked(**words))
        self.old, self.fresh = draw(self.there, self.before), draw(self.here, self.after, seed=5)
        self.new = carry.parameters(self.plan.moves, self.old, self.fresh, list(self.here.definition.specs))

    def action(self, name: str) -> tuple[str, str]:
        return next((row.action, row.reason) for row in self.plan.rows if row.name == name)

    def logits(self) -> tuple[np.ndarray, np.ndarray]:
        return np.asarray(logits(self.there, self.before, self.old)), np.asarray(
            logits(self.here, self.after, self.new)
        )


@pytest.mark.parametrize("after", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("model", [LM, VIT, dataclasses.replace(LM, qk_norm=True)], ids=["lm", "vit", "qk_norm"])
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
        InitError, match=r"readout \(12, 17\) is not here\nto start all the same, add --init-drop readout"
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
    np.testing.assert_array_equal(begun.new["position"][0], begun.old["position"][0])  # the class token's
    assert begun.new["position"].shape == (17, 12)
    assert np.isfinite(begun.logits()[1]).all()


def test_interpolated_positions() -> None:
    small, large = dataclasses.replace(VIT, image_size=15), dataclasses.replace(VIT, image_size=30)
    y, x = np.mgrid[:5, :5].astype(np.float32)
    plane = np.stack([0 * x + 3, x, 2 * y - x], -1).reshape(25, 3)
    cls = np.full((1, 3), 7, np.float32)
    out = positions.resized(np.concatenate([cls, plane]), small, large)
    np.testing.assert_array_equal(out[0], cls[0])
    grid = out[1:].reshape(10, 10, 3)
    np.testing.assert_allclose(grid[..., 0], 3, rtol=1e-6)
    inner = np.arange(10) / 2 - 0.25  # pixel centres; bicubic reproduces a plane away from the border
    np.testing.assert_allclose(grid[3:-3, 3:-3, 1], np.broadcast_to(inner[3:-3], (4, 4)), atol=1e-5)
    np.testing.assert_allclose(grid[3:-3, 3:-3, 2], 2 * inner[3:-3, None] - inner[None, 3:-3], atol=1e-5)
    np.testing.assert_array_equal(positions.resized(plane, dataclasses.replace(small, pool="mean"), small), plane)


def test_a_longer_context_and_another_vocabulary() -> None:
    longer = dataclasses.replace(TIED, seq_len=8)
    with pytest.raises(InitError, match="add --init-resize position"):
        Begun(TIED, longer)
    begun = Begun(TIED, longer, MUP, SP, init_resize=("position",))
    before, now = begun.logits()
    same = logits(begun.here, begun.after, begun.new)
    assert same.shape[1] == 8
    inputs = inputs_of(longer)[:, :5]
    first = begun.there.definition.apply(begun.old, begun.before.multiplier, begun.before.forward, inputs)
    np.testing.assert_allclose(now[:, :5], first, atol=1e-4 * np.abs(before).max())
    # Rotary positions need nothing.
    assert {row.action for row in Begun(LM, dataclasses.replace(LM, seq_len=9)).plan.rows} == {"kept"}
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
        (LM, dataclasses.replace(LM, depth=3), {}, "python -m train grow"),
        (LM, dataclasses.replace(LM, depth=1), {}, "--init-new block.attention.key"),
        (VIT, dataclasses.replace(VIT, bias=False), {}, "and 6 more\nto start all the same, add --init-drop"),
    ],
)
def test_what_differs_is_refused(there: ModelConfig, here: ModelConfig, words: dict[str, Any], text: str) -> None:
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
        ({"init_new": ("redout",)}, "--init-new redout: no parameter has this role or name; did you mean readout"),
        ({"init_resize": ("nothing.*",)}, "--init-resize nothing.*: no parameter"),
        ({"init_drop": ("x",)}, "--init-drop x: no parameter"),
    ):
        with pytest.raises(ConfigError) as refused:
            Begun(LM, LM, **words)
        assert text in str(refused.value)


def test_what_no_parameter_can_carry() -> None:
    gainless = dataclasses.replace(LM, qk_norm=True, norm_gain=False)
    assert Begun(gainless, gainless, MUP, MUP).plan.moves
    with pytest.raises(InitError, match="attention logits are taken times"):
        Begun(gainless, gainless, SP, presets.get("mup"))
    bare = dataclasses.replace(TIED, norm_gain=False)
    with pytest.raises(InitError, match="the tied readout is taken times"):
        Begun(bare, bare, SP, presets.get("mup"))


# Runs

RUN = (
    "lm-tiny --data.name text:text.txt --model.width 16 --model.depth 1 --model.num-heads 2 --model.seq-len 8 "
    "--data.batch-size 8 --data.eval-batch-size 8 --data.eval-examples 8 --checkpoint.every-steps 2 --log.no-tensorboard "
    "--log.no-samples --optimizer.warmup-steps 0 --log.no-progress"
)


def train(words: str) -> int:
    return main([*RUN.split(), *words.split()])


def prepared(words: str) -> init_from.Start:
    """What a run would start with."""
    config = cli.parse("lm-tiny", RECIPES["lm-tiny"], [*RUN.split()[1:], *words.split()]).config
    start = init_from.prepare(assemble(config))
    assert start is not None
    return start


def metrics(folder: str) -> dict[int, float]:
    lines = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps that keeps an average."""
    folder = tmp_path_factory.mktemp("source")
    (folder / "text.txt").write_text("something to read, again and again. " * 400)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("MUPAX_DATA", str(folder / "cache"))
        assert train("--steps 4 --workdir old --ema.decay 0.9") == 0
    return folder


@pytest.fixture
def here(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, and the current folder."""
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MUPAX_DATA", str(tmp_path / "cache"))
    return tmp_path


def test_a_run_starts_from_another_and_needs_it_once(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--steps 2 --workdir plain --init-from old --init-optimizer") == 0
    out = capsys.readouterr().out
    assert "starting from" in out
    assert "12 kept" in out
    words = "--preset.form mean-field --model.compute.layers scan --mesh.fsdp 8 --init-optimizer"
    assert train(f"--steps 2 --workdir other --init-from old/checkpoints/4 {words}") == 0
    assert "x 0.5, the presets' multipliers" in capsys.readouterr().out
    one, other = metrics("plain"), metrics("other")
    # The same function; and with the moments converted the same second step, but for clipping, which sees the form.
    np.testing.assert_allclose(one[1], other[1], rtol=1e-5)
    recorded = json.loads(Path("plain/config.json").read_text())["config"]["init"]
    assert recorded["init_from"] == str(here / "old" / "checkpoints" / "4")
    shutil.rmtree("old")
    assert train("--steps 4 --workdir plain --resume") == 0
    assert "resuming lm-tiny at step 2 of 4" in capsys.readouterr().out
    assert json.loads(Path("plain/config.json").read_text())["config"]["init"] == recorded
    # Stopped before its first checkpoint it would need the source again, and says so.
    shutil.rmtree("plain/checkpoints")
    assert train("--steps 4 --workdir plain --resume") == 2
    assert "no run and no weights there" in capsys.readouterr().err


def test_what_does_not_fit_leaves_nothing_behind(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "hf").mkdir()
    for words, text in (
        ("--init-from old --model.vocab-size 300", "add --init-resize readout token"),
        ("--init-from none", "none: no run and no weights there"),
        ("--init-from old --init-drop nothing", "--init-drop nothing: no parameter has this role or name"),
        ("--init-from old --optimizer.name lion --init-optimizer", "moments of one optimizer mean nothing to another"),
        ("--init-new readout", "--init-new says how to start from a checkpoint; add --init-from PATH"),
    ):
        assert train(f"--steps 2 --workdir new {words}") == 2
        assert text in capsys.readouterr().err
        assert {path.name for path in Path("new").glob("*")} <= {".lock"}
    folder = published(here / "published")
    size = "--model.width 12 --model.depth 2 --model.mlp-ratio 1.5 --model.vocab-size 256 --model.seq-len 7"
    capsys.readouterr()
    assert (
        train(f"--steps 2 --workdir new --init-from {folder} --init-optimizer {size} --init-resize token readout") == 2
    )
    assert "holds no optimizer state, only weights" in capsys.readouterr().err
    begun = prepared(f"--init-from {folder} {size} --init-resize token readout")
    assert ("resized", "first 17 kept, 239 new") in {(row.action, row.reason) for row in begun.rows}
    np.testing.assert_array_equal(begun.params["token"][:17], pretrained.read(folder).params["token"])


def test_a_run_starts_from_the_average(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = here / "old" / "checkpoints" / "4"
    plain, average = (pretrained.read(path, part=part) for part in ("params", "ema"))
    assert np.abs(plain.stored["token"] - average.stored["token"]).max() > 0
    begun = prepared("--init-from old --init-ema")
    np.testing.assert_array_equal(begun.params["token"], average.stored["token"])
    np.testing.assert_array_equal(prepared("--init-from old").params["token"], plain.stored["token"])
    config = json.loads(Path("old/config.json").read_text())
    config["config"]["ema"]["decay"] = None
    Path("old/config.json").write_text(json.dumps(config))
    assert train("--steps 1 --workdir none --init-from old --init-ema") == 2
    assert "kept no moving average" in capsys.readouterr().err


def test_a_run_is_grown_and_goes_on(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "grow old --set num_heads=4 head_dim=8 mlp_ratio=3 depth=2 --steps 6 --out grown"
    assert main(words.split()) == 0
    out = capsys.readouterr().out
    assert "mlp 40 to 48, new: 0" in out
    largest, top = (float(out.split(word)[1].split()[0].strip(",")) for word in ("differ by at most", "largest being"))
    assert largest < 2e-5 * top
    config = from_json(json.loads(Path("grown/config.json").read_text())["config"])
    said = next(line for line in out.splitlines() if "--resume" in line).split()
    assert said[:4] == ["python", "-m", "train", "lm-tiny"]
    assert cli.parse("lm-tiny", RECIPES["lm-tiny"], said[4:]).config == dataclasses.replace(config, resume=True)
    state = pretrained.whole_state(here / "grown" / "checkpoints" / "4", config)
    assert int(state.step) == 4
    assert state.ema is not None
    np.testing.assert_array_equal(state.ema["block.mlp.down"][1], 0)
    assert main(said[3:]) == 0
    assert "resuming lm-tiny at step 4 of 6" in capsys.readouterr().out
    assert set(metrics("grown")) == {5, 6}
    for words, text in (
        ("grow old --out x", "say what to grow: --to MODEL"),
        ("grow old --to lm-tiny --out grown", "is not an empty folder"),
        ("grow old --set depth=1 mlp_ratio=1 --out x", "mlp_dim would shrink"),
        ("grow old --set height=3 --out x", "--set height=3: write FIELD=VALUE"),
        ("grow old --set depth=three --out x", "model.depth is 'three'"),
        ("grow old --to lm-tniy --out x", "no model is named 'lm-tniy'; did you mean lm-tiny"),
    ):
        assert main(words.split()) == 2
        assert text in capsys.readouterr().err
        assert not Path("x").exists()
    assert command_line.words(dataclasses.replace(config, recipe="mine")) is None
