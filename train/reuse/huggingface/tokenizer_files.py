"""Tokenizer, chat template and generation config in the files of `transformers`: kept as published, or written for a run.

    tokenizer.json           the vocabulary, as the run read it
    tokenizer_config.json    which tokens begin, end and pad a text
    chat_template.jinja      the text of a conversation
    generation_config.json   which tokens end what the model writes

A run says what ends its texts: `--data.separator`, or of conversations what the chat template writes after an answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mupax.disk import copy, links_outside, read_json
from mupax.train.data.chats import templates
from mupax.train.data.chats.templates import Template
from mupax.train.data.interface import DataError
from mupax.train.data.text.tokenizer import USUAL_SEPARATORS, Tokenizer
from mupax.train.reuse.huggingface import preprocessor, text_ids

TOKENIZER = "tokenizer.json"
TOKENS = "special_tokens_map.json"
NEAR = (TOKENIZER, templates.CONFIG, TOKENS, templates.FILE, text_ids.FILE, preprocessor.FILE)
"""Files beside published weights that mupax reads."""
_OLDER = (
    "added_tokens.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "merges.txt", "vocab.txt",
)  # fmt: skip
"""Files that tokenizers without a tokenizer.json are made of. They are kept, and not read."""
_PADS = ("<pad>", "[PAD]", "<|pad|>")

Ids = Mapping[str, int | list[int] | None]
"""Token ids by config.json's names, such as eos_token_id."""


class TextFiles(NamedTuple):
    """Tokenizer, template and token ids that a model of text needs besides its weights."""

    name: str | None
    """data.tokenizer as the run calls it; None of weights without a run."""
    file: Path | None = None
    """tokenizer.json."""
    encoder: Tokenizer | None = None
    """The tokenizer, opened with the run's separator; None where it is lost."""
    template: Template | None = None
    chats: bool = False
    """Whether the run was trained on conversations."""
    lost_template: str | None = None
    """A note if the run's chat template is not here any more."""


def keep(folder: Path, out: Path, *, tokenizer: bool = True) -> list[str]:
    """Copy the files beside published weights that `transformers` reads with them. Return their names.

    Args:
        folder: where the weights lie.
        out: folder to write into. A file that is there already stays.
        tokenizer: whether those of the tokenizer are among them.

    Raises:
        DataError: such a file is a link to what is outside of the folder, which a copy would give away with the weights.
    """
    names = (*NEAR, *_OLDER) if tokenizer else (text_ids.FILE, preprocessor.FILE)
    present = [name for name in names if (folder / name).is_file() and not (out / name).exists()]
    for name, target in links_outside(folder, present).items():
        raise DataError(
            f"{folder / name} links to {target}, outside of the folder; copy the file into the folder, or remove the link"
        )
    for name in present:
        copy(folder / name, out / name)
    return present


def write_generation_config(out: Path, ids: Ids) -> None:
    """Write generation_config.json, unless there is one or no id is known."""
    written = {name: value for name, value in ids.items() if value is not None}
    if written and not (out / text_ids.FILE).exists():
        (out / text_ids.FILE).write_text(json.dumps(written, indent=2) + "\n")


def special_tokens(folder: Path) -> dict[str, str]:
    """Return the special tokens that the files beside a tokenizer name, by their names there, such as bos_token.

    Raises:
        JsonError, DataError: such a file is damaged.
    """
    tokens: dict[str, str] = {}
    content = read_json(folder / TOKENS) if (folder / TOKENS).is_file() else {}
    for name, value in content.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return {
        **tokens,
        **templates.special_tokens(str(folder / TOKENIZER)),
    }  # tokenizer_config.json decides


def separator_beside(folder: Path, ids: Ids) -> str | None:
    """Return the token that ends the documents of published weights; None where its usual names find it.

    It is the published end of a text. Only the end of an answer is not, if the vocabulary also has a token that usually
    ends documents: a model that chats was trained on documents before.

    Args:
        folder: where the weights and their tokenizer.json lie.
        ids: of their config.json.

    Raises:
        JsonError: a file there is damaged.
    """
    if not (folder / TOKENIZER).is_file():
        return None
    end = special_tokens(folder).get("eos_token")
    if end == USUAL_SEPARATORS[0]:  # which is found before all others: large files need not be read
        return None
    words = _words(folder / TOKENIZER)
    if end is None:
        end_ids = ids.get("eos_token_id")
        end_ids = end_ids if isinstance(end_ids, list) else [end_ids]
        end = next((token for token, number in words.items() if number in end_ids), None)
    usual = next((token for token in USUAL_SEPARATORS if token in words), None)
    if end not in words or end == usual:
        return None
    if usual is None:
        return end
    try:
        template = templates.find(str(folder / TOKENIZER))
    except DataError:
        template = None
    return None if template is not None and end in template.ending else end


def decoder_ids(text: TextFiles) -> dict[str, int | None]:
    """Return the ids that begin, end and pad what a run's decoder writes, by config.json's names.

    The begin token is the separator, which stands before every document but the first, unless the chat template begins a
    conversation with a token of its own.
    """
    encoder = text.encoder
    template = text.template
    if encoder is None:
        return {}
    begin = encoder.separator
    end = encoder.separator
    tokens = {} if text.file is None else templates.special_tokens(str(text.file))
    if text.chats and template is not None:
        answer_end = _end_of_answers(text.file, encoder, template)
        end = end if answer_end is None else answer_end
        first = encoder.find(tokens.get("bos_token", ""))
        if first is not None and _conversation(encoder, template)[:1] == [first]:
            begin = first
    pad = encoder.find(*(token for token in (tokens.get("pad_token"), *_PADS) if token is not None))
    return {"bos_token_id": begin, "eos_token_id": end, "pad_token_id": pad}


