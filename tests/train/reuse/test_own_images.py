"""Models of images: predictions for files, fine-tuning on images of one's own, and evaluation."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from mupax.train import data
from mupax.train.checkpoints import layout, saved_run
from mupax.train.core.program import Program
from mupax.train.data import images
from mupax.train.reuse import runs
from mupax.train.reuse.predict.scores import scores, table
from mupax.zoo.definition import definition
from mupax.zoo.transformer import RoutingConfig
from tests.fixtures.devices import one_device
from tests.fixtures.idle_steps import steps_idle
from tests.fixtures.programs import shared_programs
from tests.train.reuse.commands import call, change_json, read_json, refuse, rows_with, succeed
from tests.train.reuse.random_weights import LLAMA, published

__all__ = ["one_device", "shared_programs"]  # fixtures

QUIET = "--log.no-tensorboard --log.no-samples --log.no-progress"
SMALL = f"--model.width 16 --model.depth 1 --model.num-heads 2 --data.batch-size 16 {QUIET}"
STEPS = 250
"""Steps of the run on digits, with and without whose average most digits are named right."""
VIT = (
    f"train vit-digits {SMALL} --data.eval-batch-size 64 --optimizer.warmup-steps 1 "
    f"--ema.decay 0.9 --steps {STEPS} --workdir"
)
COLOURED = (
    f"train vit-digits {SMALL} --data.eval-batch-size 64 --optimizer.warmup-steps 1 "
    "--data.name images:mine --data.eval-examples 2 --workdir coloured"
)
TUNE = f"--steps 40 --data.no-augment {QUIET}"
NUM_DIGITS = 140
MODES = {"colour.jpg": "RGB", "grey.png": "L", "print.jpg": "CMYK", "see.webp": "RGBA"}
"""Files of the folder `kinds`, by PIL's mode."""


@pytest.fixture(scope="module")
def digits() -> Any:
    """The data set as scikit-learn has it."""
    return cast("Any", load_digits())


@pytest.fixture(scope="module", autouse=True)
def folder(
    tmp_path_factory: pytest.TempPathFactory, digits: Any, one_device: None, shared_programs: None
) -> Iterator[Path]:
    """Return the current folder, with the run `vit` and the images that tests name.

    `text` is a run on text whose checkpoint has no arrays.
    """
    path = tmp_path_factory.mktemp("images")
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(path):
        patch.setenv("MUPAX_DATA", str(path / "cache"))
        for i in range(NUM_DIGITS):
            label = Path("digits", str(digits.target[i]))
            label.mkdir(parents=True, exist_ok=True)
            levels = np.round(digits.images[i] * 255 / 16).astype(np.uint8)
            Image.fromarray(levels).save(label / f"{i}.png")
        write_kinds()
        for number, name in enumerate(("nil", "one", "two")):
            shutil.copytree(f"digits/{number}", f"letters/{name}")
        Path("empty").mkdir()
        Path("hollow/ant").mkdir(parents=True)
        Path("prose.txt").write_text("once upon\na time\n")
        Path("blank.txt").write_text("\n")
        succeed(VIT, "vit")
        Path("text/checkpoints/5").mkdir(parents=True)
        Path("text/checkpoints/5", layout.MANIFEST).write_text("{}")
        config = json.loads(succeed("train lm-tiny --print-config").out)
        Path("text/config.json").write_text(json.dumps({"config": config, "data": {}, "run": "x"}))
        yield path


def write_kinds() -> None:
    """Write a digit in every mode, and files that are cut off."""
    kinds = Path("kinds")
    kinds.mkdir()
    large = Image.open("digits/3/3.png").resize((40, 40))
    for name, mode in MODES.items():
        large.convert(mode if mode == "L" else "RGB").convert(mode).save(kinds / name, quality=100)
    large.convert("P").save(kinds / "palette.gif")
    Image.fromarray(np.asarray(large).astype(np.uint16) * 257).save(kinds / "sixteen.png")
    torn = (kinds / "grey.png").read_bytes()[:90]
    (kinds / "torn.png").write_bytes(torn)
    for label in "ab":
        Path("broken", label).mkdir(parents=True)
        for i in range(3):
            Path("broken", label, f"{i}.png").write_bytes(torn)


@pytest.fixture(scope="module")
def hf(folder: Path) -> Path:
    """The run's parameters as Hugging Face has them; `imported` has them under mup."""
    succeed(f"export vit/checkpoints/{STEPS} --out hf")
    succeed("import hf --out imported --preset mup --base vit-proxy")
    return folder / "hf"


