"""Figures of trained models: numbers of short runs, and verdicts of made-up numbers."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from mupax.presets import Role
from scripts.figures import curves, training
from scripts.figures.runs import fig2b, fig5a, fig6, fig7

TINY = {
    "axes": ["head_dim"],
    "base": {"head_dim": 2, "heads": 3, "depth": 1},
    "factors": [1, 2],
    "seeds": 2,
    "model": {"rate": 0.5, "steps": 3, "batch_size": 5, "patch_size": 16},
}


def test_runs_are_measured_once_and_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = fig6.measure(TINY, tmp_path / "fig6")
    grown = data["head_dim"]
    assert grown["size"] == [2, 4]
    assert np.shape(grown["loss"]) == (2, 2, 3)
    assert np.shape(grown["kernel"]) == (2, 2, curves.EXAMPLES, curves.EXAMPLES)
    assert grown["loss"][0][0] != grown["loss"][0][1]
    assert grown["flops"][1] > grown["flops"][0]
    monkeypatch.setattr(training, "Trainer", None)
    assert fig6.measure(TINY, tmp_path / "fig6") == data  # from the files
    rows = fig6.rows(TINY, data)
    assert [row.what[:23] for row in rows] == ["mean difference of loss", "alignment of final kern"]
    fig6.draw(TINY, data).savefig(tmp_path / "fig6.png")


def test_a_run_is_the_trainers_own_and_looks_change_nothing() -> None:
    config = training.vit(
        head_dim=2, heads=3, depth=2, rate=0.5, steps=3, batch_size=5, patch_size=16
    )
    trainer = training.Trainer(config)
    names = trainer.names(Role.QUERY, Role.KEY)
    assert len(names) == 2
    losses, moved = trainer.train(
        config,
        at=[0, 3],
        look=lambda snapshot: [
            float(np.abs(snapshot.params[n] - snapshot.start[n]).max()) for n in names
        ],
    )
    assert moved[0] == [0, 0]
    assert min(moved[1]) > 0
    assert losses[0] == pytest.approx(np.log(10), abs=1e-5)  # a centred output starts at 0
    assert np.array_equal(trainer.train(config)[0], losses)
    assert not np.array_equal(trainer.train(dataclasses.replace(config, seed=1))[0][1:], losses[1:])


def test_the_authors_constants() -> None:
    program = training.assemble(
        training.vit(head_dim=2, heads=3, depth=1, rate=1, steps=1, patch_size=16, batch_size=8)
    )
    plain = program.inputs.factors
    changed = training.with_constants(program.inputs, program, 4.0).factors
    for name, spec in program.definition.specs.items():
        ends = spec.role in (Role.PATCH_EMBEDDING, Role.POSITION, Role.READOUT)
        assert changed.lr[name] == pytest.approx(plain.lr[name] * (4 if ends else 1))
        pair = spec.role in (Role.QUERY, Role.KEY)
        assert changed.multiplier[name] == pytest.approx(
            plain.multiplier[name] * (np.sqrt(0.5) if pair else 1)
        )


@pytest.mark.parametrize(("exponent", "nearer"), [(-1.05, "central limit"), (-1.9, "caption")])
def test_the_verdict_on_the_variance_over_heads(exponent: float, nearer: str) -> None:
    settings = {**fig2b.FIGURE.small, "gamma0": [{"gamma0": 0.1}], "at": [0, 9], "seeds": 3}
    x = np.asarray(settings["head_dim"], float)
    noise = 1 + 0.002 * np.random.default_rng(0).standard_normal((1, 2, 2, len(x), 3))
    powers = np.stack([np.stack([x**-1.0, x**exponent]), np.ones((2, len(x)))])[None, ..., None]
    data = {"variance": powers * noise}
    rows = fig2b.rows(settings, data)
    trained = {
        row.source: row for row in rows if "alpha_A = 1," in row.what and "after 9" in row.what
    }
    good = next(row for source, row in trained.items() if nearer in source)
    assert good.verdict == "reproduces"
    assert [row.verdict for row in trained.values() if row is not good] == ["does not reproduce"]
    assert nearer in good.note.split("nearer to ")[1].split(" exponent")[0]
    fig2b.draw(settings, {"variance": data["variance"]})


def test_movement_of_weights_has_a_slope_per_rule_and_time() -> None:
    settings = fig5a.FIGURE.small
    x = np.asarray(settings["depth"], float)[:, None]
    noise = 1 + 0.02 * np.random.default_rng(0).standard_normal((len(x), 4))
    data = {"moved": [[x ** (rule["alpha_l"] - 1) * noise] * 2 for rule in settings["rules"]]}
    assert {row.verdict for row in fig5a.rows(settings, data)} == {"reproduces"}
    assert "does not reproduce" in {
        row.verdict for row in fig5a.rows(settings, {"moved": data["moved"][::-1]})
    }
    fig5a.draw(settings, data)


def test_alignment_sees_scale_and_mean_as_nothing() -> None:
    rng = np.random.default_rng(0)
    features, noise = rng.standard_normal((2, 12, 40))
    kernel = features @ features.T
    assert curves.alignment(kernel, 3 * kernel + 7) == pytest.approx(1)
    assert curves.alignment(kernel, noise @ noise.T) < 0.5


def test_settings_are_complete() -> None:
    """Every setting of a run is an argument of it, at both sizes."""
    for figure, make in ((fig6, training.vit), (fig7, training.lm)):
        for settings in (figure.FIGURE.small, figure.FIGURE.full):
            for _, _, sizes in curves.grown(settings):
                assert make(**sizes, **settings["model"]).steps == settings["model"]["steps"]
