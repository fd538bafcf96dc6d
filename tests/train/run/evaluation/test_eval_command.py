"""`mupax eval` and `generate` on real runs: the run's own numbers, other data, and refusals."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers, processors

from mupax import MupaxError, train
from mupax.train.checkpoints import saved_run
from mupax.train.config import cli
from mupax.train.data.records import corpus
from mupax.train.data.text.tokenizer import Bytes, Subwords
from mupax.train.run.report import metrics
from tests.fixtures.commands import Done, command, last_of_each_flag, refusal
from tests.fixtures.devices import one_device
from tests.fixtures.generators import shared_generators
from tests.fixtures.programs import shared_programs
from tests.fixtures.small_runs import (
    RUN,
    VOCABULARY,
    evaluations,
    record_of,
    working_folder,
    write_text,
)

__all__ = ["one_device", "shared_generators", "shared_programs"]  # fixtures

LM = last_of_each_flag(
    f"{RUN} --data.eval-examples 100 --steps 4 --log.eval-every-steps 2 --log.no-tensorboard "
    "--ema.decay 0.5"
)
VIT = (
    "vit-digits --model.width 16 --model.depth 1 --model.num-heads 2 --model.no-bias "
    "--data.batch-size 16 "
    "--data.eval-batch-size 512 --optimizer.warmup-steps 1 --steps 2 --log.no-tensorboard "
    "--log.no-samples"
)
SAMPLED = "--prompt 'def ' --tokens 20 --temperature 1 --top-k 20 --top-p 0.9 --seed 3"


def succeeded(*words: str, err: str | None = "", stdin: str = "") -> Done:
    """Run a command that ends well, with nothing on standard error unless `err` is None."""
    done = command(*words, stdin=stdin)
    assert done.code == 0, done.err
    assert err is None or done.err == err
    return done


@pytest.fixture(scope="module", autouse=True)
def folder(
    tmp_path_factory: pytest.TempPathFactory, one_device: None, shared_programs: None
) -> Iterator[Path]:
    """A folder with a run of a language model with an average, one of a ViT, and two texts."""
    with working_folder(tmp_path_factory.mktemp("use")) as path:
        write_text(path / "text.txt")
        write_text(path / "other.txt", seed=1)
        succeeded("train", LM, "--workdir lm")
        succeeded("train", VIT, "--workdir vit")
        yield path


@pytest.fixture(scope="module")
def sampled(folder: Path) -> str:
    """A text that the language model wrote."""
    done = succeeded("generate lm", SAMPLED, err=None)
    assert done.err.startswith("step 4 of lm, its moving average: 20 tokens in ")
    return done.out


def evaluated(*words: str) -> tuple[dict[str, Any], str]:
    """Return what `mupax eval` writes as JSON and what it prints."""
    done = succeeded("eval", *words, "--json found.json")
    return json.loads(Path("found.json").read_text()), done.out


def row_of(workdir: str, step: int) -> dict[str, Any]:
    """Return the evaluation of a run after a step."""
    (row,) = [row for row in evaluations(workdir) if row["step"] == step]
    return row


# Evaluation


@pytest.mark.parametrize(
    ("words", "step"), [("lm --step 2", 2), ("lm", 4), ("lm/checkpoints/4", 4)]
)
def test_the_numbers_are_those_of_the_run_at_that_step_or_the_newest(words: str, step: int) -> None:
    record, out = evaluated(words)
    row = row_of("lm", step)
    assert record["loss"] == row["eval_loss"]
    assert record["accuracy"] == row["eval_accuracy"]
    assert (record["step"], record["weights"], record["data_of_the_run"]) == (step, "ema", True)
    assert record["perplexity"] == pytest.approx(np.exp(record["loss"]))
    assert record["bits_per_byte"] == pytest.approx(record["loss"] / np.log(2))
    assert (record["examples"], record["targets"]) == (100, 1600)
    assert f"{record['loss']:.4f} nats" in out
    assert "moving average" in out


def test_the_parameters_themselves_have_other_numbers() -> None:
    record, out = evaluated("lm --no-ema --mesh.data 4 --mesh.fsdp 2")
    assert record["weights"] == "params"
    assert abs(record["loss"] - row_of("lm", 4)["eval_loss"]) > 1e-4
    assert "moving average" not in out


def test_images_are_evaluated_too() -> None:
    assets = json.loads(Path("vit/assets/assets.json").read_text())
    assert assets["class_names"] == [str(digit) for digit in range(10)]
    assert assets["pixels"]["fit"] == "squash"
    record, _ = evaluated("vit")
    assert record["loss"] == row_of("vit", 2)["eval_loss"]
    assert record["accuracy"] == row_of("vit", 2)["eval_accuracy"]
    assert "bits_per_byte" not in record


def test_other_data_is_named_as_such() -> None:
    record, out = evaluated("lm --data.name text:other.txt --data.eval-examples 64")
    assert (record["data_of_the_run"], record["examples"]) == (False, 64)
    assert "other data than the run's" in out


def test_bits_per_byte_are_those_of_the_targets_that_count(folder: Path) -> None:
    """The bytes are counted from the files: a document's first token is no target, its end a byte."""
    choose = random.Random(1)
    (folder / "documents").mkdir()
    for index in range(60):
        text = f"{choose.choice('abc')} " + " ".join(choose.choices(VOCABULARY, k=9))
        (folder / "documents" / f"{index}.txt").write_text(text)
    tokenizer = "--data.tokenizer bpe:300 --model.vocab-size 300 --data.document-mask"
    data = (
        "--data.name text:documents --data.evaluate same=text:documents --data.eval-examples 1000"
    )
    short = "--steps 2 --optimizer.warmup-steps 1 --workdir masked"
    out = succeeded("train", last_of_each_flag(LM, tokenizer, data, short)).out
    library = Library.from_file(str(next(Path("cache/tokenizers").glob("*.json"))))
    files = sorted((folder / "documents").iterdir())
    texts = [path.read_text() for path in files if corpus.side(path.name) == "eval"]
    encoded = [library.encode(text) for text in texts]
    counted = sum(len(document.ids) for document in encoded)
    first_tokens = sum(len(document.tokens[0]) for document in encoded)
    all_bytes = sum(len(text) + 1 for text in texts)
    size = all_bytes - first_tokens
    record, table = evaluated("masked")
    bits = record["loss"] * counted / np.log(2) / size
    assert record["targets"] == counted
    assert record["bits_per_byte"] == pytest.approx(bits, rel=1e-9)
    assert record["sets"]["same"]["bits_per_byte"] == pytest.approx(bits, rel=1e-9)
    assert f"{bits:.4f}" in table
    assert f"{record['loss'] * counted / size:.4f}" in out  # the summary has nats per byte
    # The control: over all tokens it is another number.
    bytes_per_token = all_bytes / (counted + len(texts))
    over_all = record["loss"] / np.log(2) / bytes_per_token
    assert abs(over_all / bits - 1) > 0.03


