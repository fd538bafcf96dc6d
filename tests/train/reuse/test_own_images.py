"""From a model of images to something used: its answers for files, a run on images of one's own that starts from it, its evaluation."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from mupax.__main__ import main
from mupax.train.checkpoints import layout
from tests.fixtures.programs import shared_programs

__all__ = ["shared_programs"]  # a fixture

SMALL = (
    "--model.width 16 --model.depth 1 --model.num-heads 2 --data.batch-size 16 --data.eval-batch-size 64 "
    "--log.no-tensorboard --log.no-samples --log.no-progress"
)


def run(*words: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    return code, out.getvalue(), " ".join(err.getvalue().split())


def export(workdir: str, out: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["export", workdir, "--out", out]) == 0


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder with a run on digits, one on text that has a checkpoint without arrays, digits as files by class, and files of many kinds."""
    path, digits = tmp_path_factory.mktemp("images"), cast("Any", load_digits())
    for i in range(140):
        place = path / "digits" / f"{digits.target[i]}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.round(digits.images[i] * 255 / 16).astype(np.uint8)).save(
            place / f"{i}.png"
        )
    kinds = path / "kinds"
    kinds.mkdir()
    big = Image.open(path / "digits" / "3" / "3.png").resize((40, 40))
    for name, mode in (
        ("grey.png", "L"),
        ("colour.jpg", "RGB"),
        ("print.jpg", "CMYK"),
        ("see.webp", "RGBA"),
    ):
        big.convert("RGB" if mode != "L" else "L").convert(mode).save(kinds / name, quality=100)
    big.convert("P").save(kinds / "palette.gif")
    Image.fromarray(np.asarray(big).astype(np.uint16) * 257).save(kinds / "sixteen.png")
    (kinds / "torn.png").write_bytes((kinds / "grey.png").read_bytes()[:90])
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(path):
        patch.setenv("MUPAX_DATA", str(path / "cache"))
        words = f"train vit-digits {SMALL} --optimizer.warmup-steps 1 --steps 250 --ema.decay 0.9 --workdir vit"
        assert run(*words.split())[0] == 0
        checkpoint = Path("text/checkpoints/5")
        checkpoint.mkdir(parents=True)
        (checkpoint / layout.MANIFEST).write_text("{}")
        config = json.loads(run("train", "lm-tiny", "--print-config")[1])
        Path("text/config.json").write_text(json.dumps({"config": config, "data": {}, "run": "x"}))
        yield path


@pytest.fixture(scope="module")
def hf(folder: Path) -> Path:
    """The run's parameters as Hugging Face has them."""
    export("vit/checkpoints/250", "hf")
    return folder / "hf"


def predicted(*words: str) -> list[dict[str, Any]]:
    code, out, err = run("predict", *words, "--json")
    assert code == 0, err
    return [json.loads(line) for line in out.splitlines()]


# Predictions


def test_answers_are_those_of_the_evaluation() -> None:
    rows = predicted("vit", "digits", "--top", "10")
    assert [row["image"] for row in rows] == sorted(
        str(path) for path in Path("digits").rglob("*.png")
    )
    for row in rows:
        probabilities = [one["probability"] for one in row["classes"]]
        assert probabilities == sorted(probabilities, reverse=True)
        assert sum(probabilities) == pytest.approx(1)
        assert {one["class"] for one in row["classes"]} == set("0123456789")
    accuracy = np.mean(
        [row["classes"][0]["class"] == Path(row["image"]).parent.name for row in rows]
    )
    assert accuracy > 0.5
    log_loss = -np.mean(
        [
            np.log(one["probability"])
            for row in rows
            for one in row["classes"]
            if one["class"] == row["image"][7]
        ]
    )
    from mupax.train import data
    from mupax.train.checkpoints import saved_run
    from mupax.train.data import images
    from mupax.train.reuse import runs
    from mupax.zoo.definition import definition

    saved = saved_run.find(Path("vit"), None, None)
    program = runs.on_one_device(saved.config)
    source: Any = data.load(saved.config.data, saved.config.model, seed=0)
    model = definition(saved.config.model).model(
        saved.params(program.abstract),
        program.inputs.factors.multiplier,
        program.inputs.factors.forward,
    )
    digits = cast("Any", load_digits())
    pixels = digits.images[:140, ..., None].astype(np.float32)
    raw = source._batch(
        [(x, 0) for x in pixels], range(140), source._eval_view, np.zeros((140, 5))
    )[0]
    logits = np.asarray(jax.jit(model)(images.normalized(raw, source.pixels, source.white)))
    exact = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    truth = -exact[np.arange(140), digits.target[:140]].mean()
    assert log_loss == pytest.approx(
        truth, abs=2e-2
    )  # the files hold values in 1/255, the data in 1/16


