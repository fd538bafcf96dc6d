"""`mupax eval` and `generate` on real runs: the run's own numbers, any step, other data, and what they refuse."""

from __future__ import annotations

import contextlib
import io
import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers, processors

from mupax import train
from mupax.__main__ import main
from mupax.errors import MupaxError
from mupax.train.checkpoints import saved_run
from mupax.train.config import cli
from mupax.train.data.records import corpus
from mupax.train.data.text.tokenizer import Bytes, Subwords
from mupax.train.run.report import metrics
from tests.fixtures.programs import shared_programs

__all__ = ["shared_programs"]  # a fixture

WORDS = ("def", "return", "import", "class", "self", "value", "lambda", "yield", "while", "None")
LM = (
    "train lm-tiny --data.name text:text.txt --model.width 16 --model.depth 1 --model.num-heads 2 --model.seq-len 16 "
    "--data.batch-size 16 --data.eval-batch-size 64 --data.eval-examples 100 --optimizer.warmup-steps 2 --steps 4 "
    "--log.eval-every-steps 2 --checkpoint.every-steps 2 --log.no-tensorboard --ema.decay 0.5 --workdir lm"
)
VIT = (
    "train vit-digits --model.width 16 --model.depth 1 --model.num-heads 2 --data.batch-size 16 --data.eval-batch-size 512 "
    "--optimizer.warmup-steps 1 --steps 2 --log.no-tensorboard --log.no-samples --workdir vit"
)


def run(*words: str, stdin: str = "") -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr("sys.stdin", io.StringIO(stdin))
        code = main(words)
    return code, out.getvalue(), err.getvalue()


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder with a run of a language model that keeps an average, one of a ViT, and two texts."""
    path, choose = tmp_path_factory.mktemp("use"), random.Random(0)
    for name in ("text", "other"):
        (path / f"{name}.txt").write_text(
            "\n".join(" ".join(choose.choices(WORDS, k=9)) for _ in range(600))
        )
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(path):
        patch.setenv("MUPAX_DATA", str(path / "cache"))
        for words in (LM, VIT):
            code, _, err = run(*words.split())
            assert (code, err) == (0, "")
        yield path


def evaluated(*words: str) -> tuple[dict[str, Any], str]:
    code, out, err = run("eval", *words, "--json", "found.json")
    assert (code, err) == (0, "")
    return json.loads(Path("found.json").read_text()), out


def rows(workdir: str) -> dict[int, dict[str, Any]]:
    return {
        row["step"]: row
        for row in metrics.read(Path(workdir) / metrics.FILE_NAME)
        if "eval_loss" in row
    }


# Evaluation


@pytest.mark.parametrize("step", [2, 4])
def test_the_numbers_are_those_of_the_run_at_that_step(step: int) -> None:
    record, out = evaluated("lm", "--step", str(step))
    assert (record["loss"], record["accuracy"]) == (
        rows("lm")[step]["eval_loss"],
        rows("lm")[step]["eval_accuracy"],
    )
    assert (record["step"], record["weights"], record["data_of_the_run"]) == (step, "ema", True)
    assert record["perplexity"] == pytest.approx(np.exp(record["loss"]))
    assert record["bits_per_byte"] == pytest.approx(record["loss"] / np.log(2))
    assert (record["examples"], record["targets"]) == (100, 1600)
    assert f"{record['loss']:.4f} nats" in out
    assert "moving average" in out


def test_the_newest_step_is_meant_and_a_step_may_be_named_by_its_folder() -> None:
    newest, _ = evaluated("lm")
    named, _ = evaluated("lm/checkpoints/4")
    assert newest["step"] == named["step"] == 4
    assert newest["loss"] == named["loss"]


def test_the_parameters_themselves_have_other_numbers() -> None:
    record, out = evaluated("lm", "--no-ema", "--mesh.data", "4", "--mesh.fsdp", "2")
    assert record["weights"] == "params"
    assert abs(record["loss"] - rows("lm")[4]["eval_loss"]) > 1e-4
    assert "moving average" not in out


def test_images_are_evaluated_too() -> None:
    assets = json.loads(Path("vit/assets/assets.json").read_text())
    assert assets["class_names"] == [str(digit) for digit in range(10)]
    assert assets["pixels"]["fit"] == "squash"
    record, _ = evaluated("vit")
    assert (record["loss"], record["accuracy"]) == (
        rows("vit")[2]["eval_loss"],
        rows("vit")[2]["eval_accuracy"],
    )
    assert "bits_per_byte" not in record


def test_other_data_is_named_as_such() -> None:
    record, out = evaluated("lm", "--data.name", "text:other.txt", "--data.eval-examples", "64")
    assert (record["data_of_the_run"], record["examples"]) == (False, 64)
    assert "other data than the run's" in out


def test_bits_per_byte_are_those_of_the_targets_that_count() -> None:
    """The bytes are counted from the files: a document's first token is no target, and its end counts one byte."""
    choose, folder = random.Random(1), Path("documents")
    folder.mkdir()
    for i in range(60):
        text = f"{choose.choice('abc')} " + " ".join(choose.choices(WORDS, k=9))
        (folder / f"{i}.txt").write_text(text)
    words = (
        LM.replace("text:text.txt", "text:documents")
        .replace("--workdir lm", "--workdir masked")
        .split()
    )
    words += [
        "--data.tokenizer",
        "bpe:300",
        "--model.vocab-size",
        "300",
        "--data.document-mask",
        "--log.no-samples",
    ]
    words += ["--data.evaluate", "same=text:documents", "--data.eval-examples", "1000"]
    code, out, err = run(*words)
    assert (code, err) == (0, "")
    library = Library.from_file(str(next(Path("cache/tokenizers").glob("*.json"))))
    texts = [
        path.read_text() for path in sorted(folder.iterdir()) if corpus.side(path.name) == "eval"
    ]
    encoded = [library.encode(text) for text in texts]
    counted = sum(len(one.ids) for one in encoded)
    size = sum(len(text) + 1 - len(one.tokens[0]) for text, one in zip(texts, encoded, strict=True))
    record, table = evaluated("masked")
    bits = record["loss"] * counted / np.log(2) / size
    assert record["targets"] == counted
    assert record["bits_per_byte"] == pytest.approx(bits, rel=1e-9)
    assert record["sets"]["same"]["bits_per_byte"] == pytest.approx(bits, rel=1e-9)
    assert f"{bits:.4f}" in table
    assert f"{record['loss'] * counted / size:.4f}" in out  # the summary has nats per byte
    every = sum(len(text) + 1 for text in texts) / sum(len(one.ids) + 1 for one in encoded)
    over_all = record["loss"] / np.log(2) / every
    assert abs(over_all / bits - 1) > 0.03  # the control: over all tokens it is another number