def predicted(words: str) -> list[dict[str, Any]]:
    """Return what `predict` prints for each image."""
    return [json.loads(line) for line in succeed("predict", words, "--json").out.splitlines()]


def best_class(row: dict[str, Any]) -> str:
    return row["classes"][0]["class"]


def probabilities(row: dict[str, Any]) -> dict[str, float]:
    return {entry["class"]: entry["probability"] for entry in row["classes"]}


def config_of(workdir: str) -> dict[str, Any]:
    return read_json(workdir, "config.json")["config"]


# Predictions


def exact_log_probabilities(digits: Any) -> np.ndarray:
    """Return the run's log-probabilities of the files' digits, read as the data set has them."""
    saved = saved_run.find(Path("vit"), None, None)
    program = runs.on_one_device(saved.config)
    model = definition(saved.config.model).model(
        saved.params(program.abstract),
        program.inputs.factors.multiplier,
        program.inputs.factors.forward,
    )
    source: Any = data.load(saved.config.data, saved.config.model, seed=0)
    pixels = digits.images[:NUM_DIGITS, ..., None].astype(np.float32)
    no_augmentation = np.zeros((NUM_DIGITS, images.NUMBERS))
    rows = [(image, 0) for image in pixels]
    raw = source._batch(rows, range(NUM_DIGITS), source._eval_view, no_augmentation)[0]
    logits = jax.jit(model)(images.normalized(raw, source.pixels, source.white))
    return np.asarray(jax.nn.log_softmax(logits))


def test_predictions_are_those_of_the_evaluation(digits: Any) -> None:
    rows = predicted("vit digits --top 10")
    assert [row["image"] for row in rows] == sorted(map(str, Path("digits").rglob("*.png")))
    log_likelihood = 0.0
    num_correct = 0
    for row in rows:
        values = probabilities(row)
        label = Path(row["image"]).parent.name
        assert list(values.values()) == sorted(values.values(), reverse=True)
        assert sum(values.values()) == pytest.approx(1)
        assert set(values) == set("0123456789")
        num_correct += best_class(row) == label
        log_likelihood += np.log(values[label])
    assert num_correct / NUM_DIGITS > 0.5
    exact = exact_log_probabilities(digits)[range(NUM_DIGITS), digits.target[:NUM_DIGITS]]
    # The files hold values in 1/255, the data in 1/16.
    assert log_likelihood / NUM_DIGITS == pytest.approx(exact.mean(), abs=2e-2)


def test_a_run_that_logged_more_images_than_are_predicted_answers() -> None:
    shutil.copytree("vit", "logged")
    config = config_of("logged")
    change_json(
        Path("logged/config.json"),
        config=config | {"log": config["log"] | {"images": 8, "tensorboard": True}},
    )
    assert predicted("logged digits/3/3.png") == predicted("vit digits/3/3.png")
    succeed("eval logged --data.eval-batch-size 4 --data.eval-examples 4")


def test_a_folder_of_hugging_face_and_an_imported_one_answer_alike(hf: Path) -> None:
    expected = predicted("vit digits/3")
    assert [best_class(row) for row in expected].count("3") > len(expected) / 2
    for source in ("hf", "imported"):
        rows = predicted(f"{source} digits/3")
        assert len(rows) == len(expected)
        for row, expected_row in zip(rows, expected, strict=True):
            assert best_class(row) == best_class(expected_row)
            assert probabilities(row) == pytest.approx(probabilities(expected_row), abs=1e-5)


