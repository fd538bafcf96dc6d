"""Documents in one window that do not see one another: logits, targets, and bytes per token."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from mupax.train import data
from mupax.train.config.data import DataConfig
from mupax.train.config.run import Config, MeshConfig
from mupax.train.core.program import Program, assemble
from mupax.train.core.step import batch_sums
from mupax.train.data.records import corpus
from mupax.train.data.text.named_tokenizers import train_bpe
from mupax.zoo.configs import ComputeConfig, ConfigError, DecoderConfig
from tests.fixtures.commands import output_line, refusal
from tests.fixtures.devices import one_device
from tests.fixtures.small_runs import rows
from tests.fixtures.tiny import random_params
from tests.train.data import loading
from tests.train.data.writing import write, write_rows, write_texts

__all__ = ["one_device"]  # a fixture

T = 80
SEPARATOR = 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty short documents, of which any window has several."""
    draw = np.random.default_rng(3)
    texts = []
    for _ in range(60):
        letters = draw.integers(97, 123, draw.integers(20, 50))
        texts.append(bytes(letters.tolist()).decode())
    folder = tmp_path_factory.mktemp("documents")
    write_texts(folder / "records.jsonl", texts)
    return folder


def config_of(
    folder: Path,
    *,
    positions: Any = "rotary",
    mesh: MeshConfig | None = None,
    attention: Any = "auto",
    **fields: Any,
) -> Config:
    """Return a run on the bytes of a folder, in tiles of queries where one device attends."""
    compute = ComputeConfig(attention=attention)
    model = DecoderConfig(
        width=16, depth=1, num_heads=2, vocab_size=256, seq_len=T, positions=positions,
        compute=compute,
    )  # fmt: skip
    source = DataConfig(name=f"records:{folder}", batch_size=8, **fields)
    return Config(recipe="documents", model=model, data=source, mesh=mesh or MeshConfig(), steps=1)


def load(config: Config) -> Any:
    return data.load(config.data, config.model, seed=0)


program_of = functools.cache(assemble)


def params_of(program: Program) -> Any:
    """Return random parameters, which are those of all meshes, on the mesh of a run."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, program.abstract.params)
    return jax.device_put(random_params(program), shardings)


@functools.cache
def compiled_model(config: Config) -> Any:
    """Return a run's model at its start, on the mesh of the run."""
    program: Program = program_of(config)
    factors = program.inputs.factors
    params = params_of(program)

    def run(inputs: Any, packing: Any) -> jax.Array:
        network = program.definition.model(
            params, factors.multiplier, factors.forward, layout=program.layout
        )
        return network(inputs, **packing)

    return jax.jit(run)


def logits(config: Config, batch: dict[str, np.ndarray]) -> np.ndarray:
    packing = {name: batch[name] for name in ("segments", "positions") if name in batch}
    return np.asarray(compiled_model(config)(batch["inputs"], packing))


@pytest.mark.parametrize(
    ("positions", "mesh", "attention"),
    [
        ("rotary", MeshConfig(), "auto"),
        ("learned", MeshConfig(), "auto"),
        ("rotary", MeshConfig(data=2, sequence=2, tensor=2), "auto"),
        ("rotary", MeshConfig(data=2, sequence=4), "ring"),
        ("learned", MeshConfig(data=4, sequence=2), "ring"),
    ],
    ids=["tiles", "learned positions", "split positions", "ring", "ring of learned positions"],
)
def test_a_document_has_the_logits_that_it_has_alone(
    folder: Path, positions: str, mesh: MeshConfig, attention: str
) -> None:
    plain = config_of(folder, positions=positions)
    config = config_of(
        folder,
        positions=positions,
        mesh=mesh,
        attention=attention,
        document_mask=True,
        reset_positions=positions == "learned",
    )
    batch = load(config).train_batch(0)
    # The second document of a row, and a window that begins with it.
    place = np.flatnonzero(batch["segments"][0] == 1)
    window = np.full_like(batch["inputs"], 65)
    window[0, : len(place)] = batch["inputs"][0, place]
    assert batch["inputs"][0, place[0] - 1] == SEPARATOR == batch["inputs"][0, place[-1]]
    expected = logits(plain, {"inputs": window})[0, : len(place)]
    np.testing.assert_allclose(logits(config, batch)[0, place], expected, atol=2e-6)
    # The control: without the option the first document is seen.
    together = logits(plain, {"inputs": batch["inputs"]})[0, place]
    assert np.abs(together - expected).max() > 1e-3
    if positions == "learned":  # nor are the positions the same
        del batch["positions"]
        assert np.abs(logits(config, batch)[0, place] - expected).max() > 1e-3