# Generation


def test_a_text_continues_its_prompt_from_the_command_line_or_stdin() -> None:
    code, out, err = run("generate", "lm", "--prompt", "def ", "--tokens", "40", "--seed", "3")
    assert code == 0
    assert out.startswith("def ")
    assert err.startswith("step 4 of lm, its moving average: 40 tokens in ")
    again = run("generate", "lm", "--prompt", "-", "--tokens", "40", "--seed", "3", stdin="def \n")[
        1
    ]
    assert again == out


def test_several_samples_are_told_apart() -> None:
    words = [
        "generate",
        "lm",
        "--prompt",
        "self",
        "--tokens",
        "12",
        "--temperature",
        "1",
        "--top-k",
        "20",
        "--top-p",
        "0.9",
    ]
    _, one, _ = run(*words)
    code, out, err = run(*words, "--samples", "2")
    assert code == 0
    assert "24 tokens" in err
    first, second = out.split("--- sample ")[1:]
    assert first == f"1\n{one}"
    assert second.startswith("2\nself")
    assert first[2:] != second[2:]


def test_nothing_to_continue_begins_a_document() -> None:
    code, out, err = run(
        "generate", "lm", "--prompt", "", "--tokens", "5", "--step", "2", "--no-ema"
    )
    assert code == 0
    assert 1 < len(out) <= 6
    assert err.startswith("step 2 of lm, its parameters: 5 tokens in ")


