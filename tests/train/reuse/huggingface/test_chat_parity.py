"""Chat templates and answers beside `transformers`: the same text, tokens and tokens that are trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mupax.train.data.chats import templates
from mupax.train.data.chats.answers import ChatTokens
from mupax.train.data.text import named_tokenizers, tokenizer

pytestmark = pytest.mark.parity

MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PLAIN = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
TALKS = [
    [
        {"role": "system", "content": "be é"},
        {"role": "user", "content": "what is the 中文?"},
        {"role": "assistant", "content": " the answer 😀\n\nis 42"},
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "the mat 中 "},
    ],
    [{"role": "user", "content": "the"}, {"role": "assistant", "content": ""}],
]


@pytest.mark.parametrize("source", [MARKED, PLAIN], ids=["marked", "plain"])
@pytest.mark.parametrize("talk", TALKS, ids=["long", "empty"])
def test_text_tokens_and_targets_are_those_of_transformers(
    source: str, talk: list[dict[str, str]], tmp_path: Path
):
    transformers = pytest.importorskip("transformers")
    from tokenizers import AddedToken

    library = named_tokenizers.train_bpe(
        ["the cat sat on the mat, the answer is 42 é ü 中文 😀".encode()] * 50, 400
    )
    library.add_special_tokens(
        [AddedToken(token, special=True) for token in ("<|im_start|>", "<|im_end|>")]
    )
    library.save(str(tmp_path / "tokenizer.json"))
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    encoder, template = (
        tokenizer.Subwords(tmp_path / "tokenizer.json"),
        templates.Template(source, "x"),
    )
    prompt = theirs.apply_chat_template(
        talk, chat_template=source, add_generation_prompt=True, tokenize=False
    )
    assert template.render(talk, prompt=True) == prompt
    expected = theirs.apply_chat_template(
        talk,
        chat_template=MARKED,
        return_assistant_tokens_mask=True,
        return_dict=True,
        tokenize=True,
    )
    (ids,) = ChatTokens(encoder, template, "answers").encode([json.dumps(talk).encode()])
    assert (ids % encoder.vocab_size).tolist() == list(expected["input_ids"])
    assert (ids >= encoder.vocab_size).astype(int).tolist() == list(expected["assistant_masks"])
    assert 0 < sum(expected["assistant_masks"]) < ids.size