def test_the_first_token_of_a_document_is_no_target(folder: Path) -> None:
    config = config_of(folder, document_mask=True)
    text = load(config)
    batch = text.train_batch(0)
    plain = load(config_of(folder)).train_batch(0)
    assert plain.keys() == {"inputs", "targets", "weights"}
    np.testing.assert_array_equal(batch["inputs"], plain["inputs"])
    np.testing.assert_array_equal(batch["weights"] == 0, batch["inputs"] == SEPARATOR)
    # The model learns that a document ends.
    assert batch["weights"][batch["targets"] == SEPARATOR].min() == 1
    assert (np.diff(batch["segments"], axis=1) == (batch["inputs"][:, :-1] == SEPARATOR)).all()
    # The step's own loss counts so: weights moved to those targets change it.
    program = program_of(config)
    params = params_of(program)
    loss = jax.jit(lambda batch: batch_sums(program.definition, params, program.inputs, batch))
    assert float(loss(batch).weight) == batch["weights"].sum() < batch["weights"].size
    counted = sum(batch["weights"].sum() for batch in text.eval_batches())
    assert counted == text.eval_targets().sum() < text.facts["eval_tokens"] - 1


def test_a_mixture_keeps_its_documents_apart(folder: Path) -> None:
    name = f"records:{folder}"
    mix = (f"a={name}:1", f"b={name}:3")
    source = loading.load("mix", config_of(folder).model, mix=mix, document_mask=True)
    for batch in (source.train_batch(0), source.eval_batch(0)):
        assert (batch["weights"][batch["inputs"] == SEPARATOR] == 0).all()
        assert batch["segments"].max() > 0


# Bytes per token