# Generation


def test_a_text_continues_its_prompt_from_the_command_line_or_stdin(sampled: str) -> None:
    assert sampled.startswith("def ")
    words = SAMPLED.replace("'def '", "-")
    assert succeeded("generate lm", words, err=None, stdin="def \n").out == sampled


def test_several_samples_are_told_apart(sampled: str) -> None:
    done = succeeded("generate lm", SAMPLED, "--samples 2", err=None)
    assert "40 tokens" in done.err
    first, second = done.out.split("--- sample ")[1:]
    assert first == f"1\n{sampled}"
    assert second.startswith("2\ndef ")
    assert first[2:] != second[2:]


def test_nothing_to_continue_begins_a_document() -> None:
    done = succeeded("generate lm --prompt '' --tokens 5 --step 2 --no-ema", err=None)
    assert 1 < len(done.out) <= 6
    assert done.err.startswith("step 2 of lm, its parameters: 5 tokens in ")
    model = train.load(Path("lm/checkpoints/2"), ema=False)
    assert done.out == f"{model.generate('', tokens=5)}\n"


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
        ("eval lm --mesh.data 9", "the mesh needs 9 devices"),
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
    assert message in refusal(words)


def test_a_damaged_checkpoint_is_not_evaluated() -> None:
    shutil.copytree("lm", "broken")
    files = [path for path in Path("broken/checkpoints/4").rglob("*") if path.is_file()]
    file = max(files, key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    answer = refusal("eval broken")
    assert "checkpoint 4 of" in answer
    assert "is damaged" in answer
    assert "give another with --step" in answer
    assert evaluated("broken --step 2")[0]["step"] == 2


def test_a_run_without_its_tokenizer_is_refused() -> None:
    shutil.copytree("lm", "moved")
    record = record_of("moved")
    record["data"]["tokenizer"] = "tokenizer-0123456789abcdef"
    Path("moved/config.json").write_text(json.dumps(record))
    for words in ("generate moved --prompt a", "eval moved"):
        assert "tokenizer-0123456789abcdef" in refusal(words)
    shutil.rmtree("moved/checkpoints")
    with pytest.raises(ValueError, match="has no checkpoint yet"):
        saved_run.find(Path("moved"))


# Weights alone


GREEDY = "--prompt 'def ' --tokens 8 --temperature 0"


@pytest.fixture(scope="module")
def exported(folder: Path) -> Path:
    """Weights of the language model without its run."""
    succeeded("export lm --out exported", err=None)
    return Path("exported")


def test_weights_alone_write_and_are_evaluated_as_their_run(exported: Path) -> None:
    imports = "import exported --out imported --preset mup --base lm-proxy"
    succeeded(imports, err=None)
    text = succeeded("generate lm", GREEDY, err=None).out
    assert text != "def \n"
    numbers, _ = evaluated("lm")
    tokenizer = "--data.tokenizer bytes"
    for name in ("exported", "imported"):
        assert succeeded(f"generate {name}", GREEDY, tokenizer, err=None).out == text
        data = f"--data.name text:text.txt {tokenizer} --data.eval-examples 100"
        record, table = evaluated(name, data)
        assert record["loss"] == pytest.approx(numbers["loss"], abs=1e-5)
        assert record["step"] is None
        assert table.startswith(f"{name} on text:text.txt\n")
    weights = train.load(exported, tokenizer="bytes")
    assert weights.step is None
    assert text == f"def {weights.generate('def ', tokens=8, temperature=0)}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("generate exported --prompt a --step 3", "holds weights, and no run with steps"),
        (
            "generate lm --prompt a --data.tokenizer bytes",
            "for weights alone, and the run in lm has its own",
        ),
        (
            "eval exported",
            "holds weights, which have no data of their own; add --data.name text:PATH",
        ),
        ("eval exported --data.name text:gone.txt", "gone.txt"),
        ("noise exported", "exported"),
    ],
)
def test_weights_alone_are_refused_where_a_run_is_needed(
    words: str, message: str, exported: Path
) -> None:
    done = command(words)
    assert done.code == 2
    assert not done.out
    assert message in done.err