def write_tokenizer(
    text: TextFiles, out: Path, ids: Ids, context: int, *, decoder: bool = True
) -> list[str]:
    """Write tokenizer.json, tokenizer_config.json and the chat template of a run.

    Args:
        text: whose `file` and `encoder` are there.
        out: folder of the weights.
        ids: the ids that config.json has.
        context: tokens that the model reads at most.
        decoder: whether the model continues texts. Its tokenizer then adds no token that training never saw.

    Returns:
        What the user should know, one sentence each.
    """
    from tokenizers import Tokenizer as Library

    assert text.file is not None
    assert text.encoder is not None
    content = text.file.read_bytes()
    library = Library.from_buffer(content)
    special = {
        number for number, token in library.get_added_tokens_decoder().items() if token.special
    }
    tokens = templates.special_tokens(str(text.file))
    for name in ("bos", "eos", "pad"):
        number = ids.get(f"{name}_token_id")
        number = number[0] if isinstance(number, list) else number
        token = None if number is None else library.id_to_token(number)
        # `transformers` leaves named tokens out of what it decodes, so an ordinary word gets no name.
        if token is not None and (number in special or token[:1] + token[-1:] in ("<>", "[]")):
            tokens[f"{name}_token"] = token
        elif number is not None:
            tokens.pop(f"{name}_token", None)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **tokens,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
    }
    notes = []
    if decoder and (added := _unseen(text)):
        words = ", ".join(str(library.id_to_token(number)) for number in added)
        content = without_added_tokens(content)
        config |= {"add_bos_token": False, "add_eos_token": False}
        notes.append(
            f"the run's tokenizer.json adds {words} to every text, and training never saw that: the exported tokenizer.json adds "
            "nothing, as add_special_tokens=False does"
        )
    (out / TOKENIZER).write_bytes(content)
    (out / templates.CONFIG).write_text(
        json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    if text.template is not None:
        (out / templates.FILE).write_text(text.template.with_tokens(tokens), encoding="utf-8")
    return notes


def note_on_end(text: TextFiles) -> str | None:
    """Return a note if the answers of a chat run end with words instead of a token, at which `transformers` does not stop."""
    if not text.chats or text.encoder is None or text.template is None or not text.template.ending:
        return None
    if _end_of_answers(text.file, text.encoder, text.template) is not None:
        return None
    return (
        f"answers end with {text.template.ending!r}, which is no token: `transformers` stops there only by "
        f"generate(..., stop_strings=[{text.template.ending!r}], tokenizer=tokenizer)"
    )


def without_added_tokens(content: bytes) -> bytes:
    """Return a tokenizer.json that adds no tokens around a text. Ids of the text itself stay the same."""
    fields = json.loads(content)
    fields["post_processor"] = _without_added(fields.get("post_processor"))
    return json.dumps(fields, indent=2, ensure_ascii=False).encode()


def _words(file: Path) -> dict[str, int]:
    """Return the ids of a tokenizer.json's tokens; empty if it is damaged, which is said where it is opened."""
    try:
        content = json.loads(file.read_bytes())
        words = content["model"]["vocab"]
        added = {token["content"]: token["id"] for token in content.get("added_tokens", [])}
    except (ValueError, RecursionError, KeyError, TypeError):
        return {}
    if isinstance(words, list):  # of Unigram, with scores
        return added
    return {**words, **added} if isinstance(words, dict) else added


def _without_added(processor: Any) -> Any:
    """Return a post-processor of the `tokenizers` library without what adds tokens; None if nothing is left."""
    kind = processor.get("type") if isinstance(processor, dict) else None
    if kind == "Sequence":
        parts = [_without_added(part) for part in processor["processors"]]
        left = [part for part in parts if part is not None]
        return {**processor, "processors": left} if left else None
    if kind == "RobertaProcessing":  # which also trims offsets, as ByteLevel does
        options = {name: processor.get(name, True) for name in ("add_prefix_space", "trim_offsets")}
        return {"type": "ByteLevel", **options, "use_regex": True}
    return None if kind in ("TemplateProcessing", "BertProcessing") else processor


def _unseen(text: TextFiles) -> list[int]:
    """Return the ids that the tokenizer adds around a text, if training saw no text with them."""
    assert text.encoder is not None
    begin = text.encoder.start.tolist()
    end = text.encoder.end.tolist()
    if text.name is None or not (begin or end):  # weights without a run were trained elsewhere
        return []
    if text.chats and text.template is not None:
        usual = _conversation(text.encoder, text.template)[: len(begin)]
    else:
        usual = [text.encoder.separator]  # stands before every document
    return [] if begin == usual and not end else [*begin, *end]


def _conversation(encoder: Tokenizer, template: Template) -> list[int]:
    """Return the ids of a short conversation; none if the template refuses it."""
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    try:
        text = template.render(talk, prompt=False)
    except DataError:
        return []
    return encoder.encode([text.encode()])[0].tolist()


def _end_of_answers(file: Path | None, encoder: Tokenizer, template: Template) -> int | None:
    """Return the token that ends an answer: the first special token that the template writes after it, or its only one.

    None if the template writes nothing there, or several ordinary tokens.
    """
    if not template.ending:
        return None
    ids = encoder.encode([template.ending.encode()])[0].tolist()
    special: set[int] = set()
    if file is not None:
        from tokenizers import Tokenizer as Library

        added = Library.from_buffer(file.read_bytes()).get_added_tokens_decoder()
        special = {number for number, token in added.items() if token.special}
    first = next((number for number in ids if number in special), None)
    return ids[0] if first is None and len(ids) == 1 else first