WORDS = ("naïve", "déjà", "日本", "the", "cat", "sat", "mat", "internationalization", "a")
TEMPLATE = (
    "{% for m in messages %}<{{ m.content }}>{% endfor %}{% if add_generation_prompt %}<{% endif %}"
)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Texts of words whose tokens stand for one to many bytes."""
    draw = random.Random(3)
    return [" ".join(["a", *draw.choices(WORDS, k=draw.randint(3, 12))]) for _ in range(200)]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Path:
    """Records of the texts, a tokenizer of them, and conversations."""
    folder = tmp_path_factory.mktemp("words")
    write_texts(folder / "records/a.jsonl", texts)
    write_texts(folder / "more.jsonl", texts[:80])
    train_bpe([text.encode() for text in texts], 300).save(str(folder / "tokenizer.json"))
    write(folder / "chat_template.jinja", TEMPLATE)
    talks = []
    for question, answer in itertools.pairwise(texts):
        user = {"role": "user", "content": question}
        talks.append({"messages": [user, {"role": "assistant", "content": answer}]})
    write_rows(folder / "talks.jsonl", talks)
    return folder


def load_words(folder: Path, name: str = "records:{}/records", **fields: Any) -> Any:
    fields = {"batch_size": 4, "tokenizer": str(folder / "tokenizer.json"), **fields}
    return loading.load(name.format(folder), vocab_size=300, seq_len=24, **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"document_mask": True},
        {"document_mask": True, "eval_examples": 3},
        {"eval_examples": 5, "eval_batch_size": 7},
    ],
)
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("records:{}/records", {}),
        ("records:{}/records", {"stream": True}),
        ("mix", {"mix": ("a=records:{}/records:1", "b=text:{}/more.jsonl:2"), "field": "text"}),
        ("chat:{}/talks.jsonl", {}),
    ],
    ids=["records", "stream", "mixture", "chat"],
)
def test_bytes_are_those_of_the_targets_that_count(
    words: Path, name: str, more: dict[str, Any], fields: dict[str, Any]
) -> None:
    fields = {**fields, **more}
    if name == "mix":
        fields["mix"] = tuple(part.format(words) for part in more["mix"])
    source = load_words(words, name, **fields)
    tokens = [batch["targets"][batch["weights"] > 0] for batch in source.eval_batches()]
    counted = np.concatenate(tokens)
    size = 0
    for token in counted.tolist():
        # A byte-level token has a character for each of its bytes.
        is_separator = token == source.tokenizer.separator
        size += 1 if is_separator else len(source.tokenizer._library.id_to_token(token))
    assert len(counted)
    assert source.bytes_per_token == pytest.approx(size / len(counted), rel=1e-12)


def bytes_per_token(source: Any, texts: list[str]) -> float:
    """Return bytes per token of held-out texts, without the first token of each."""
    size = 0
    count = 0
    for text in texts:
        if corpus.side(text.encode()) == "eval":
            encoding = source.tokenizer._library.encode(text, add_special_tokens=False)
            first = encoding.tokens[0].strip("\u2581")
            size += len(text.encode()) + 1 - len(first)
            count += len(encoding.ids)  # the separator is counted in place of the first
    return size / count


def test_the_bytes_of_masked_documents_are_those_of_their_texts(
    words: Path, texts: list[str]
) -> None:
    source = load_words(words, document_mask=True)
    assert source.bytes_per_token == pytest.approx(bytes_per_token(source, texts), rel=1e-12)
    every = source.facts["eval_bytes"] / source.facts["eval_tokens"]
    # The control: over all tokens it is another number.
    assert abs(source.bytes_per_token / every - 1) > 0.01


def save_words(path: Path, names: list[str]) -> dict[str, Any]:
    """Save a vocabulary like Llama 2's: words begin with U+2581. Return the field that names it.

    The mark stands for no byte where a document begins.
    """
    special = ["<unk>", "<s>", "</s>"]
    vocab = {name: i for i, name in enumerate([*special, *(f"\u2581{name}" for name in names)])}
    library = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    prepend = normalizers.Prepend("\u2581")
    library.normalizer = normalizers.Sequence([prepend, normalizers.Replace(" ", "\u2581")])
    library.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    library.add_special_tokens(special)
    library.save(str(path))
    return {"tokenizer": str(path)}


def test_bytes_of_a_vocabulary_that_does_not_spell_its_text_add_up_to_those_of_the_text(
    words: Path, texts: list[str], tmp_path: Path
) -> None:
    tokenizer = save_words(tmp_path / "spelled.json", [*WORDS])
    source = load_words(words, document_mask=True, **tokenizer)
    assert source.bytes_per_token == pytest.approx(bytes_per_token(source, texts), rel=1e-12)
    some = [word for word in WORDS if word not in ("cat", "a")]
    unknown = load_words(words, **save_words(tmp_path / "unknown.json", some))
    every = unknown.facts["eval_bytes"] / unknown.facts["eval_tokens"]
    assert unknown.bytes_per_token == pytest.approx(every, rel=0.01)


@pytest.mark.core
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("lm-tiny --data.name records:{} --data.reset-positions", "add --data.document-mask"),
        (
            "lm-tiny --data.name records:{} --data.document-mask --data.reset-positions "
            "--model.positions rotary",
            "rotary, which only depend on distances",
        ),
        ("ed-tiny --data.document-mask", "data.document_mask is for a decoder"),
    ],
)
def test_a_run_without_documents_is_refused(folder: Path, words: str, message: str) -> None:
    assert message in refusal("train", words.format(folder))


@pytest.mark.core
def test_a_window_is_refused_where_keys_go_round(folder: Path) -> None:
    mesh = MeshConfig(data=4, sequence=2)
    config = config_of(folder, mesh=mesh, attention="ring", document_mask=True)
    windowed = dataclasses.replace(config, model=dataclasses.replace(config.model, window=32))
    message = r"ring: parts of keys go round whole, and model\.window 32"
    with pytest.raises(ConfigError, match=message):
        logits(windowed, load(config).train_batch(0))


RUN = (
    "train lm-tiny --data.name records:{}/records.jsonl --model.width 16 --model.depth 1 "
    "--model.num-heads 2 --model.no-bias --model.no-norm-gain --model.activation relu "
    "--model.seq-len 80 --data.batch-size 8 --data.eval-examples 8 --steps 3 "
    "--log.no-tensorboard --log.no-samples --optimizer.peak-lr 0.03 --workdir {}"
)
RING = "--mesh.data 4 --mesh.sequence 2 --model.compute.attention ring"
MASK = "--data.document-mask"


def test_a_run_whose_keys_go_round_has_the_losses_of_one_that_splits_examples(
    folder: Path, tmp_path: Path
) -> None:
    def losses(flags: str) -> list[float]:
        workdir = tmp_path / str(len(flags))
        output_line(RUN.format(folder, workdir), flags)
        return [row[key] for row in rows(workdir) for key in ("loss", "eval_loss") if key in row]

    plain = losses(f"{MASK} --mesh.data 8")
    assert len(plain) > 3
    np.testing.assert_allclose(losses(f"{MASK} {RING}"), plain, rtol=2e-6)
    # The control: documents that see one another. Without a mesh it compiles sooner.
    unmasked = losses("")
    assert min(abs(a - b) for a, b in zip(unmasked, plain, strict=True)) > 1e-4