def test_weights_take_the_tokenizer_beside_them(exported: Path, tmp_path: Path) -> None:
    weights = shutil.copytree(exported, tmp_path / "weights")
    file = weights / "tokenizer.json"
    tokens = {"<unk>": 0, "<s>": 1, "</s>": 2, "def": 3, "self": 4}
    library = Library(models.WordLevel(tokens, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.add_special_tokens(["<s>", "</s>"])
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    library.save(str(file))
    opened = Subwords(file)
    assert (opened.start.tolist(), opened.separator) == ([1], 2)
    assert Bytes().start.tolist() == []
    text = succeeded(f"generate {weights} --prompt 'def self' --tokens 3", err=None).out
    assert text.startswith("def self")
    library.add_tokens([f"w{index}" for index in range(301)])
    library.save(str(file))
    done = command(f"generate {weights} --prompt w299 --tokens 3")
    assert done.code == 2
    assert not done.out
    assert "the prompt has the token 304, and the model knows those below 256" in done.err


# From Python


def test_a_model_opened_in_python_writes_what_the_command_writes(sampled: str) -> None:
    model = train.load("lm")
    options = {"temperature": 1, "top_k": 20, "top_p": 0.9, "seed": 3}
    assert sampled == f"def {model.generate('def ', tokens=20, **options)}\n"
    greedy = succeeded("generate lm", GREEDY, err=None).out
    assert greedy == f"def {model.generate('def ', tokens=8, temperature=0)}\n"
    assert (model.step, model.config.model.sizes()["embed"]) == (4, 16)
    assert "step 4 of lm" in repr(model)


def test_a_model_opened_in_python_classifies_as_the_command_does() -> None:
    paths = [f"{shade}.png" for shade in (0, 200)]
    for path in paths:
        Image.new("L", (8, 8), int(path[:-4])).save(path)
    model = train.load("vit")
    answers = model.predict(paths, top=3)
    out = succeeded("predict vit", *paths, "--top 3 --json", err=None).out
    for answer, line in zip(answers, out.splitlines(), strict=True):
        expected = json.loads(line)
        assert str(answer.image) == expected["image"]
        for guess, row in zip(answer.classes, expected["classes"], strict=True):
            assert (guess.name, guess.label) == (row["class"], row["label"])
            assert guess.probability == pytest.approx(row["probability"])
    (alone,) = model.predict(Path(paths[0]))
    assert sum(guess.probability for guess in alone.classes) == pytest.approx(1)
    assert alone.classes[:3] == answers[0].classes


def test_what_a_model_cannot_do_is_said_by_name() -> None:
    Path("torn.png").write_bytes(b"no image")
    lm = train.load("lm")
    vit = train.load("vit")
    for act, message in (
        (lambda: train.load("nowhere"), "nowhere"),
        (lambda: train.load("lm", step=3), "step 3"),
        (lambda: train.load("lm", tokenizer="bytes"), "tokenizer"),
        (lambda: lm.predict("torn.png"), "generate"),
        (lambda: vit.generate("def "), "predict"),
        (lambda: vit.predict("none.png"), "none.png"),
        (lambda: vit.predict("torn.png"), "torn.png"),
        (lambda: lm.generate("def ", tokens=-1), "tokens"),
        (lambda: lm.generate("def ", temperature=-1), "temperature"),
    ):
        with pytest.raises(MupaxError, match=message):
            act()


def test_fit_returns_the_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = f"{LM} --workdir fitted".split()
    config = cli.parse("lm-tiny", train.RECIPES["lm-tiny"], words[1:]).config
    done = train.fit(config)
    assert (done.workdir, done.step, done.config) == (Path("fitted"), 4, config)
    assert done.metrics == metrics.read("fitted/metrics.jsonl")
    assert done.evaluation["eval_loss"] == row_of("lm", 4)["eval_loss"]
    assert done.evaluation == row_of("fitted", 4)
    assert "step 4 of fitted" in repr(train.load(done))
    with pytest.raises(MupaxError, match="fitted"):
        train.fit(config)  # the folder is taken
    capsys.readouterr()
    for code, error in ((1, train.TrainingFailed), (130, KeyboardInterrupt), (143, SystemExit)):
        monkeypatch.setattr("mupax.train.run.loop.run", lambda config, hooks, code=code: code)
        with pytest.raises(error):
            train.fit(config)
