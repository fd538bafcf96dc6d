"""Tokenizers that are trained on several sources: shares by weight, chats and their special tokens, and the command that writes one."""

from __future__ import annotations

import collections
import dataclasses
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mupax.train.config.data import DataConfig
from mupax.train.data import DataError
from mupax.train.data.chats.templates import Template
from mupax.train.data.sources import training_texts
from mupax.train.data.text import denoising, named_tokenizers
from mupax.train.data.text.noise import Infilling
from mupax.train.data.text.tokenizer import Subwords
from tests.fixtures.commands import command, output_line, refusal
from tests.train.data import loading
from tests.train.data.loading import TEXT_MODEL, token_ids
from tests.train.data.writing import write, write_rows, write_texts

pytestmark = pytest.mark.core

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOKENS: dict[str, Any] = {"tokenizer": "bpe:330", "chat_template": "chatml.jinja"}


@pytest.fixture(autouse=True)
def folder(work_folder: Path) -> None:
    """Two texts without a common word, of which one is eight times the other, records of the second, and a chat."""
    for name, words, count in (("small", "zebra zigzag", 30), ("large", "monkey mango", 240)):
        for i in range(20):
            write(f"{name}/{i}.txt", f"{words} {i} " * count)
    write_texts("records.jsonl", (f"monkey mango number {i}, " * 4 for i in range(80)), "body")
    rows = []
    for i in range(80):
        question = {"role": "user", "content": f"who? {i}"}
        rows.append({"messages": [question, {"role": "assistant", "content": f"a quokka {i}"}]})
    write_rows("talks.jsonl", rows)
    write("chatml.jinja", CHATML)


def load(*mix: str, name: str = "mix", **fields: Any) -> Any:
    sizes = {"batch_size": 20, "vocab_size": 400, "seq_len": 32}
    return loading.load(name, mix=mix, **{**sizes, **TOKENS, **fields})


def documents(*mix: str) -> list[bytes]:
    config = DataConfig(name="mix", mix=mix, batch_size=1, **TOKENS)
    model = dataclasses.replace(TEXT_MODEL, vocab_size=400)
    return [*training_texts.opened(config, model, print).read()]


def test_parts_of_a_mixture_have_their_shares_of_the_bytes_that_a_tokenizer_is_trained_on() -> None:
    train, _ = token_ids(loading.load("text:large"))
    num_documents = (train == 0).sum()
    every = {path.read_bytes() for path in Path("large").iterdir()}
    for weight in (1, 9):
        read = documents(f"a=text:small:{weight}", "b=text:large:1")
        sizes = collections.Counter({b"zebra": 0})
        for document in read:
            sizes[document[:5]] += len(document)
        share = sizes[b"zebra"] / sum(sizes.values())
        assert share == pytest.approx(weight / (weight + 1), abs=0.02)
        # All of the other text is read, and none of what is for evaluation.
        assert len(set(read) & every) == num_documents
    assert documents("a=text:small:1")[:2] == documents("a=text:small:1")[:2]


def test_a_mixture_trains_its_tokenizer_by_weight() -> None:
    """Of 265 tokens a few are merges: those of the text that weighs more."""
    first, second = (
        load(f"a=text:small:{weight}", f"b=text:large:{10 - weight}", tokenizer="bpe:265")
        for weight in (9, 1)
    )
    pieces = [set(source.tokenizer.pieces()[257:]) for source in (first, second)]
    assert any("z" in piece for piece in pieces[0])
    assert not any("m" in piece for piece in pieces[0])
    assert any("m" in piece for piece in pieces[1])
    assert not any("z" in piece for piece in pieces[1])
    assert first.facts["tokenizer"] != second.facts["tokenizer"]
    again = load("a=text:small:9", "b=text:large:1", tokenizer="bpe:265")
    np.testing.assert_array_equal(again.train_batch(3)["inputs"], first.train_batch(3)["inputs"])