def test_a_folder_of_hugging_face_and_an_imported_one_answer_alike(hf: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["import", "hf", "--out", "in", "--preset", "mup", "--base", "vit-proxy"]) == 0
    first, *rest = (
        predicted(*words, "digits/3") for words in (["vit", "--no-ema"], ["hf"], ["in"])
    )
    assert [row["classes"][0]["class"] for row in first].count("3") > len(first) / 2
    for rows in rest:
        for ours, theirs in zip(first, rows, strict=True):
            for a, b in zip(ours["classes"], theirs["classes"], strict=True):
                assert a["class"] == b["class"]
                assert a["probability"] == pytest.approx(b["probability"], abs=1e-5)


def test_files_of_any_size_and_mode_are_read_and_broken_ones_named() -> None:
    Path("list.txt").write_text(
        "\ufeffkinds/grey.png\n\nkinds/missing.png\n", "utf-8"
    )  # with a mark, as Windows writes
    code, out, err = run(
        "predict", "vit", "kinds", "list.txt", "digits/3/3.png", "--top", "2", "--step", "250"
    )
    assert code == 2
    lines = out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        *(
            f"kinds/{name}"
            for name in (
                "colour.jpg",
                "grey.png",
                "palette.gif",
                "print.jpg",
                "see.webp",
                "sixteen.png",
            )
        ),
        "kinds/grey.png",
        "digits/3/3.png",
    ]
    assert {line.partition(": ")[2].partition(" ")[0] for line in lines} == {"3"}
    assert all(line.count("%") == 2 for line in lines)
    assert "left out: cannot read the image kinds/torn.png" in err
    assert "left out: cannot read the image kinds/missing.png" in err
    assert "8 of 10 images by step 250 of vit, its moving average; 2 could not be read" in err
    assert run("predict", "vit", "kinds/torn.png")[:2] == (2, "")


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
        ("hf digits --step 7", "leave --step and --ema out"),
        ("text digits", "holds a decoder, and predict is for models of images"),
    ],
)
def test_what_cannot_be_answered_is_refused(words: str, message: str, hf: Path) -> None:
    Path("empty").mkdir(exist_ok=True)
    Path("prose.txt").write_text("once upon\na time\n")
    Path("blank.txt").write_text("\n")
    code, out, err = run("predict", *words.split())
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


# Fine-tuning

QUICK = ["--steps", "40", "--log.no-tensorboard", "--log.no-samples", "--log.no-progress"]


def config_of(workdir: str) -> dict[str, Any]:
    return json.loads((Path(workdir) / "config.json").read_text())["config"]


@pytest.fixture(scope="module")
def tuned(folder: Path) -> dict[str, Any]:
    """A run on letters, digits named otherwise, that goes on from the run on digits: its files, what it said, its last row."""
    for number, name in enumerate(("nil", "one", "two")):
        shutil.copytree(f"digits/{number}", f"letters/{name}")
    code, out, err = run("finetune", "vit", "letters", "--from", "vit", *QUICK, "--data.no-augment")
    assert code == 0, err
    rows = [
        json.loads(line)
        for line in Path("runs/finetune-letters/metrics.jsonl").read_text().splitlines()
    ]
    return {"out": out, "err": err, "row": [row for row in rows if "eval_loss" in row][-1]}


def test_all_that_can_comes_from_the_source(tuned: dict[str, Any]) -> None:
    there, here = config_of("vit"), config_of("runs/finetune-letters")
    assert here["model"] == {**there["model"], "num_classes": 3}
    assert (here["preset"], here["data"]["pixels"]["fit"]) == (there["preset"], "squash")
    assert here["optimizer"]["peak_lr"] == pytest.approx(0.3 * there["optimizer"]["peak_lr"])
    assert here["init"]["init_from"].endswith("vit/checkpoints/250")
    assert (here["init"]["init_ema"], here["init"]["init_new"]) == (True, ["readout"])
    assert (
        "rate 0.0009, 0.3 times the source's 0.003 under mup relative to vit-proxy; 40 steps"
        in tuned["err"]
    )
    assert (
        "images of 3 classes, readout new, since the source has no nil, one, two among its 10 classes (0, 1, 2 and 7 more)"
        in (tuned["err"])
    )
    facts = json.loads(Path("runs/finetune-letters/config.json").read_text())["data"]
    assert (facts["class_names"], facts["pixels"]["fit"]) == (["nil", "one", "two"], "squash")