def test_files_of_any_size_and_mode_are_read_and_broken_ones_named() -> None:
    # With a byte order mark, as editors on Windows write.
    Path("list.txt").write_text("\ufeffkinds/grey.png\n\nkinds/missing.png\n", "utf-8")
    words = "kinds list.txt digits/3/3.png --top 2 --step"
    code, out, err = call("predict vit", words, STEPS)
    assert code == 2
    names = sorted([*MODES, "palette.gif", "sixteen.png"])
    answers = dict(line.split(": ") for line in out.splitlines())
    lines = [line.partition(": ") for line in out.splitlines()]
    paths = [f"kinds/{name}" for name in names]
    assert [path for path, _, _ in lines] == [*paths, "kinds/grey.png", "digits/3/3.png"]
    assert {answer.partition(" ")[0] for answer in answers.values()} == {"3"}
    assert all(line.count("%") == 2 for line in out.splitlines())
    assert "left out: cannot read the image kinds/torn.png" in err
    assert "left out: cannot read the image kinds/missing.png" in err
    summary = f"8 of 10 images by step {STEPS} of vit, its moving average; 2 without an answer"
    assert summary in err
    assert call("predict vit kinds/torn.png")[:2] == (2, "")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_model_with_a_logit_that_is_not_finite_has_no_answer(
    value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_logits = Program.compile_logits

    def compile_broken(program: Program) -> Any:
        logits_fn = compile_logits(program)
        return lambda *inputs: logits_fn(*inputs).at[:, 7].set(value)

    monkeypatch.setattr(Program, "compile_logits", compile_broken)
    code, out, err = call("predict vit digits/3/3.png")
    assert (code, out) == (2, "")
    assert "left out: the model has no answer for digits/3/3.png: its logits are not finite" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("vit", "no images are named"),
        ("vit no_such", "no file or folder no_such"),
        ("vit empty", "empty has no image in it"),
        ("vit prose.txt", "prose.txt lists no image file (its first line is 'once upon')"),
        ("vit blank.txt", "it is empty"),
        ("nothing digits", "no run and no weights there"),
        ("vit digits --top 0", "--top is 0"),
        ("vit digits --step 7", "step 7"),
        ("hf digits --step 7", "leave --step out"),
        ("text digits", "holds a decoder, and predict is for models of images"),
    ],
)
def test_what_cannot_be_predicted_is_refused(words: str, message: str, hf: Path) -> None:
    assert message in refuse("predict", words)


# Fine-tuning


@pytest.fixture(scope="module")
def tuned(folder: Path) -> str:
    """The messages of a run on `letters`, three digits with other names, that starts from `vit`."""
    return succeed("finetune vit letters --from vit", TUNE).err


def test_defaults_come_from_the_source(tuned: str) -> None:
    source = config_of("vit")
    record = read_json("runs/finetune-letters/config.json")
    config = record["config"]
    assert config["model"] == {**source["model"], "num_classes": 3}
    assert config["preset"] == source["preset"]
    assert config["data"]["pixels"]["fit"] == "squash"
    assert config["optimizer"]["peak_lr"] == pytest.approx(0.3 * source["optimizer"]["peak_lr"])
    assert config["init"]["init_from"].endswith(f"vit/checkpoints/{STEPS}")
    assert config["init"]["init_ema"] is True
    assert config["init"]["init_new"] == ["readout"]
    rate = "rate 0.0009, 0.3 times the source's 0.003 under mup relative to vit-proxy; 40 steps"
    assert rate in tuned
    classes = "since the source has no nil, one, two among its 10 classes (0, 1, 2 and 7 more)"
    assert f"images of 3 classes, readout new, {classes}" in tuned
    assert record["data"]["class_names"] == ["nil", "one", "two"]
    assert record["data"]["pixels"]["fit"] == "squash"


def test_a_run_learns_from_the_source_more_than_alone(tuned: str) -> None:
    succeed("finetune letters --from vit --workdir runs/scratch --init-new *", TUNE)
    alone = rows_with("eval_loss", "runs/scratch")[-1]
    assert rows_with("eval_loss", "runs/finetune-letters")[-1]["eval_loss"] < (
        0.7 * alone["eval_loss"]
    )


def test_predictions_and_exports_have_the_new_names(folder: Path, tuned: str) -> None:
    rows = predicted("runs/finetune-letters digits/1 kinds/grey.png")
    assert set(probabilities(rows[0])) == {"nil", "one", "two"}
    assert [best_class(row) for row in rows].count("one") > len(rows) / 2
    succeed("export runs/finetune-letters --out letters-hf")
    labels = read_json("letters-hf/config.json")["label2id"]
    assert labels == {"nil": 0, "one": 1, "two": 2}
    card = Path("letters-hf/README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\npipeline_tag: image-classification\n")
    for text in (
        "1. `one`",
        "squash, bilinear",
        "mup",
        "data: `images:letters`",
        "started from `vit`",
        "40 of 40 steps of 32",
    ):
        assert text in card
    assert str(folder) not in card
    for row, exported in zip(rows, predicted("letters-hf digits/1 kinds/grey.png"), strict=True):
        best = row["classes"][0]["probability"]
        assert exported["classes"][0]["probability"] == pytest.approx(best, abs=1e-5)