def test_conversations_are_part_of_a_mixture() -> None:
    source = load(
        "code=text:small:1",
        "notes=records:records.jsonl:1",
        "talk=chat:talks.jsonl:2",
        field="body",
    )
    encoder = source.tokenizer
    for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>"):
        (ids,) = encoder.encode([token.encode()])
        assert ids.tolist() == [encoder.find(token)]
    chat = load(name="chat:talks.jsonl", batch_size=1, tokenizer=str(encoder.path))
    batches = [source.train_batch(k) for k in range(100)]
    inputs, targets, weights = (
        np.concatenate([batch[name] for batch in batches])
        for name in ("inputs", "targets", "weights")
    )
    is_chat = (inputs == encoder.find("<|im_start|>")).any(axis=1)
    assert is_chat.mean() == pytest.approx(0.5, abs=0.03)
    assert weights[~is_chat].min() == 1
    answered = encoder._library.decode(
        targets[is_chat][weights[is_chat] > 0].tolist(), skip_special_tokens=False
    )
    assert answered.startswith("a quokka ")
    assert "who" not in answered
    # The windows are those of the chat by itself.
    alone = chat.train_batch(0)
    np.testing.assert_array_equal(inputs[is_chat][0], alone["inputs"][0])
    np.testing.assert_array_equal(weights[is_chat][0], alone["weights"][0])
    for name, array in source.train_batch(7, slice(3, 11)).items():
        np.testing.assert_array_equal(array, batches[7][name][3:11])
    assert source.facts["mix"]["talk"]["digest"] == chat.facts["digest"]
    # Evaluation has the same shares, and bytes are those of its targets.
    counted = [batch["targets"][batch["weights"] > 0] for batch in source.eval_batches()]
    sizes = encoder.token_bytes()
    sizes[encoder.separator] = 1
    ids = np.concatenate(counted)
    assert source.bytes_per_token == pytest.approx(sizes[ids].sum() / len(ids), rel=1e-12)


def test_documents_of_a_mixture_with_conversations_are_kept_apart_as_each_part_keeps_them() -> None:
    source = load(
        "code=text:small:1", "talk=chat:talks.jsonl:1", document_mask=True, reset_positions=True
    )
    batch = source.train_batch(0)
    begins = np.diff(batch["segments"], axis=1) > 0
    assert begins.any()
    assert (batch["positions"][:, 1:][begins] == 0).all()
    config = load("t=chat:talks.jsonl:1").config
    with pytest.raises(DataError, match="is conversations, and noise is put on text"):
        denoising.denoising(config, Infilling(), inputs=32, seed=0)


def test_a_chat_by_itself_trains_a_tokenizer_with_its_special_tokens() -> None:
    source = load(name="chat:talks.jsonl")
    assert source.tokenizer.find("<|im_end|>") == 2
    assert (source.train_batch(0)["targets"] == 2).any()


