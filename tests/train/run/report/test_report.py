"""Pictures and summary at the end of a run: what is drawn where, and what is said."""

import dataclasses
import functools
import io
import json
import shlex
from pathlib import Path
from types import SimpleNamespace

import matplotlib.figure
import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from scipy.optimize import isotonic_regression

from mupax import command_line
from mupax.train.config import cli
from mupax.train.config.recipes import RECIPES
from mupax.train.data.text.tokenizer import Bytes
from mupax.train.reuse.generate.command import Generate
from mupax.train.reuse.predict.command import Predict
from mupax.train.run.report import finish, metrics, plotting

pytestmark = pytest.mark.core
DRAWS_LOSS = True  # read by tests/train/conftest.py


@dataclasses.dataclass
class Reference:
    """Stands for mupax.train.data.Reference, which these functions only read."""

    name: str
    value: float
    unit: str


TRIGRAM = Reference("trigram counts", 1.84, "nats/byte")
FOURGRAM = Reference("4-gram counts", 1.46, "nats/byte")
LOGISTIC = Reference("logistic regression", 0.972, "accuracy")


@pytest.fixture
def figures(monkeypatch):
    """Every figure saved, to look into."""
    saved = []
    save = matplotlib.figure.Figure.savefig

    def spy(figure, *args, **kwargs):
        save(figure, *args, **kwargs)
        saved.append(figure)

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", spy)
    return saved


def write(path, rows):
    path.write_text("".join(metrics.to_json(row) + "\n" for row in rows), encoding="utf-8")
    return path


def lm_rows(steps):
    """Yield a row for every step and an evaluation after every 20th."""
    for step in range(1, steps + 1):
        fall = 4 * step**-0.5
        yield {"step": step, "loss": 1.2 + fall, "tokens": 700, "seconds": 0.1}
        if step % 20 == 0:
            yield {"step": step, "eval_loss": 1.3 + fall, "eval_accuracy": 0.5}


def vit_rows(steps):
    """Yield a row for every step and an evaluation after every 20th."""
    for step in range(1, steps + 1):
        loss = 2.3 * np.exp(-step / 50)
        yield {"step": step, "loss": loss, "accuracy": 0.5, "images": 64, "seconds": 0.1}
        if step % 20 == 0:
            yield {"step": step, "eval_loss": loss, "eval_accuracy": 1 - 0.9 * np.exp(-step / 30)}


FINAL = 1.3 + 4 * 200**-0.5
"""Last evaluation loss of `lm_path`."""


@pytest.fixture
def lm_path(tmp_path):
    """The metrics of a language model's run of 200 steps."""
    return write(tmp_path / "metrics.jsonl", lm_rows(200))


@pytest.fixture
def draw(tmp_path, figures):
    """Draw the losses of rows, and return the axes."""

    def draw(rows, *references, **options):
        path = write(tmp_path / "metrics.jsonl", rows)
        finish.loss_plot(path, tmp_path / "loss.png", references, **options)
        return figures[-1].axes

    return draw


def lines_of(panel):
    """Return the lines in a panel, without its frame and with single spaces."""
    return [" ".join(line.strip("│ ").split()) for line in panel.splitlines()]


def texts(axes):
    return [text.get_text() for text in axes.texts]


def test_loss_plot_of_a_language_model(tmp_path, draw):
    (axes,) = draw(lm_rows(200), TRIGRAM, FOURGRAM, LOGISTIC, title="lm-tiny")
    assert axes.get_ylabel() == "loss (nats per byte)"
    assert axes.get_xlabel() == "optimizer step (700 tokens each)"
    assert axes.get_xscale() == "log"
    expected = ["4-gram counts 1.460", f"evaluation {FINAL:.3f}", "trigram counts 1.840"]
    assert sorted(texts(axes)) == expected
    raw, smooth, evaluations, *references = axes.lines
    np.testing.assert_allclose(raw.get_ydata(), [1.2 + 4 * step**-0.5 for step in range(1, 201)])
    assert len(smooth.get_ydata()) == 200
    np.testing.assert_array_equal(evaluations.get_xdata(), np.arange(20, 201, 20))
    assert {float(line.get_ydata()[0]) for line in references} == {1.84, 1.46}
    low, high = axes.get_ylim()
    assert low < 1.46
    assert high > 5.2
    with Image.open(tmp_path / "loss.png") as image:
        assert image.size == (1140, 660)