def test_it_learns_from_the_source_what_it_does_not_alone(tuned: dict[str, Any]) -> None:
    words = (
        "finetune",
        "letters",
        "--from",
        "vit",
        *QUICK,
        "--data.no-augment",
        "--workdir",
        "runs/scratch",
    )
    assert run(*words, "--init-new", "*")[0] == 0
    rows = [
        json.loads(line) for line in Path("runs/scratch/metrics.jsonl").read_text().splitlines()
    ]
    alone = [row["eval_loss"] for row in rows if "eval_loss" in row][-1]
    assert tuned["row"]["eval_loss"] < 0.7 * alone


def test_predictions_and_exports_have_the_new_names(folder: Path, tuned: dict[str, Any]) -> None:
    ours = predicted("runs/finetune-letters", "digits/1", "kinds/grey.png")
    assert {one["class"] for one in ours[0]["classes"]} == {"nil", "one", "two"}
    assert [row["classes"][0]["class"] for row in ours].count("one") > len(ours) / 2
    export("runs/finetune-letters", "letters-hf")
    assert json.loads(Path("letters-hf/config.json").read_text())["label2id"] == {
        "nil": 0,
        "one": 1,
        "two": 2,
    }
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
    for a, b in zip(ours, predicted("letters-hf", "digits/1", "kinds/grey.png"), strict=True):
        assert a["classes"][0]["probability"] == pytest.approx(
            b["classes"][0]["probability"], abs=1e-5
        )


def test_the_sources_own_classes_keep_its_readout(tuned: dict[str, Any]) -> None:
    code, whole, err = run("finetune", "digits", "--from", "vit", "--print-config", "--steps", "7")
    assert code == 0
    assert "128 images of 10 classes, readout the source's" in err
    config = json.loads(whole)
    assert (config["init"]["init_new"], config["workdir"]) == ([], "runs/finetune-digits")
    err = run(
        "finetune", "digits", "--from", "vit", "--print-config", "--optimizer.peak-lr", "0.002"
    )[2]
    assert "rate 0.002, as asked; 100 steps" in err
    assert (
        run("finetune", "vit", "digits", "--from", "vit", "--print-config", "--steps", "7")[1]
        == whole
    )
    err = run("finetune", "letters", "--from", "runs/finetune-letters", "--print-config")[2]
    assert (
        "readout the source's; rate 0.0009, that of the source, itself fine-tuned, under mup" in err
    )


def test_weights_without_a_rate_have_one_by_width(hf: Path, tuned: dict[str, Any]) -> None:
    message = "so that matrices move at 5e-5 x 768 / width = 0.0024 under"
    with contextlib.redirect_stdout(io.StringIO()):
        assert (
            main(["import", "hf", "--out", "as-mup", "--preset", "mup", "--base", "vit-proxy"]) == 0
        )
    for source, under, peak in (
        ("hf", "sp in absolute form", 0.0024),
        ("as-mup", "mup relative to vit-proxy", 0.0012),
    ):
        code, out, err = run("finetune", "letters", "--from", source, "--print-config")
        assert code == 0
        assert f"{message} {under}" in err
        assert json.loads(out)["optimizer"]["peak_lr"] == pytest.approx(peak)
    assert run("finetune", "letters", "--from", "as-mup", "--dry-run")[0] == 0