def test_the_sources_own_classes_keep_its_readout(tuned: str) -> None:
    result = succeed("finetune digits --from vit --print-config --steps 7")
    assert "128 images of 10 classes, readout the source's" in result.err
    config = json.loads(result.out)
    assert config["init"]["init_new"] == []
    assert config["workdir"] == "runs/finetune-digits"
    assert config["optimizer"]["warmup_steps"] == 0
    assert config["log"]["eval_every_steps"] == 1
    named = succeed("finetune vit digits --from vit --print-config --steps 7")
    assert named.out == result.out
    err = succeed("finetune digits --from vit --print-config --optimizer.peak-lr 0.002").err
    assert "rate 0.002, as asked; 100 steps" in err
    err = succeed("finetune letters --from runs/finetune-letters --print-config").err
    rate = "rate 0.0009, that of the source, itself fine-tuned, under mup"
    assert f"readout the source's; {rate}" in err


@pytest.mark.parametrize(
    ("source", "preset", "rate"),
    [("hf", "sp in absolute form", 0.0024), ("imported", "mup relative to vit-proxy", 0.0012)],
)
def test_weights_without_a_rate_have_one_by_width(
    source: str, preset: str, rate: float, hf: Path
) -> None:
    result = succeed("finetune letters --print-config --from", source)
    message = "so that matrices move at 5e-5 x 768 / width = 0.0024 under"
    assert f"{message} {preset}" in result.err
    assert json.loads(result.out)["optimizer"]["peak_lr"] == pytest.approx(rate)
    if source == "imported":
        succeed("finetune letters --from imported --dry-run")


def test_weights_of_experts_alone_have_a_rate_by_width() -> None:
    """Their blocks have no MLP, whose matrix gives the rate otherwise."""
    Path("verse").mkdir()
    Path("verse/a.txt").write_text("once upon a time\n" * 999)
    routing = RoutingConfig(gate="softmax")
    model = dataclasses.replace(LLAMA, width=16, vocab_size=256, experts=2, routing=routing)
    published(Path("experts"), model)
    words = "--data.tokenizer bytes --print-config"
    err = succeed("finetune verse --from experts", words).err
    assert "rate 0.0024, so that matrices move at 5e-5 x 768 / width = 0.0024 under sp" in err


def test_the_adam_part_of_muon_is_fine_tuned_at_the_same_share_of_its_rate() -> None:
    Path("lines").mkdir()
    Path("lines", "a.txt").write_text("once upon a time\n" * 99)
    shutil.copytree("text", "text-muon")
    record = read_json("text-muon/config.json")
    record["config"]["optimizer"] |= {"name": "muon", "peak_lr": 0.05, "adam_lr": 0.01}
    Path("text-muon/config.json").write_text(json.dumps(record))
    optimizer = json.loads(succeed("finetune lines --from text-muon --print-config").out)[
        "optimizer"
    ]
    assert optimizer["peak_lr"] == pytest.approx(0.3 * 0.05)
    assert optimizer["adam_lr"] == pytest.approx(0.3 * 0.01)
    words = "finetune lines --from text-muon --lora.rank 2 --print-config"
    adapters = json.loads(succeed(words).out)["optimizer"]
    assert adapters["adam_lr"] / optimizer["adam_lr"] == pytest.approx(
        adapters["peak_lr"] / optimizer["peak_lr"]
    )
    assert adapters["peak_lr"] > optimizer["peak_lr"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--preset sp", "caution: that rate is for another preset, base or constants"),
        ("--optimizer.name lion", "caution: that rate is for the optimizer adamw, and this run"),
        ("--optimizer.name lion --optimizer.peak-lr 0.001", "as asked"),
        ("--preset.form plain", "0.3 times"),
    ],
)
def test_a_rate_of_another_preset_or_optimizer_is_cautioned(words: str, expected: str) -> None:
    err = succeed("finetune letters --from vit --print-config", words).err
    assert expected in err
    assert ("caution" in err) == ("caution" in expected)


