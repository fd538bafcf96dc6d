"""Tokenizer, chat template and generation config in `transformers` files, copied or written.

    tokenizer.json           vocabulary of the run
    tokenizer_config.json    tokens that begin, end and pad a text
    chat_template.jinja      template of a conversation's text
    generation_config.json   tokens that end a generated text

The end of a run's texts is `--data.separator`, or in conversations the text that the chat template
writes after an answer.
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
    "added_tokens.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
)
"""Files of tokenizers without a tokenizer.json, which are copied but not read."""
_PADS = ("<pad>", "[PAD]", "<|pad|>")
"""Usual names of the token that pads a text."""

Ids = Mapping[str, int | list[int] | None]
"""Token ids by config.json's names, such as eos_token_id."""


class TextFiles(NamedTuple):
    """Tokenizer, template and token ids that a model of text needs besides its weights."""

    name: str | None
    """Value of data.tokenizer in the run. `None` for weights without a run."""
    file: Path | None = None
    """Path of the tokenizer.json."""
    encoder: Tokenizer | None = None
    """Tokenizer opened with the run's separator. `None` if it is lost."""
    template: Template | None = None
    chats: bool = False
    """Whether the run was trained on conversations."""
    lost_template: str | None = None
    """Note for the user if the run's chat template is lost."""
    caution: str | None = None
    """Note for the user if the tokenizer may be another one than that of training."""


def keep(folder: Path, out: Path, *, tokenizer: bool = True) -> list[str]:
    """Copy the small files beside published weights that `transformers` reads. Return their names.

    Args:
        folder: folder of the weights, from which files are copied.
        out: folder to write into. Files that exist in it stay.
        tokenizer: whether to copy files of the tokenizer, too.

    Raises:
        DataError: a file is a link out of the folder. A copy would publish its target.
    """
    names = (*NEAR, *_OLDER) if tokenizer else (text_ids.FILE, preprocessor.FILE)
    # A file that the export has already written is not replaced.
    present = [name for name in names if (folder / name).is_file() and not (out / name).exists()]
    for name, target in links_outside(folder, present).items():
        raise DataError(
            f"{folder / name} links to {target}, outside of the folder; copy the file into the "
            "folder, or remove the link"
        )
    for name in present:
        copy(folder / name, out / name)
    return present


def write_generation_config(out: Path, ids: Ids) -> None:
    """Write generation_config.json, unless the file exists or all ids are `None`."""
    written = {name: value for name, value in ids.items() if value is not None}
    if written and not (out / text_ids.FILE).exists():
        (out / text_ids.FILE).write_text(json.dumps(written, indent=2) + "\n")


def special_tokens(folder: Path) -> dict[str, str]:
    """Return the special tokens in the files beside a tokenizer, by names such as bos_token.

    Tokens in tokenizer_config.json replace those in special_tokens_map.json.

    Raises:
        JsonError, DataError: a file is damaged.
    """
    tokens: dict[str, str] = {}
    content = read_json(folder / TOKENS) if (folder / TOKENS).is_file() else {}
    for name, value in content.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    # `templates.special_tokens` reads tokenizer_config.json, which takes precedence.
    return {**tokens, **templates.special_tokens(str(folder / TOKENIZER))}


def separator_beside(folder: Path, ids: Ids) -> str | None:
    """Return the token that ends documents of published weights, if it has an unusual name.

    This is the token that ends a text by the published files. There is one exception: a chat
    model's end of an answer does not count if the vocabulary also has a usual separator, because
    the model was trained on documents before. The result is `None` if the usual separator of the
    vocabulary is right, or if there is no tokenizer.json.

    Args:
        folder: folder of the weights and their tokenizer.json.

    Raises:
        JsonError: a file is damaged.
    """
    if not (folder / TOKENIZER).is_file():
        return None
    end = special_tokens(folder).get("eos_token")
    # No separator comes before the first usual one, so the large tokenizer.json need not be read.
    if end == USUAL_SEPARATORS[0]:
        return None

    vocabulary = _vocabulary(folder / TOKENIZER)
    if end is None:
        end_ids = ids.get("eos_token_id")
        if not isinstance(end_ids, list):
            end_ids = [end_ids]
        end = next((token for token, number in vocabulary.items() if number in end_ids), None)
    usual = next((token for token in USUAL_SEPARATORS if token in vocabulary), None)
    if end not in vocabulary or end == usual:
        return None
    if usual is None:
        return end

    try:
        template = templates.find(str(folder / TOKENIZER))
    except DataError:
        # A template that cannot be used says nothing about the end of answers.
        template = None
    ends_answers = template is not None and end in template.ending
    return None if ends_answers else end