def test_a_language_model_goes_on_with_its_own_tokens(folder: Path) -> None:
    (folder / "prose").mkdir()
    (folder / "prose" / "a.txt").write_text("once upon a time\n" * 99)
    code, out, err = run("finetune", "lm", "prose", "--from", "text", "--print-config")
    assert code == 0
    assert (
        "tokens of bytes; rate 0.0024, 0.3 times the source's 0.008 under mup relative to lm-proxy; 200 steps"
        in err
    )
    config = json.loads(out)
    assert (config["data"]["name"], config["data"]["tokenizer"]) == ("text:prose", "bytes")
    assert (config["init"]["init_new"], config["model"]["seq_len"]) == ([], 128)
    record = json.loads(Path("text/config.json").read_text())
    record["config"]["data"]["tokenizer"] = "bpe:300"
    Path("text/config.json").write_text(json.dumps(record))
    code, _, err = run("finetune", "prose", "--from", "text", "--print-config")
    assert code == 2
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
        ("kinds2 --from vit", "cannot read the image"),
        ("letters --from nothing", "no run and no weights there"),
        ("letters --from text", "holds a decoder, which reads text, and letters has images"),
        ("letters", "--from"),
        (
            "vit no_such --from vit",
            "no folder no_such; give one that has a folder of images per class",
        ),
        ("lm letters --from vit", "finetune lm is for the family decoder, and"),
        ("letters --from vit --stepz 3", "did you mean --steps"),
        ("letters --from vit --model.width 32 --steps 2", "mupax grow"),
    ],
)
def test_what_cannot_be_tuned_is_refused(
    words: str, message: str, folder: Path, tuned: dict[str, Any]
) -> None:
    Path("empty").mkdir(exist_ok=True)
    Path("hollow/ant").mkdir(parents=True, exist_ok=True)
    Path("prose.txt").write_text("once upon\na time\n")
    for name in ("a", "b"):
        (Path("kinds2") / name).mkdir(parents=True, exist_ok=True)
        for i in range(3):
            (Path("kinds2") / name / f"{i}.png").write_bytes(
                (folder / "kinds" / "torn.png").read_bytes()
            )
    code, _, err = run("finetune", *words.split(), "--workdir", "runs/never")
    assert code == 2, err
    assert message in err
    assert "Traceback" not in err
    assert not list(Path("runs/never").glob("config.json"))


# Evaluation


def test_evaluation_has_calibration_and_every_class(tuned: dict[str, Any]) -> None:
    code, out, err = run("eval", "vit", "--json", "vit.json")
    assert (code, err) == (0, "")
    numbers = json.loads(Path("vit.json").read_text())
    assert [row["class"] for row in numbers["classes"]] == list("0123456789")
    assert sum(row["examples"] for row in numbers["classes"]) == numbers["examples"]
    hits = sum(row["recall"] * row["examples"] for row in numbers["classes"])
    assert hits / numbers["examples"] == pytest.approx(numbers["accuracy"])
    assert numbers["accuracy"] < numbers["top5_accuracy"] <= 1
    assert 0 < numbers["ece"] < 0.5
    assert "top-5 accuracy" in out
    assert "expected error of the confidence" in out
    assert "taken for" in out


def test_classes_that_are_not_the_runs_are_refused(tuned: dict[str, Any]) -> None:
    for words in (
        ("vit", "--data.name", "images:letters"),
        ("runs/finetune-letters", "--data.name", "images:digits"),
    ):
        code, _, err = run("eval", *words)
        assert code == 2
        assert "the classes of the run in" in err
        assert "or fine-tune on them: `mupax finetune" in err
    code, out, _ = run("eval", "vit", "--data.name", "images:digits", "--data.pixels.fit", "squash")
    assert code == 0
    assert "other data than the run's" in out


@pytest.fixture(scope="module")
def coloured(folder: Path) -> str:
    """A run on images in colour, of which no flag says so; `held` has 60 others of the same classes."""
    draw = np.random.default_rng(0)
    for place, count in (("mine", 20), ("held", 30)):
        for channel, name in enumerate(("red", "green")):
            (folder / place / name).mkdir(parents=True)
            for i in range(count):
                pixels = draw.integers(0, 90, (8, 8, 3)).astype(np.uint8)
                pixels[..., channel] += 120
                Image.fromarray(pixels).save(folder / place / name / f"{place}{i}.png")
    return f"train vit-digits {SMALL} --data.name images:mine --data.eval-examples 2 --optimizer.warmup-steps 1 --workdir coloured"


def test_sizes_of_the_model_come_from_the_folder(coloured: str) -> None:
    code, _, err = run(*coloured.split(), "--steps", "2", "--data.evaluate", "held=images:held")
    assert code == 0, err
    assert "--model.channels" in err
    config = config_of("coloured")
    assert [config["model"][name] for name in ("num_classes", "channels", "image_size")] == [
        2,
        3,
        8,
    ]
    facts = json.loads(Path("coloured/config.json").read_text())["data"]
    assert (
        facts["pixels"]["fit"],
        facts["pixels"]["resize"],
        facts["sets"]["held"]["eval_images"],
    ) == ("edge", 9, 60)


