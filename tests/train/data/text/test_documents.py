"""Documents that share a window and do not see one another (data.document_mask): logits, targets, and what is refused."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import random
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tokenizers
import tokenizers.models
import tokenizers.normalizers
import tokenizers.pre_tokenizers

from mupax.__main__ import main
from mupax.train import data
from mupax.train.config.data import DataConfig
from mupax.train.config.run import Config, MeshConfig
from mupax.train.core.program import assemble
from mupax.train.core.step import batch_sums
from mupax.train.data import Data
from mupax.train.data.records import corpus
from mupax.train.data.text.mixture import Mixture
from mupax.train.data.text.named_tokenizers import train_bpe
from mupax.zoo.configs import ComputeConfig, ConfigError, DecoderConfig
from tests.fixtures.command_line import Capture, refused

T, SEPARATOR = 80, 0


def config_of(
    folder: Path,
    *,
    positions: Any = "rotary",
    mesh: MeshConfig | None = None,
    attention: Any = "auto",
    **fields: Any,
) -> Config:
    """A run on the bytes of a folder, in tiles of queries where one device attends."""
    model = DecoderConfig(
        width=16, depth=1, num_heads=2, vocab_size=256, seq_len=T, positions=positions,
        compute=ComputeConfig(attention=attention),
    )  # fmt: skip
    read = DataConfig(name=f"records:{folder}", batch_size=8, **fields)
    return Config(recipe="documents", model=model, data=read, mesh=mesh or MeshConfig(), steps=1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Sixty short documents, of which any window has several."""
    draw = np.random.default_rng(3)
    texts = (
        bytes(draw.integers(97, 123, draw.integers(20, 50)).tolist()).decode() for _ in range(60)
    )
    (tmp_path / "records.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )
    return tmp_path


def batch_of(config: Config) -> dict[str, np.ndarray]:
    return data.load(config.data, config.model, seed=0, note=lambda line: None).train_batch(0)


@functools.cache
def model(config: Config) -> Any:
    """A run's model at its start, on the mesh of the run."""
    program = assemble(config)
    params, factors = program.initial_state().params, program.inputs.factors

    def run(inputs: Any, packing: Any) -> jax.Array:
        network = program.definition.model(
            params, factors.multiplier, factors.forward, layout=program.layout
        )
        return network(inputs, **packing)

    return jax.jit(run)


def logits(config: Config, batch: dict[str, np.ndarray]) -> np.ndarray:
    packing = {name: batch[name] for name in ("segments", "positions") if name in batch}
    return np.asarray(model(config)(batch["inputs"], packing))


def alone(batch: dict[str, np.ndarray], row: int) -> tuple[np.ndarray, np.ndarray]:
    """The second document of a row at the start of a window of its own, and where it stood."""
    place = np.flatnonzero(batch["segments"][row] == 1)
    window = np.full_like(batch["inputs"], 65)
    window[0, : len(place)] = batch["inputs"][row, place]
    return window, place


@pytest.mark.parametrize(
    ("positions", "fields", "mesh", "attention"),
    [
        ("rotary", {}, MeshConfig(), "auto"),
        ("learned", {"reset_positions": True}, MeshConfig(), "auto"),
        ("rotary", {}, MeshConfig(data=2, sequence=2, tensor=2), "auto"),
        ("rotary", {}, MeshConfig(data=2, sequence=4), "ring"),
        ("learned", {"reset_positions": True}, MeshConfig(data=4, sequence=2), "ring"),
    ],
    ids=["tiles", "learned positions", "split positions", "ring", "ring of learned positions"],
)
def test_a_document_has_the_logits_that_it_has_alone(
    folder: Path, positions: str, fields: dict[str, Any], mesh: MeshConfig, attention: str
) -> None:
    config = config_of(
        folder, positions=positions, mesh=mesh, attention=attention, document_mask=True, **fields
    )
    batch = batch_of(config)
    window, place = alone(batch, 0)
    assert batch["inputs"][0, place[0] - 1] == SEPARATOR == batch["inputs"][0, place[-1]]
    plain = config_of(folder, positions=positions, mesh=mesh)
    expected = logits(plain, {"inputs": window})[0, : len(place)]
    actual = logits(config, batch)[0, place]
    np.testing.assert_allclose(actual, expected, atol=2e-6)
    together = logits(plain, {"inputs": batch["inputs"]})[0, place]
    assert (
        np.abs(together - expected).max() > 1e-3
    )  # the control: without the option the first document is seen
    if fields:
        without_positions = {name: array for name, array in batch.items() if name != "positions"}
        assert (
            np.abs(logits(config, without_positions)[0, place] - expected).max() > 1e-3
        )  # nor are the positions the same


def test_the_first_token_of_a_document_is_no_target(folder: Path) -> None:
    with_mask, without = (config_of(folder, document_mask=mask) for mask in (True, False))
    batch, plain = batch_of(with_mask), batch_of(without)
    assert plain.keys() == {"inputs", "targets", "weights"}
    np.testing.assert_array_equal(batch["inputs"], plain["inputs"])
    np.testing.assert_array_equal(batch["weights"] == 0, batch["inputs"] == SEPARATOR)
    assert (
        batch["weights"][batch["targets"] == SEPARATOR].min() == 1
    )  # that a document ends is learned
    assert (np.diff(batch["segments"], axis=1) == (batch["inputs"][:, :-1] == SEPARATOR)).all()
    # The step's own loss counts so: weights moved to those targets change it.
    program = assemble(with_mask)
    params = program.initial_state().params
    sums = jax.jit(lambda batch: batch_sums(program.definition, params, program.inputs, batch))(
        batch
    )
    assert float(sums.weight) == batch["weights"].sum() < batch["weights"].size

    text = data.load(with_mask.data, with_mask.model, seed=0, note=lambda line: None)
    counted = sum(batch["weights"].sum() for batch in text.eval_batches())
    assert counted == text.eval_targets().sum() < text.facts["eval_tokens"] - 1  # pyright: ignore


def test_a_mixture_keeps_its_documents_apart(folder: Path) -> None:
    name = f"records:{folder}"
    config = config_of(folder, document_mask=True)
    mixed = dataclasses.replace(config.data, name="mix", mix=(f"a={name}:1", f"b={name}:3"))
    source = data.load(mixed, config.model, seed=0, note=lambda line: None)
    assert isinstance(source, Mixture)
    for batch in (source.train_batch(0), source.eval_batch(0)):
        assert (batch["weights"][batch["inputs"] == SEPARATOR] == 0).all()
        assert batch["segments"].max() > 0


WORDS = ("naïve", "déjà", "日本", "the", "cat", "sat", "mat", "internationalization", "a")


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records of words whose tokens stand for one to many bytes, a tokenizer of them, and conversations."""
    tmp_path = tmp_path_factory.mktemp("words")
    draw = random.Random(3)
    texts = [" ".join(["a", *draw.choices(WORDS, k=draw.randint(3, 12))]) for _ in range(200)]
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "a.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )
    train_bpe([text.encode() for text in texts], 300).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.content }}>{% endfor %}{% if add_generation_prompt %}<{% endif %}"
    )
    talks = [
        [{"role": "user", "content": a}, {"role": "assistant", "content": b}]
        for a, b in itertools.pairwise(texts)
    ]
    (tmp_path / "talks.jsonl").write_text(
        "".join(json.dumps({"messages": talk}) + "\n" for talk in talks)
    )
    return tmp_path


def loaded(folder: Path, name: str, **fields: Any) -> Data:
    fields = {"batch_size": 4, "tokenizer": str(folder / "tokenizer.json"), **fields}
    model = DecoderConfig(width=4, depth=1, num_heads=1, vocab_size=300, seq_len=24)
    return data.load(DataConfig(name=name, **fields), model, seed=0, note=lambda line: None)


def counted_bytes(source: Data) -> tuple[int, int]:
    """Targets that count, and the bytes that they stand for: a byte-level token has a character for each of its bytes."""
    counted, size = 0, 0
    for batch in source.eval_batches():
        for token in batch["targets"][batch["weights"] > 0].tolist():
            counted += 1
            size += (
                1
                if token == source.tokenizer.separator
                else len(source.tokenizer._library.id_to_token(token))
            )
    return counted, size


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"document_mask": True},
        {"document_mask": True, "eval_examples": 3},
        {"eval_examples": 5, "eval_batch_size": 7},
    ],
)
@pytest.mark.parametrize("kind", ["records", "stream", "mixture", "chat"])
def test_bytes_are_those_of_the_targets_that_count(
    words: Path, kind: str, fields: dict[str, Any]
) -> None:
    name = f"records:{words / 'records'}"
    if kind == "stream":
        fields = {**fields, "stream": True}
    if kind == "mixture":
        fields = {**fields, "mix": (f"a={name}:1", f"b=text:{words / 'more.jsonl'}:2")}
        fields |= {"field": "text"}
        (words / "more.jsonl").write_text(
            (words / "records" / "a.jsonl").read_text()[:9000].rpartition("\n")[0]
        )
        name = "mix"
    if kind == "chat":
        name = f"chat:{words / 'talks.jsonl'}"
    source = loaded(words, name, **fields)
    counted, size = counted_bytes(source)
    assert counted
    assert source.bytes_per_token == pytest.approx(size / counted, rel=1e-12)


def test_the_bytes_of_masked_documents_are_those_of_their_texts(words: Path) -> None:
    source = loaded(words, f"records:{words / 'records'}", document_mask=True)
    rows = [
        json.loads(line)["text"]
        for line in (words / "records" / "a.jsonl").read_text().splitlines()
    ]
    held_out = [text for text in rows if corpus.side(text.encode()) == "eval"]
    library = source.tokenizer._library
    encoded = [library.encode(text, add_special_tokens=False) for text in held_out]
    size = sum(
        len(text.encode()) + 1 - len(one.tokens[0])
        for text, one in zip(held_out, encoded, strict=True)
    )
    counted = sum(len(one.ids) for one in encoded)  # all but the first, and the separator
    assert source.bytes_per_token == pytest.approx(size / counted, rel=1e-12)
    every = source.facts["eval_bytes"] / source.facts["eval_tokens"]
    assert (
        abs(source.bytes_per_token / every - 1) > 0.01
    )  # the control: over all tokens it is another number


def test_bytes_of_a_vocabulary_that_does_not_spell_its_text_add_up_to_those_of_the_text(
    words: Path,
) -> None:
    """Of Llama 2's kind: words begin with U+2581, which stands for no byte where a document begins."""
    vocab = {
        name: i
        for i, name in enumerate(("<unk>", "<s>", "</s>", *(f"\u2581{word}" for word in WORDS)))
    }
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    prepend = tokenizers.normalizers.Prepend("\u2581")
    library.normalizer = tokenizers.normalizers.Sequence(
        [prepend, tokenizers.normalizers.Replace(" ", "\u2581")]
    )
    library.pre_tokenizer = tokenizers.pre_tokenizers.Split("\u2581", "merged_with_next")
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    library.save(str(words / "other.json"))
    other: dict[str, Any] = {"tokenizer": str(words / "other.json")}
    source = loaded(words, f"records:{words / 'records'}", document_mask=True, **other)
    rows = [
        json.loads(line)["text"]
        for line in (words / "records" / "a.jsonl").read_text().splitlines()
    ]
    held_out = [text for text in rows if corpus.side(text.encode()) == "eval"]
    size = sum(len(text.encode()) + 1 - len(text.split()[0].encode()) for text in held_out)
    assert source.bytes_per_token == pytest.approx(
        size / sum(len(text.split()) for text in held_out), rel=1e-12
    )
    del vocab["\u2581cat"], vocab["\u2581a"]
    library.model = tokenizers.models.WordLevel(
        {name: i for i, name in enumerate(vocab)}, unk_token="<unk>"
    )
    library.save(str(words / "other.json"))
    unknown = loaded(words, f"records:{words / 'records'}", **other)
    every = unknown.facts["eval_bytes"] / unknown.facts["eval_tokens"]
    assert unknown.bytes_per_token == pytest.approx(every, rel=0.01)


@pytest.mark.core
def test_what_has_no_documents_is_refused(folder: Path, capsys: Capture) -> None:
    name = ["--data.name", f"records:{folder}"]
    for argv, message in {
        ("lm-tiny", *name, "--data.reset-positions"): "add --data.document-mask",
        (
            "lm-tiny",
            *name,
            "--data.document-mask",
            "--data.reset-positions",
            "--model.positions",
            "rotary",
        ): "rotary, which tell",
        ("ed-tiny", "--data.document-mask"): "data.document_mask is for a decoder",
    }.items():
        assert message in refused(capsys, "train", *argv)
    config = config_of(
        folder, mesh=MeshConfig(data=4, sequence=2), attention="ring", document_mask=True
    )
    windowed = dataclasses.replace(config, model=dataclasses.replace(config.model, window=32))
    with pytest.raises(
        ConfigError, match=r"ring: parts of keys go round whole, and model\.window 32"
    ):
        logits(windowed, batch_of(config))


def test_a_run_whose_keys_go_round_has_the_losses_of_one_that_splits_examples(folder: Path) -> None:
    small = "--model.width 16 --model.depth 1 --model.num-heads 2 --data.batch-size 8 --data.eval-examples 8"
    shape = f"{small} --model.seq-len {T} --steps 3 --log.no-tensorboard --log.no-samples --optimizer.peak-lr 0.03"
    ring = ("--mesh.data", "4", "--mesh.sequence", "2", "--model.compute.attention", "ring")

    def losses(name: str, *flags: str) -> list[float]:
        argv = ["lm-tiny", "--data.name", f"records:{folder}/records.jsonl", *shape.split()]
        assert main(["train", *argv, *flags, "--workdir", str(folder / name)]) == 0
        rows = map(json.loads, (folder / name / "metrics.jsonl").read_text().splitlines())
        return [row[key] for row in rows for key in ("loss", "eval_loss") if key in row]

    plain, split = (
        losses("plain", "--data.document-mask"),
        losses("ring", "--data.document-mask", *ring),
    )
    assert len(plain) > 3
    np.testing.assert_allclose(split, plain, rtol=2e-6)
    whole = losses("whole", *ring)  # the control: documents that see one another
    assert min(abs(a - b) for a, b in zip(whole, plain, strict=True)) > 1e-4