def test_a_language_model_goes_on_with_its_own_tokens() -> None:
    Path("prose").mkdir()
    Path("prose", "a.txt").write_text("once upon a time\n" * 99)
    result = succeed("finetune lm prose --from text --print-config")
    rate = "rate 0.0024, 0.3 times the source's 0.008 under mup relative to lm-proxy"
    assert f"tokens of bytes; {rate}; 200 steps" in result.err
    config = json.loads(result.out)
    assert config["data"]["name"] == "text:prose"
    assert config["data"]["tokenizer"] == "bytes"
    assert config["init"]["init_new"] == []
    assert config["model"]["seq_len"] == 128
    shutil.copytree("text", "other-tokens")
    record = read_json("text/config.json")
    record["config"]["data"]["tokenizer"] = "bpe:300"
    Path("other-tokens/config.json").write_text(json.dumps(record))
    err = refuse("finetune prose --from other-tokens --print-config")
    assert "the tokenizer of" in err
    assert "is not here (bpe:300); give its file as --data.tokenizer FILE" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("no_such --from vit", "no folder no_such"),
        ("prose.txt --from vit", "prose.txt is a file, and"),
        ("empty --from vit", "empty is a folder without folders, and"),
        ("digits/3 --from vit", "digits/3 is a folder without folders, and"),
        ("hollow --from vit", "hollow/ant has no image"),
        ("broken --from vit", "cannot read the image"),
        ("letters --from nothing", "no run and no weights there"),
        ("letters --from text", "holds a decoder, which reads text, and letters has images"),
        ("letters", "--from"),
        (
            "vit no_such --from vit",
            "no folder no_such; give one that has a folder of images per class",
        ),
        ("lm letters --from vit", "finetune lm is for the family decoder, and"),
        ("letters --from vit --stepz 3", "did you mean --steps"),
        ("letters --from vit --init-from hf", "are two sources; leave --init-from out"),
        (
            "letters --from vit --data.name images:digits",
            "letters and --data.name images:digits are two sets of data; leave --data.name out",
        ),
        ("letters --from vit --data.name=digits", "letters and --data.name digits are two sets"),
        ("letters --from vit --model.width 32 --steps 2", "mupax grow"),
        ("letters --from vit --model.width 32 --dry-run", "mupax grow"),
    ],
)
def test_what_cannot_be_tuned_is_refused(words: str, message: str) -> None:
    code, _, err = call("finetune", words, "--workdir runs/never")
    assert code == 2, err
    assert message in err
    assert "Traceback" not in err
    assert not Path("runs/never/config.json").exists()


# Evaluation


def test_evaluation_has_calibration_and_every_class() -> None:
    result = succeed("eval vit --json vit.json")
    assert not result.err
    report = read_json("vit.json")
    rows = report["classes"]
    assert [row["class"] for row in rows] == list("0123456789")
    assert sum(row["examples"] for row in rows) == report["examples"]
    hits = sum(row["recall"] * row["examples"] for row in rows)
    assert hits / report["examples"] == pytest.approx(report["accuracy"])
    assert report["accuracy"] < report["top5_accuracy"] <= 1
    assert 0 < report["ece"] < 0.5
    for text in ("top-5 accuracy", "expected error of the confidence", "taken for"):
        assert text in result.out


def test_classes_that_are_not_the_runs_are_refused(tuned: str) -> None:
    for words in (
        "vit --data.name images:letters",
        "runs/finetune-letters --data.name images:digits",
    ):
        code, _, err = call("eval", words)
        assert code == 2
        assert "the classes of the run in" in err
        assert "or fine-tune on them: `mupax finetune" in err
    # The control: the classes of the run.
    out = succeed("eval vit --data.name images:digits --data.pixels.fit squash").out
    assert "other data than the run's" in out


@pytest.fixture(scope="module")
def coloured(folder: Path) -> None:
    """A run on images in colour, which no flag mentions. `held` has others of the same classes."""
    draw = np.random.default_rng(0)
    for place, count in (("mine", 20), ("held", 30)):
        for channel, name in enumerate(("red", "green")):
            Path(place, name).mkdir(parents=True)
            for i in range(count):
                pixels = draw.integers(0, 90, (8, 8, 3)).astype(np.uint8)
                pixels[..., channel] += 120
                Image.fromarray(pixels).save(Path(place, name, f"{place}{i}.png"))
    with steps_idle():
        result = succeed(COLOURED, "--steps 2 --data.evaluate held=images:held")
    assert "--model.channels" in result.err


def test_sizes_of_the_model_come_from_the_folder(coloured: None) -> None:
    record = read_json("coloured/config.json")
    model = record["config"]["model"]
    assert [model[name] for name in ("num_classes", "channels", "image_size")] == [2, 3, 8]
    facts = record["data"]
    assert (facts["pixels"]["fit"], facts["pixels"]["resize"]) == ("edge", 9)
    assert facts["sets"]["held"]["eval_images"] == 60