def test_loss_per_token_becomes_loss_per_byte(draw):
    (axes,) = draw(lm_rows(40), TRIGRAM, bytes_per_token=4.0)
    raw, _, evaluations, reference = axes.lines
    assert raw.get_ydata()[0] == pytest.approx(5.2 / 4)
    assert evaluations.get_ydata()[-1] == pytest.approx((1.3 + 4 * 40**-0.5) / 4)
    assert reference.get_ydata()[0] == 1.84  # Already per byte.


def test_loss_plot_has_every_evaluation_set(draw):
    factors = {"code": 4, "chat": 2, "long" * 20: 5}
    rows = list(lm_rows(200))
    for row in rows:
        if "eval_loss" in row:
            for name, factor in factors.items():
                row[f"eval/{name}/loss"] = factor * row["eval_loss"]
                row[f"eval/{name}/accuracy"] = 0.5
    sets = {"code": 4.0, "chat": None, "long" * 20: 1.0, "not-yet": 1.0}
    (axes,) = draw(rows, TRIGRAM, bytes_per_token=2.0, sets=sets)
    names = [
        f"code {FINAL:.3f}",  # over its own bytes per token
        f"chat {2 * FINAL:.3f} nats/target",
        f"{'long' * 6}lon… {5 * FINAL:.3f}",
        f"evaluation {FINAL / 2:.3f}",
        "trigram counts 1.840",
    ]
    assert sorted(texts(axes)) == sorted(names)
    colours = [text.get_color() for text in axes.texts if "trigram" not in text.get_text()]
    assert len(set(colours)) == len(colours)
    assert set(colours) <= {line.get_color() for line in axes.lines}
    assert axes.get_ylim()[1] > 5 * FINAL
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend == ["training (smoothed)", "evaluation"]
    # An image model has them in both panels.
    rows = list(vit_rows(60))
    for row in rows:
        if "eval_loss" in row:
            row |= {"eval/other/loss": 3.0, "eval/other/accuracy": 0.25}
    upper, lower = draw(rows, sets={"other": None})
    assert "other 3.000" in texts(upper)
    assert "other 25.00" in texts(lower)


def test_loss_plot_of_an_image_model_has_its_accuracy(draw):
    upper, lower = draw(vit_rows(200), LOGISTIC, TRIGRAM, title="vit-digits")
    assert upper.get_ylabel() == "loss (nats per image)"
    assert "trigram" not in "".join(texts(upper))
    assert lower.get_ylabel() == "accuracy (%)"
    assert sorted(texts(lower)) == ["evaluation 99.89", "logistic regression 97.20"]
    np.testing.assert_array_equal(lower.lines[0].get_ydata(), np.full(200, 50.0))
    assert lower.get_ylim()[0] < 50
    assert lower.get_xlabel() == "optimizer step (64 images each)"


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_short_and_unevaluated_runs_are_drawn(draw, steps):
    (axes,) = draw(lm_rows(steps), TRIGRAM)
    assert axes.get_xscale() == "linear"
    assert texts(axes) == ["trigram counts 1.840"]


@pytest.mark.parametrize("from_row", [100, 0])
def test_a_diverged_run_is_drawn(draw, from_row):
    rows = list(lm_rows(150))
    rows[90]["loss"] = 1e30
    for row in rows[from_row:]:
        row.update({key: float("nan") for key in ("loss", "eval_loss") if key in row})
    assert draw(rows, TRIGRAM)


def test_no_rows_is_an_error(draw):
    with pytest.raises(metrics.MetricsError, match="has no rows"):
        draw([])


def test_smoothing_has_no_lag_and_takes_the_noise_off():
    line = np.linspace(5.0, 1.0, 500)
    np.testing.assert_allclose(plotting.smoothed(line)[:480], line[:480], atol=1e-9)
    noise = np.random.default_rng(0).normal(size=500)
    assert plotting.smoothed(noise)[200:].std() < 0.4
    assert plotting.smoothed(noise)[-1] != noise[-1]
    holed = np.where(np.arange(500) == 250, np.nan, 1.0)
    np.testing.assert_array_equal(plotting.smoothed(holed), holed)


@pytest.mark.parametrize("gap", [0.0, 0.1, 0.3])
def test_names_are_spread_as_isotonic_regression_does(gap):
    for seed in range(20):
        heights = np.sort(np.random.default_rng(seed).uniform(size=seed % 7))
        ranks = gap * np.arange(len(heights))
        nearest = isotonic_regression(heights - ranks).x + ranks if len(heights) else heights
        np.testing.assert_allclose(plotting.spread(heights, gap), nearest, atol=1e-12)