# What they refuse


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("eval nothing", "nothing: no run and no weights there"),
        ("eval lm --step 3", "lm has no checkpoint of step 3; there are 2, 4"),
        ("eval lm/checkpoints/2 --step 4", "is step 2, and --step says 4; leave one of them out"),
        ("eval vit --ema", "kept no moving average (ema.decay is None); leave --ema out"),
        (
            "eval lm --optimizer.peak-lr 1",
            "eval does not read --optimizer.peak-lr; it takes --step, --ema, --json",
        ),
        ("eval lm --data.nam x", "no flag is named --data.nam; did you mean --data.name"),
        ("eval lm --data.name text:none.txt", "none.txt"),
        ("eval lm --mesh.data 3", "the mesh needs 3 devices"),
        ("generate nothing --prompt a", "nothing: no run and no weights there"),
        (
            "generate vit --prompt a",
            "vit holds a vit, and generate is for decoders and encoder-decoders",
        ),
        ("generate lm --prompt a --step 9", "lm has no checkpoint of step 9; there are 2, 4"),
        (
            "generate lm --prompt a --top-p 2",
            "top-p is 2.0; write a probability above 0 and up to 1",
        ),
        ("generate lm --prompt a --temperature -1", "temperature is -1.0"),
        (
            "generate lm --prompt a --samples 0",
            "--samples is 0; write a whole number of at least 1",
        ),
    ],
)
def test_bad_input_is_one_clear_message(words: str, message: str) -> None:
    code, _, err = run(*words.split())
    assert code == 2
    assert message in err
    assert len(err.splitlines()) <= 10


def test_a_damaged_checkpoint_is_not_evaluated() -> None:
    shutil.copytree("lm", "broken")
    file = max(
        Path("broken/checkpoints/4").rglob("*"),
        key=lambda path: path.stat().st_size if path.is_file() else 0,
    )
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    code, _, err = run("eval", "broken")
    assert code == 2
    assert "checkpoint 4 of" in err
    assert "is damaged" in err
    assert "give another with --step" in err
    assert evaluated("broken", "--step", "2")[0]["step"] == 2


def test_a_run_without_its_tokenizer_is_refused() -> None:
    shutil.copytree("lm", "moved")
    record = json.loads(Path("moved/config.json").read_text())
    record["data"]["tokenizer"] = "tokenizer-0123456789abcdef"
    Path("moved/config.json").write_text(json.dumps(record))
    for words in (("generate", "moved", "--prompt", "a"), ("eval", "moved")):
        code, _, err = run(*words)
        assert code == 2
        assert "tokenizer-0123456789abcdef" in err
    shutil.rmtree("moved/checkpoints")
    with pytest.raises(ValueError, match="has no checkpoint yet"):
        saved_run.find(Path("moved"))