def test_another_folder_is_scored_completely_and_the_runs_own_where_it_was_held_out(
    coloured: None,
) -> None:
    held_out = read_json("coloured/config.json")["data"]["eval_images"]
    shutil.copytree("held", "parts/test")
    shutil.copytree("mine", "parts/train")
    shutil.copytree("held/red", "red-alone/red")
    own = f"{Path('mine').absolute()} --data.eval-examples 99"
    for name, examples, line in (
        ("held", 60, "all 60 images of held"),
        ("parts", 60, "train is not used"),
        ("red-alone", 30, "no images of green"),
        (own, held_out, f"the {held_out} held-out images"),
    ):
        out = succeed(f"eval coloured --json eval.json --data.name images:{name}").out
        assert read_json("eval.json")["examples"] == examples
        assert line in out
        assert "of 2 classes are listed" in out


def test_a_run_of_an_older_version_keeps_how_it_read_images(coloured: None) -> None:
    record = read_json("coloured/config.json")
    for pixels in (record["config"]["data"]["pixels"], record["data"]["pixels"]):
        del pixels["background"]
        pixels |= {"fit": "centre", "resize": None}
    Path("coloured/config.json").write_text(json.dumps(record))
    succeed("eval coloured")
    with steps_idle():
        result = succeed(COLOURED, "--steps 3 --resume --resume-change schedule")
    assert "changed since: data.pixels" not in result.out + result.err
    record = read_json("coloured/config.json")
    for pixels in (record["config"]["data"]["pixels"], record["data"]["pixels"]):
        assert (pixels["fit"], pixels["background"]) == ("centre", "none")
    # An older run on data that does not read such fields goes on too.
    record = read_json("vit/config.json")
    record["config"]["data"]["pixels"] = {
        "fit": "centre",
        "resize": None,
        "interpolation": "bilinear",
        "mean": [0.5],
        "std": [0.5],
    }
    shutil.copytree("vit", "older")
    Path("older/config.json").write_text(json.dumps(record))
    succeed(VIT, "older --resume")


# Scores


def scored(logits: np.ndarray, labels: Any) -> dict[str, Any]:
    """Return the scores of logits [examples, classes] whose classes are called a, b and so on."""
    names = [chr(ord("a") + i) for i in range(logits.shape[1])]
    return scores(logits.astype(np.float32), np.array(labels), names)


def test_calibration_and_classes_are_those_of_their_definitions() -> None:
    # Two at 0.6, half of them right; two at 0.9, half of them right.
    report = scored(
        np.log([[0.6, 0.4], [0.1, 0.9], [0.9, 0.1], [0.6, 0.4]]),
        [0, 0, 0, 1],
    )
    assert report["ece"] == pytest.approx((0.1 * 2 + 0.4 * 2) / 4)
    assert report["classes"][0] == {
        "class": "a",
        "label": 0,
        "examples": 3,
        "recall": 2 / 3,
        "precision": 2 / 3,
        "taken_for": "b",
    }
    assert "top5_accuracy" not in report


def test_of_equal_logits_the_first_classes_count() -> None:
    likeliest_first = np.eye(7)[[0]] + np.arange(7) / 100
    ranks = [scored(likeliest_first, [label])["top5_accuracy"] for label in range(7)]
    assert ranks == [1, 0, 0, 1, 1, 1, 1]
    report = scored(np.zeros((10, 10)), range(10))
    assert report["top5_accuracy"] == 0.5
    assert report["classes"][0]["recall"] == 1  # as argmax has it


def test_logits_that_are_not_finite_are_left_out_of_the_calibration() -> None:
    report = scored(np.where(np.arange(10)[:, None] < 2, np.nan, 9 * np.eye(10)), range(10))
    assert report["not_finite"] == 2
    assert report["ece"] < 0.01
    assert report["top5_accuracy"] == 1
    assert [row["recall"] for row in report["classes"]] == [1, 0, *[1] * 8]
    report = scored(np.full((3, 6), np.nan), range(3))
    assert (report["not_finite"], report["ece"], report["top5_accuracy"]) == (3, None, 1)


def test_a_table_lists_the_worst_classes() -> None:
    labels = np.arange(30)
    labels[:2] = [1, 2]
    rows = table(scored(np.eye(30), labels)["classes"], most=3)
    assert [row[3] for row in rows] == ["recall", "0.0 %", "50.0 %", "100.0 %"]