def test_margin_labels_keep_their_distance_and_stay_near():
    figure = matplotlib.figure.Figure()
    axes = figure.add_subplot()
    axes.set_ylim(0, 10)
    values = [9.0, 5.0, 5.1, 5.2, 1.0]
    plotting.margin_labels(axes, [(value, str(value), "black") for value in values], gap=0.1)
    heights = {text.get_text(): text.xyann[1] for text in axes.texts}
    assert heights["9.0"] == pytest.approx(0.9)
    assert heights["1.0"] == pytest.approx(0.1)
    assert [heights[text] for text in ("5.0", "5.1", "5.2")] == pytest.approx([0.41, 0.51, 0.61])


def picture(tmp_path, figures, images, targets, predictions, names=None):
    path = tmp_path / "predictions.png"
    plotting.prediction_picture(images, np.array(targets), np.array(predictions), names, path)
    (axes,) = figures[-1].axes
    return axes


@pytest.mark.parametrize("channels", [1, 3])
def test_wrong_predictions_come_first_with_the_truth(tmp_path, figures, channels):
    images = np.random.default_rng(0).normal(size=(5, 7, 7, channels))
    names = ["tench, Tinca tinca", "cat", "ox"]
    axes = picture(tmp_path, figures, images, [0, 1, 2, 1, 0], [0, 1, 0, 1, 0], names)
    title = "4 of 5 right (80.0 %); framed: wrong, with the true class"
    assert texts(axes) == ["tench, is ox", "tench", "cat", "cat", "tench", title]
    assert len(axes.patches) == 1
    shown = axes.images[0].get_array().reshape(7, 7, channels)
    low = images.min((0, 1, 2))
    high = images.max((0, 1, 2))
    np.testing.assert_allclose(shown, (images[2] - low) / (high - low), atol=1e-6)


def test_the_grid_is_limited_and_shows_right_ones_too(tmp_path, figures):
    images = np.zeros((200, 3, 3, 1))
    axes = picture(tmp_path, figures, images, np.zeros(200, int), np.arange(200) % 2)
    assert len(axes.images) == 40
    assert len(axes.patches) == 20
    assert texts(axes)[-1].startswith("100 of 200 right (50.0 %)")


def test_all_right_says_nothing_of_frames(tmp_path, figures):
    axes = picture(tmp_path, figures, np.zeros((2, 3, 3, 1)), [3, 4], [3, 4])
    assert texts(axes) == ["3", "4", "2 of 2 right (100.0 %)"]


@pytest.mark.parametrize("shape", [(0, 3, 3, 1), (4, 3, 3, 2), (4, 3, 3)])
def test_images_of_another_shape_are_refused(tmp_path, shape):
    with pytest.raises(ValueError, match="C = 1 or 3"):
        plotting.prediction_picture(
            np.zeros(shape), np.zeros(4), np.zeros(4), None, tmp_path / "x.png"
        )


def summary(path, width=80, **options):
    console = Console(file=io.StringIO(), record=True, width=width)
    facts = {"model": "853,120 parameters", "preset": "mup relative to lm-proxy"}
    finish.summary(console, path, name="lm-tiny", seconds=222.0, facts=facts, **options)
    return console.export_text()


