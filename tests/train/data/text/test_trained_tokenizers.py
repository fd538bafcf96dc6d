"""Tokenizers that are trained on several sources: shares by weight, chats and their special tokens, and the command that writes one."""

from __future__ import annotations

import collections
import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mupax.__main__ import main
from mupax.train import data
from mupax.train.config.data import DataConfig
from mupax.train.data.chats.templates import Template
from mupax.train.data.interface import DataError
from mupax.train.data.sources import training_texts
from mupax.train.data.text import denoising
from mupax.train.data.text.mixture import Mixture
from mupax.train.data.text.tokenizer import Subwords
from mupax.zoo.configs import DecoderConfig

pytestmark = pytest.mark.core

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MODEL = DecoderConfig(width=4, depth=1, num_heads=1, vocab_size=400, seq_len=32)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two texts without a common word, of which one is eight times the other, records of the second, and a chat."""
    monkeypatch.setenv("MUPAX_DATA", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    for name, words, count in (("small", "zebra zigzag", 30), ("large", "monkey mango", 240)):
        (tmp_path / name).mkdir()
        for i in range(20):
            (tmp_path / name / f"{i}.txt").write_text(f"{words} {i} " * count)
    rows = ({"body": f"monkey mango number {i}, " * 4} for i in range(80))
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    talks = [
        [
            {"role": "user", "content": f"who? {i}"},
            {"role": "assistant", "content": f"a quokka {i}"},
        ]
        for i in range(80)
    ]
    (tmp_path / "talks.jsonl").write_text(
        "".join(json.dumps({"messages": talk}) + "\n" for talk in talks)
    )
    (tmp_path / "chatml.jinja").write_text(CHATML)
    return tmp_path


def load(*mix: str, **fields: Any) -> Mixture:
    notes: list[str] = []
    fields = {"batch_size": 20, "tokenizer": "bpe:330", "chat_template": "chatml.jinja", **fields}
    source = data.load(DataConfig(name="mix", mix=mix, **fields), MODEL, seed=0, note=notes.append)
    assert isinstance(source, Mixture)
    return source


def documents(*mix: str, **fields: Any) -> list[bytes]:
    config = DataConfig(
        name="mix",
        mix=mix,
        batch_size=1,
        tokenizer="bpe:330",
        chat_template="chatml.jinja",
        **fields,
    )
    return [*training_texts.opened(config, MODEL, lambda line: None).read()]


def test_parts_of_a_mixture_have_their_shares_of_the_bytes_that_a_tokenizer_is_trained_on(
    folder: Path,
) -> None:
    for weight in (1, 9):
        read = documents(f"a=text:small:{weight}", "b=text:large:1")
        sizes = collections.Counter({b"zebra": 0})
        for document in read:
            sizes[document[:5]] += len(document)
        share = sizes[b"zebra"] / sum(sizes.values())
        assert share == pytest.approx(weight / (weight + 1), abs=0.02)
        # All of the other text is read, and none of what is for evaluation.
        every = {path.read_bytes() for path in (folder / "large").iterdir()}
        assert len(set(read) & every) == data_facts("large")
    assert documents("a=text:small:1")[:2] == documents("a=text:small:1")[:2]


def data_facts(name: str) -> int:
    """Training documents of a text, by their separators."""
    model = DecoderConfig(width=4, depth=1, num_heads=1, vocab_size=256, seq_len=32)
    source = data.load(
        DataConfig(name=f"text:{name}", batch_size=1), model, seed=0, note=lambda line: None
    )
    return int((source._train == 0).sum())  # pyright: ignore[reportAttributeAccessIssue]


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
    chat = data.load(
        DataConfig(
            name="chat:talks.jsonl",
            batch_size=1,
            tokenizer=str(encoder.path),
            chat_template="chatml.jinja",
        ),
        MODEL,
        seed=0,
        note=lambda line: None,
    )
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
    config = DataConfig(
        name="mix",
        mix=("t=chat:talks.jsonl:1",),
        batch_size=2,
        tokenizer="bpe:330",
        chat_template="chatml.jinja",
    )
    noise = denoising.noise_of(dataclasses.replace(config, noise="infilling"))
    with pytest.raises(DataError, match="is conversations, and noise is put on text"):
        denoising.denoising(config, noise, inputs=32, seed=0, note=lambda line: None)


def test_a_chat_by_itself_trains_a_tokenizer_with_its_special_tokens() -> None:
    config = DataConfig(
        name="chat:talks.jsonl", batch_size=2, tokenizer="bpe:330", chat_template="chatml.jinja"
    )
    source = data.load(config, MODEL, seed=0, note=lambda line: None)
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


def test_the_command_writes_a_tokenizer_that_a_run_uses(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["code=text:small:1", "notes=records:records.jsonl:1", "talk=chat:talks.jsonl:2"]
    flags = [
        "--size",
        "330",
        "--out",
        "new/tokenizer.json",
        "--chat-template",
        "chatml.jinja",
        "--field",
        "body",
    ]
    assert main(["data", "tokenizer", *words, *flags]) == 0
    out = capsys.readouterr().out
    encoder = Subwords(Path("new/tokenizer.json"))
    assert encoder.find("<|endoftext|>") == encoder.separator
    for token in ("<|im_start|>", "<|im_end|>"):
        assert encoder.encode([token.encode()])[0].tolist() == [encoder.find(token)]
    command = shlex.split(out.partition("use it with")[2].replace("\\\n", " "))
    tiny = "--steps 2 --optimizer.warmup-steps 1 --model.width 16 --model.depth 1 --model.num-heads 2 --model.seq-len 32"
    assert Path(command[0]).name == "mupax"
    assert command[1:3] == ["train", "lm-tiny"]
    assert main([*command[1:], *tiny.split(), "--dry-run"]) == 0
    assert "330" in command
    capsys.readouterr()
    assert not [path for path in Path("new").iterdir() if path.name != "tokenizer.json"]
    # The tokens are those of a run with bpe:SIZE over the same mixture.
    one = load(*words, field="body")
    other = load(*words, field="body", tokenizer="new/tokenizer.json")
    np.testing.assert_array_equal(one.train_batch(0)["inputs"], other.train_batch(0)["inputs"])
    assert main(["data", "tokenizer", *words, *flags]) == 2
    assert "new/tokenizer.json" in capsys.readouterr().err


def test_plain_sources_are_read_once_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "tokenizer", "text:small", "--size", "257", "--out", "bytes.json"]) == 0
    assert Subwords(Path("bytes.json")).vocab_size == 257
    capsys.readouterr()
    assert (
        main(["data", "tokenizer", "text:small", "text:large", "--size", "280", "--out", "t.json"])
        == 0
    )
    pieces = "".join(Subwords(Path("t.json")).pieces()[257:])
    assert "z" in pieces
    assert "m" in pieces
    assert "--data.name text:small --data.tokenizer t.json" in capsys.readouterr().out


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
def test_bad_input_of_the_command_is_one_message(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("latin.txt").write_bytes("naïve text\n".encode("latin-1") * 50)
    assert main(["data", "tokenizer", *words.split()]) == 2
    text = " ".join(capsys.readouterr().err.split())
    assert message in text
    assert "--data." not in text, "these are flags of a run"
    assert not Path("t.json").exists()


def test_broken_texts_are_left_out_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.dumps({"text": f"some words {number}"}) for number in range(50)]
    Path("odd.jsonl").write_text("\n".join([*lines, '{"text": null}']))
    words = "records:odd.jsonl --size 258 --out odd.json"
    assert main(["data", "tokenizer", *words.split()]) == 2
    assert "add --on-broken skip" in " ".join(capsys.readouterr().err.split())
    assert main(["data", "tokenizer", *words.split(), "--on-broken", "skip"]) == 0
    assert "left out, as broken: 1 record: odd.jsonl line 51" in capsys.readouterr().out