EACH = "{% for m in messages %}"
TEMPLATES = {
    CHATML: ("<|im_start|>", "<|im_end|>"),
    EACH + "<start_of_turn>{{ m.role }} {{ m.content }}<end_of_turn>{% endfor %}": (
        "<start_of_turn>",
        "<end_of_turn>",
    ),
    EACH
    + "{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}{{ m.content }}</s>{% endif %}{% endfor %}": (
        "[INST]",
        "[/INST]",
        "</s>",
    ),
    "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}{{ bos }}{{ messages[0].content }}": (
        "BEGIN",
    ),
    "{{ messages[0].content }}: {{ messages[1].content }}": (),
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_special_tokens_are_what_a_template_writes_around_messages(template: str) -> None:
    assert Template(template, "x", {"bos": "BEGIN"}).special_tokens == TEMPLATES[template]


# The command


def test_the_command_writes_a_tokenizer_that_a_run_uses() -> None:
    mix = "code=text:small:1 notes=records:records.jsonl:1 talk=chat:talks.jsonl:2"
    flags = "--size 330 --out new/tokenizer.json --chat-template chatml.jinja --field body"
    done = command("data tokenizer", mix, flags)
    assert done.code == 0
    encoder = Subwords(Path("new/tokenizer.json"))
    assert encoder.find("<|endoftext|>") == encoder.separator
    for token in ("<|im_start|>", "<|im_end|>"):
        assert encoder.encode([token.encode()])[0].tolist() == [encoder.find(token)]
    program, *words = shlex.split(done.out.partition("use it with")[2].replace("\\\n", " "))
    assert Path(program).name == "mupax"
    assert words[:2] == ["train", "lm-tiny"]
    assert "330" in words
    tiny = (
        "--steps 2 --optimizer.warmup-steps 1 --model.width 16 --model.depth 1 "
        "--model.num-heads 2 --model.seq-len 32 --dry-run"
    )
    output_line(shlex.join(words), tiny)
    assert not [path for path in Path("new").iterdir() if path.name != "tokenizer.json"]
    # The tokens are those of a run with bpe:SIZE over the same mixture.
    one = load(*mix.split(), field="body")
    other = load(*mix.split(), field="body", tokenizer="new/tokenizer.json")
    np.testing.assert_array_equal(one.train_batch(0)["inputs"], other.train_batch(0)["inputs"])
    assert "new/tokenizer.json" in refusal("data tokenizer", mix, flags)


def test_plain_sources_are_read_once_each() -> None:
    output_line("data tokenizer text:small --size 257 --out bytes.json")
    assert Subwords(Path("bytes.json")).vocab_size == 257
    text = output_line("data tokenizer text:small text:large --size 280 --out t.json")
    pieces = "".join(Subwords(Path("t.json")).pieces()[257:])
    assert "z" in pieces
    assert "m" in pieces
    assert "--data.name text:small --data.tokenizer t.json" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("text:small --out t.json", "--size"),
        ("text:small --size 300", "--out"),
        ("--size 300 --out t.json", "SOURCES"),
        ("text:small --size 12 --out t.json", "--size is 12"),
        ("text:small --size 300 --out small", "--out is small"),
        ("text:small --size 300 --out t.txt", "--out is t.txt"),
        ("text:small --size 300 --out gs://bucket/t.json", "--out is gs://bucket/t.json"),
        ("text:gone --size 300 --out t.json", "no file or folder gone"),
        ("digits --size 300 --out t.json", "'digits' is images"),
        ("a=text:small:1 text:large --size 300 --out t.json", "and text:large has none"),
        (
            "a=text:small --size 300 --out t.json",
            "the source a=text:small is not NAME=SOURCE:WEIGHT",
        ),
        ("a=text:small:0 --size 300 --out t.json", "has weight 0"),
        ("chat:talks.jsonl --size 300 --out t.json", "--chat-template FILE"),
        (
            "text:small --size 300 --out t.json --chat-template chatml.jinja",
            "--chat-template is for a source chat:PATH",
        ),
        (
            "chat:talks.jsonl --size 258 --out t.json --chat-template chatml.jinja",
            "write at least 259",
        ),
        (
            "chat:talks.jsonl --size 300 --out t.json --chat-template gone",
            "no chat template at gone",
        ),
        ("records:records.jsonl --size 300 --out t.json", "write --field body"),
        ("records:gone --size 300 --out t.json", "no file or folder gone; write records:PATH"),
        ("text:latin.txt --size 300 --out t.json", "add --on-broken skip"),
    ],
)
def test_bad_input_of_the_command_is_one_message(words: str, message: str) -> None:
    write("latin.txt", "naïve text\n".encode("latin-1") * 50)
    printed = refusal("data tokenizer", words)
    assert message in printed
    assert "--data." not in printed, "these are flags of a run"
    assert not Path("t.json").exists()


def test_a_folder_that_cannot_be_made_is_refused_before_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(named_tokenizers, "train_bpe", lambda *_: pytest.fail("it trained"))
    write("file", "")
    assert "cannot write" in refusal("data tokenizer text:small --size 300 --out file/t.json")


def test_broken_texts_are_left_out_and_counted() -> None:
    write_texts("odd.jsonl", [*(f"some words {number}" for number in range(50)), None])
    words = "data tokenizer records:odd.jsonl --size 258 --out odd.json"
    assert "add --on-broken skip" in refusal(words)
    text = output_line(words, "--on-broken skip")
    assert "left out, as broken: 1 record: odd.jsonl line 51" in text