def decoder_ids(text: TextFiles) -> dict[str, int | None]:
    """Return the ids that begin, end and pad texts of a run's decoder, by config.json's names.

    Begin and end token are the separator, which stands between documents. For a run on
    conversations, the end is the token that ends answers, and the begin is the tokenizer's begin
    token if the chat template writes it first. The pad token may be `None`. The result is empty
    without a tokenizer.
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
        if answer_end is not None:
            end = answer_end
        named_begin = encoder.find(tokens.get("bos_token", ""))
        if named_begin is not None and _conversation(encoder, template)[:1] == [named_begin]:
            begin = named_begin

    pad_names: list[str] = list(_PADS)
    named_pad = tokens.get("pad_token")
    if named_pad is not None:
        pad_names.insert(0, named_pad)
    pad = encoder.find(*pad_names)
    return {"bos_token_id": begin, "eos_token_id": end, "pad_token_id": pad}


def write_tokenizer(
    text: TextFiles, out: Path, ids: Ids, context: int, *, decoder: bool = True
) -> list[str]:
    """Write tokenizer.json, tokenizer_config.json and the chat template of a run.

    Files of these names are replaced.

    Args:
        text: text files of the run, with `file` and `encoder`.
        out: folder of the exported weights, which exists.
        ids: token ids by config.json's names, as config.json has them.
        context: largest number of tokens that the model reads.
        decoder: whether the model is a decoder. Its tokenizer then does not add tokens that
            training never saw.

    Returns:
        Notes for the user, one sentence each.
    """
    from tokenizers import Tokenizer as Library

    assert text.file is not None
    assert text.encoder is not None
    # The file is copied byte for byte unless tokens must be left out.
    content = text.file.read_bytes()
    library = Library.from_buffer(content)
    special_ids = _special_ids(library)
    tokens = templates.special_tokens(str(text.file))
    for name in ("bos", "eos", "pad"):
        number = ids.get(f"{name}_token_id")
        # A model may end a text with several tokens. A tokenizer names one of them.
        if isinstance(number, list):
            number = number[0]
        if number is None:
            continue
        # An ordinary word must not be named as a special token, because `transformers` leaves
        # special tokens out of decoded text (skip_special_tokens).
        token = library.id_to_token(number)
        has_brackets = token is not None and token[:1] + token[-1:] in ("<>", "[]")
        if token is not None and (number in special_ids or has_brackets):
            tokens[f"{name}_token"] = token
        else:
            tokens.pop(f"{name}_token", None)

    config: dict[str, Any] = {
        # This class reads any tokenizer.json as it is. Classes for a single model may change it.
        "tokenizer_class": "PreTrainedTokenizerFast",
        **tokens,
        # True would remove spaces before punctuation from decoded text.
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
    }
    notes = []
    added = _unseen(text) if decoder else []
    if added:
        words = ", ".join(str(library.id_to_token(number)) for number in added)
        content = without_added_tokens(content)
        config["add_bos_token"] = False
        config["add_eos_token"] = False
        notes.append(
            f"the run's tokenizer.json adds {words} to every text, and training never saw that: "
            "the exported tokenizer.json adds nothing, as add_special_tokens=False does"
        )

    (out / TOKENIZER).write_bytes(content)
    config_text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (out / templates.CONFIG).write_text(config_text, encoding="utf-8")
    if text.template is not None:
        (out / templates.FILE).write_text(text.template.with_tokens(tokens), encoding="utf-8")
    return notes


def note_on_end(text: TextFiles) -> str | None:
    """Return a note if the answers of a chat run end with words instead of a token.

    `transformers` does not stop at words by itself.
    """
    if not text.chats or text.encoder is None or text.template is None:
        return None
    ending = text.template.ending
    if not ending or _end_of_answers(text.file, text.encoder, text.template) is not None:
        return None
    return (
        f"answers end with {ending!r}, which is no token: `transformers` stops there only by "
        f"generate(..., stop_strings=[{ending!r}], tokenizer=tokenizer)"
    )


def without_added_tokens(content: bytes) -> bytes:
    """Return a tokenizer.json that adds no tokens around a text.

    Ids of the text itself stay the same.

    Args:
        content: content of a tokenizer.json, in bytes.
    """
    fields = json.loads(content)
    fields["post_processor"] = _without_added(fields.get("post_processor"))
    return json.dumps(fields, indent=2, ensure_ascii=False).encode()


def _special_ids(library: Any) -> set[int]:
    """Return the ids of the special tokens of a tokenizer of the `tokenizers` library."""
    added = library.get_added_tokens_decoder()
    return {number for number, token in added.items() if token.special}


def _vocabulary(file: Path) -> dict[str, int]:
    """Return the ids of the tokens in a tokenizer.json, by token.

    For a Unigram model these are the added tokens alone. The result is empty if the file is
    damaged, which is reported when the tokenizer is opened.
    """
    try:
        content = json.loads(file.read_bytes())
        vocabulary = content["model"]["vocab"]
        added = {token["content"]: token["id"] for token in content.get("added_tokens", [])}
    except (ValueError, RecursionError, KeyError, TypeError):
        return {}
    # Unigram has a list of tokens with scores. Its separators are added tokens.
    if not isinstance(vocabulary, dict):
        return added
    return {**vocabulary, **added}


def _without_added(processor: Any) -> Any:
    """Return a post-processor of the `tokenizers` library without its steps that add tokens.

    The result is `None` if no step remains.

    Args:
        processor: value of `post_processor` in a tokenizer.json, of any JSON type.
    """
    processor_type = processor.get("type") if isinstance(processor, dict) else None
    if processor_type == "Sequence":
        remaining = []
        for part in processor["processors"]:
            stripped = _without_added(part)
            if stripped is not None:
                remaining.append(stripped)
        return {**processor, "processors": remaining} if remaining else None
    if processor_type == "RobertaProcessing":
        # This type also trims offsets, which ByteLevel does without adding tokens.
        return {
            "type": "ByteLevel",
            "add_prefix_space": processor.get("add_prefix_space", True),
            "trim_offsets": processor.get("trim_offsets", True),
            "use_regex": True,
        }
    if processor_type in ("TemplateProcessing", "BertProcessing"):
        return None
    return processor


def _unseen(text: TextFiles) -> list[int]:
    """Return the ids that a run's tokenizer adds around a text, if training saw no such text."""
    assert text.encoder is not None
    begin = text.encoder.start.tolist()
    end = text.encoder.end.tolist()
    # Weights without a run were trained elsewhere, perhaps with these tokens.
    if text.name is None or not (begin or end):
        return []
    if text.chats and text.template is not None:
        trained_begin = _conversation(text.encoder, text.template)[: len(begin)]
    else:
        # In training the separator comes before every document.
        trained_begin = [text.encoder.separator]
    if begin == trained_begin and not end:
        return []
    return [*begin, *end]


def _conversation(encoder: Tokenizer, template: Template) -> list[int]:
    """Return the ids of a short sample conversation. Empty if the template refuses it."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    try:
        text = template.render(messages, prompt=False)
    except DataError:
        return []
    return encoder.encode([text.encode()])[0].tolist()


def _end_of_answers(file: Path | None, encoder: Tokenizer, template: Template) -> int | None:
    """Return the id of the token that ends an answer.

    It is the first special token that the template writes after an answer, or the only token. The
    result is `None` if the template writes nothing there, or several ordinary tokens.

    Args:
        file: tokenizer.json, which says which tokens are special. `None` for bytes.
    """
    if not template.ending:
        return None
    ids = encoder.encode([template.ending.encode()])[0].tolist()
    special_ids: set[int] = set()
    if file is not None:
        from tokenizers import Tokenizer as Library

        special_ids = _special_ids(Library.from_buffer(file.read_bytes()))
    for number in ids:
        if number in special_ids:
            return number
    return ids[0] if len(ids) == 1 else None