def test_summary_compares_with_the_references(lm_path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = [tmp_path / "runs" / "loss.png", "/elsewhere/a"]
    then = f"mupax generate x --prompt '[/dim] :fire: {12 * 'words '}'"
    text = summary(lm_path, references=[TRIGRAM, FOURGRAM], files=files, then=then)
    lines = lines_of(text)
    assert set(lines) >= {
        "evaluation loss 1.5828 nats/byte",
        "trigram counts 1.8400 ✓ better by 0.2572",
        "4-gram counts 1.4600 ✗ worse by 0.1228",
        "evaluation accuracy 50.00 %",
        "time 3:42, 7.00k tokens/s while training",
        "model 853,120 parameters",
        "files runs/loss.png",
    }
    # Below the panel, in one line however narrow the terminal is: it is there to be copied.
    assert lines[-1] == f"next {then}"
    assert "200 steps done" in text


def test_summary_leads_with_accuracy_for_images(tmp_path):
    text = summary(write(tmp_path / "metrics.jsonl", vit_rows(200)), references=[LOGISTIC, TRIGRAM])
    accuracy, regression, loss = map(
        text.index, ("evaluation accuracy", "logistic regression", "evaluation loss")
    )
    assert accuracy < regression < loss
    assert "better by 2.69 points" in text
    assert "images/s" in text
    assert "trigram" not in text


def test_summary_and_picture_have_both_units(lm_path, draw):
    text = summary(lm_path, bytes_per_token=2.0, references=[TRIGRAM])
    assert "evaluation loss 0.7914 nats/byte, 1.5828 nats/token" in lines_of(text)
    assert "better by 1.0486" in text
    (two_scales,) = draw(lm_rows(200), bytes_per_token=2.0)
    (one_scale,) = draw(lm_rows(200), bytes_per_token=1.0)
    (second,) = two_scales.child_axes
    assert two_scales.get_ylabel() == "loss (nats per byte)"
    assert second.get_ylabel() == "nats per token"
    np.testing.assert_allclose(second.get_yticks(), 2 * np.asarray(two_scales.get_yticks()))
    assert not one_scale.child_axes, "a token is a byte"


def test_summary_of_a_run_that_diverged_or_was_not_evaluated(tmp_path):
    rows = [*lm_rows(30), {"step": 30, "eval_loss": float("nan")}]
    assert "✗ diverged" in summary(write(tmp_path / "a.jsonl", rows), references=[TRIGRAM])
    bare = [
        {"step": 1, "loss": 5.5, "tokens": 10, "seconds": 0.0},
        {"step": 1, "eval_loss": None, "eval_accuracy": None},
    ]
    text = summary(write(tmp_path / "b.jsonl", bare), references=[TRIGRAM])
    assert "training loss" in text
    assert "trigram" not in text
    assert "nan" not in text
    assert "/s" not in text.split("model")[0].split("time")[1]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_summary_fits_the_terminal(lm_path, width):
    text = summary(lm_path, width, references=[TRIGRAM, FOURGRAM], files=["a/" * 40])
    assert max(map(len, text.splitlines())) <= width


def test_summary_without_unicode(lm_path):
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    console = Console(file=file, width=80)
    finish.summary(console, lm_path, name="a", seconds=1, facts={}, references=[TRIGRAM])
    file.flush()
    assert b"+ better by 0.2572" in file.buffer.getvalue()


def test_rows_written_by_the_writer_are_what_is_read(tmp_path):
    with metrics.MetricsWriter(tmp_path) as writer:
        for row in lm_rows(5):
            writer.write(row)
    first_line = (tmp_path / "metrics.jsonl").read_text().splitlines()[0]
    assert json.loads(first_line) == next(iter(lm_rows(1)))
    finish.loss_plot(writer.path, tmp_path / "loss.png")


@functools.cache
def config_of(recipe, *flags):
    return cli.parse(recipe, RECIPES[recipe], flags).config


def next_words(recipe, folder, text, *flags):
    """The words of the command that a run names at its end, as a shell reads them."""
    config = config_of(recipe, *flags)
    window = {"inputs": np.frombuffer(text.encode(), np.uint8)[None]}
    data = SimpleNamespace(tokenizer=Bytes(), eval_batch=lambda *_: window)
    line = finish._next_command(config, data, folder)
    assert "\n" not in line
    program, *words = shlex.split(line)
    assert Path(program).name == "mupax"
    return words


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        ('cut it\'s "quoted" $HOME `x` cut', 'it\'s "quoted" $HOME'),
        ("cut --location=eu --tokens 5 cut", "--location=eu --tokens 5"),
        ("cut --tokens cut", "--tokens"),
        ("cut - cut", "def"),
        ("cut !x *.py cut", "!x *.py"),
    ],
)
def test_the_next_command_can_be_copied_whatever_the_text(text, prompt):
    for folder in ("runs/a b", "-runs", "it's", "runs/ü"):
        command, *words = next_words("lm-tiny", folder, text, "--data.name", "text:x")
        args = command_line.parse(Generate, "", words)
        assert command == "generate"
        assert args.prompt == prompt
        assert args.workdir.name == folder.rpartition("/")[2]


def test_the_next_command_fits_what_was_trained(tmp_path):
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    chat = ["--data.name", "chat:x.jsonl", "--data.chat-template", str(tmp_path / "t.jinja")]
    assert next_words("lm-tiny", "run", "a", *chat) == ["generate", "run", "--chat"]
    command, *words = next_words("vit-digits", "run", "a", "--data.name", "images:my photos")
    assert command == "predict"
    assert [path.name for path in command_line.parse(Predict, "", words).images] == ["my photos"]
    assert next_words("vit-digits", "run", "a") == ["eval", "run"]
    command, *words = next_words("ed-tiny", "run", "a")
    assert (command, "<mask>" in words[-1] or "<0>" in words[-1]) == ("generate", True)