def test_weights_alone_write_and_are_evaluated_as_their_run() -> None:
    assert main(["export", "lm", "--out", "exported"]) == 0
    assert (
        main(["import", "exported", "--out", "imported", "--preset", "mup", "--base", "lm-proxy"])
        == 0
    )
    flags = ["--prompt", "def ", "--tokens", "8", "--temperature", "0"]
    code, text, _ = run("generate", "lm", "--no-ema", *flags)
    numbers, _ = evaluated("lm", "--no-ema")
    other = [
        "--data.name",
        "text:text.txt",
        "--data.tokenizer",
        "bytes",
        "--data.eval-examples",
        "100",
    ]
    for name in ("exported", "imported"):
        assert (
            run("generate", name, *flags, "--data.tokenizer", "bytes")[:2]
            == (code, text)
            != (0, "def \n")
        )
        record, table = evaluated(name, *other)
        assert record["loss"] == pytest.approx(numbers["loss"], abs=1e-5)
        assert record["step"] is None
        assert table.startswith(f"{name} on text:text.txt\n")
    wrong = {
        "generate exported --prompt a --step 3": "holds weights, and no run with steps",
        "generate lm --prompt a --data.tokenizer bytes": "for weights alone, and the run in lm has its own",
        "eval exported": "holds weights, which have no data of their own; add --data.name text:PATH",
        "eval exported --data.name text:gone.txt": "gone.txt",
        "noise exported": "exported",
    }
    for words, message in wrong.items():
        code, out, err = run(*words.split())
        assert (code, out, message in err) == (2, "", True), err

    tokens = {"<unk>": 0, "<s>": 1, "</s>": 2, "def": 3, "self": 4}
    library = Library(models.WordLevel(tokens, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.add_special_tokens(["<s>", "</s>"])
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    library.save("exported/tokenizer.json")
    opened = Subwords(Path("exported/tokenizer.json"))
    assert (opened.start.tolist(), opened.separator, Bytes().start.tolist()) == ([1], 2, [])
    code, text, _ = run("generate", "exported", "--prompt", "def self", "--tokens", "3")
    assert code == 0
    assert text.startswith("def self")
    library.add_tokens([f"w{i}" for i in range(301)])
    library.save("exported/tokenizer.json")
    code, out, err = run("generate", "exported", "--prompt", "w299", "--tokens", "3")
    assert (code, out) == (2, "")
    assert "the prompt has the token 304, and the model knows those below 256" in err


# From Python


def test_a_model_opened_in_python_writes_what_the_command_writes() -> None:
    model = train.load("lm")
    for words, options in (
        ("--tokens 20 --seed 3", {"tokens": 20, "seed": 3}),
        ("--tokens 20 --temperature 0", {"tokens": 20, "temperature": 0}),
        ("--tokens 20 --top-k 2 --seed 1", {"tokens": 20, "top_k": 2, "seed": 1}),
    ):
        _, out, _ = run("generate", "lm", "--prompt", "def ", *words.split())
        assert out == f"def {model.generate('def ', **options)}\n"
    assert (model.step, model.config.model.sizes()["embed"]) == (4, 16)
    assert "step 4 of lm" in repr(model)
    earlier = train.load(Path("lm/checkpoints/2"), ema=False)
    _, out, _ = run(
        "generate", "lm", "--step", "2", "--no-ema", "--prompt", "def ", "--tokens", "20"
    )
    assert out == f"def {earlier.generate('def ', tokens=20)}\n"
    assert main(["export", "lm", "--out", "python-hf"]) == 0
    weights = train.load("python-hf", tokenizer="bytes")
    assert weights.step is None
    plain = train.load("lm", ema=False)  # an export has the parameters, not their average
    assert weights.generate("def ", tokens=8, temperature=0) == plain.generate(
        "def ", tokens=8, temperature=0
    )


def test_a_model_opened_in_python_classifies_as_the_command_does() -> None:
    paths = [f"{shade}.png" for shade in (0, 200)]
    for path in paths:
        Image.new("L", (8, 8), int(path[:-4])).save(path)
    answers = train.load("vit").predict(paths, top=3)
    _, out, _ = run("predict", "vit", *paths, "--top", "3", "--json")
    for answer, line in zip(answers, out.splitlines(), strict=True):
        expected = json.loads(line)
        assert str(answer.image) == expected["image"]
        assert [(one.name, one.label) for one in answer.classes] == [
            (c["class"], c["label"]) for c in expected["classes"]
        ]
        assert [one.probability for one in answer.classes] == pytest.approx(
            [c["probability"] for c in expected["classes"]]
        )
    (alone,) = train.load("vit").predict(Path(paths[0]))
    assert sum(one.probability for one in alone.classes) == pytest.approx(1)
    assert alone.classes[:3] == answers[0].classes


def test_what_a_model_cannot_do_is_said_by_name() -> None:
    Path("torn.png").write_bytes(b"no image")
    for act, message in (
        (lambda: train.load("nowhere"), "nowhere"),
        (lambda: train.load("lm", step=3), "step 3"),
        (lambda: train.load("lm", tokenizer="bytes"), "tokenizer"),
        (lambda: train.load("lm").predict("torn.png"), "generate"),
        (lambda: train.load("vit").generate("def "), "predict"),
        (lambda: train.load("vit").predict("none.png"), "none.png"),
        (lambda: train.load("vit").predict("torn.png"), "torn.png"),
        (lambda: train.load("lm").generate("def ", tokens=-1), "tokens"),
        (lambda: train.load("lm").generate("def ", temperature=-1), "temperature"),
    ):
        with pytest.raises(MupaxError, match=message):
            act()


def test_fit_returns_the_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = LM.replace("--workdir lm", "--workdir fitted").split()
    config = cli.parse("lm-tiny", train.RECIPES["lm-tiny"], words[2:]).config
    done = train.fit(config)
    assert (done.workdir, done.step, done.config) == (Path("fitted"), 4, config)
    assert done.metrics == metrics.read("fitted/metrics.jsonl")
    assert done.evaluation == rows("fitted")[4]
    assert done.evaluation["eval_loss"] == rows("lm")[4]["eval_loss"]
    assert train.load(done).generate("def ", tokens=8) == train.load("lm").generate(
        "def ", tokens=8
    )
    with pytest.raises(MupaxError, match="fitted"):
        train.fit(config)  # the folder is taken
    capsys.readouterr()
    for code, error in ((1, train.TrainingFailed), (130, KeyboardInterrupt), (143, SystemExit)):
        monkeypatch.setattr("mupax.train.run.loop.run", lambda config, hooks, code=code: code)
        with pytest.raises(error):
            train.fit(config)