def test_another_folder_is_scored_whole_and_the_runs_own_where_it_was_held_out(
    coloured: str,
) -> None:
    held_out = json.loads(Path("coloured/config.json").read_text())["data"]["eval_images"]
    shutil.copytree("held", "parts/test", dirs_exist_ok=True)
    shutil.copytree("mine", "parts/train", dirs_exist_ok=True)
    shutil.copytree("held/red", "one/red", dirs_exist_ok=True)
    for name, examples, line in (
        ("held", 60, "all 60 images of held"),
        ("parts", 60, "train is not used"),
        ("one", 30, "no images of green"),
        (str(Path("mine").absolute()), held_out, f"the {held_out} held-out images"),
    ):
        words = ["--data.eval-examples", "99"] if examples == held_out else []
        code, out, err = run(
            "eval", "coloured", "--data.name", f"images:{name}", "--json", "eval.json", *words
        )
        assert code == 0, err
        assert json.loads(Path("eval.json").read_text())["examples"] == examples
        assert line in out
        assert "of 2 classes are listed" in out


def test_a_run_of_an_older_version_keeps_how_it_read_images(coloured: str) -> None:
    record = json.loads(Path("coloured/config.json").read_text())
    for pixels in (record["config"]["data"]["pixels"], record["data"]["pixels"]):
        del pixels["background"]
        pixels |= {"fit": "centre", "resize": None}
    Path("coloured/config.json").write_text(json.dumps(record))
    code, out, err = run("eval", "coloured")
    assert code == 0, err
    code, out, err = run(
        *coloured.split(), "--steps", "3", "--resume", "--resume-change", "schedule"
    )
    assert code == 0, err
    assert "changed since: data.pixels" not in out + err
    record = json.loads(Path("coloured/config.json").read_text())
    for pixels in (record["config"]["data"]["pixels"], record["data"]["pixels"]):
        assert (pixels["fit"], pixels["background"]) == ("centre", "none")
    # An older run on data that does not read such fields goes on too.
    record = json.loads(Path("vit/config.json").read_text())
    older = {
        "fit": "centre",
        "resize": None,
        "interpolation": "bilinear",
        "mean": [0.5],
        "std": [0.5],
    }
    record["config"]["data"]["pixels"] = older
    shutil.copytree("vit", "older")
    Path("older/config.json").write_text(json.dumps(record))
    words = f"train vit-digits {SMALL} --optimizer.warmup-steps 1 --steps 250 --ema.decay 0.9 --workdir older --resume"
    code, out, err = run(*words.split())
    assert code == 0, err


def test_scores_are_those_of_their_definitions() -> None:
    from mupax.train.reuse.predict.scores import scores, table

    wrong, right = 0.9, 0.6
    logits = np.log(
        np.array(
            [[right, 1 - right], [1 - wrong, wrong], [wrong, 1 - wrong], [right, 1 - right]],
            np.float32,
        )
    )
    report = scores(logits, np.array([0, 0, 0, 1]), ["ant", "bee"])
    # Two at 0.6, half of them right; two at 0.9, half of them right.
    assert report["ece"] == pytest.approx((0.1 * 2 + 0.4 * 2) / 4)
    assert report["classes"][0] == {
        "class": "ant", "label": 0, "examples": 3, "recall": 2 / 3, "precision": 2 / 3, "taken_for": "bee",
    }  # fmt: skip
    assert "top5_accuracy" not in report
    six = np.eye(7, dtype=np.float32)[[0]] + np.arange(7, dtype=np.float32) / 100
    ranks = [scores(six, np.array([label]), list("abcdefg"))["top5_accuracy"] for label in range(7)]
    assert ranks == [1, 0, 0, 1, 1, 1, 1]
    # Equal logits: the first classes count, as argmax has it.
    level = np.zeros((10, 10), np.float32)
    assert scores(level, np.arange(10), list("abcdefghij"))["top5_accuracy"] == 0.5
    assert scores(level, np.arange(10), list("abcdefghij"))["classes"][0]["recall"] == 1
    # Logits that are no numbers: accuracy is as argmax has it, and calibration is that of the others.
    torn = np.where(np.arange(10)[:, None] < 2, np.nan, 9 * np.eye(10, dtype=np.float32))
    report = scores(torn, np.arange(10), list("abcdefghij"))
    assert (report["not_finite"], report["ece"] < 0.01, report["top5_accuracy"]) == (2, True, 1)
    assert [row["recall"] for row in report["classes"]] == [1, 0, *[1] * 8]
    none = scores(np.full((3, 6), np.nan), np.arange(3), list("abcdef"))
    assert (none["not_finite"], none["ece"], none["top5_accuracy"]) == (3, None, 1)
    many = scores(
        np.eye(30, dtype=np.float32),
        (np.arange(30) + (np.arange(30) < 2)) % 30,
        [f"c{i}" for i in range(30)],
    )
    assert [row[3] for row in table(many["classes"], most=3)] == [
        "recall",
        "0.0 %",
        "50.0 %",
        "100.0 %",
    ]
