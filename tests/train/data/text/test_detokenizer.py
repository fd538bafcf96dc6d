"""Text of tokens as they come is that of all tokens decoded at once, with every kind of decoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mupax.train.data.text.detokenizer import Detokenizer, token_bytes
from mupax.train.data.text.tokenizer import Bytes, Ids
from tests.fixtures.properties import PROPERTY
from tests.fixtures.small_tokenizers import KINDS, TEXT, sentencepiece, subwords


@pytest.fixture(scope="module", params=["bytes", "ids", *KINDS])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    if request.param in KINDS:
        path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
        return subwords(path, KINDS[request.param]())
    return Bytes() if request.param == "bytes" else Ids("ids", 50)


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode([text.encode()])[0].tolist()


def streamed(tokenizer: Any, prompt: list[int], ids: list[int]) -> list[str]:
    """Return the prompt's text, and the text after each token and at the end."""
    decoder = Detokenizer(tokenizer, prompt)
    pieces = [decoder.add([token]) for token in ids]
    # Several at once give the same text.
    several = Detokenizer(tokenizer, prompt)
    assert "".join(several.add(ids[i : i + 7]) for i in range(0, len(ids), 7)) == "".join(pieces)
    return [decoder.prompt_text, *pieces, decoder.finish()]


@PROPERTY
@given(st.data())
def test_random_tokens_give_the_text_of_all_decoded_at_once(
    tokenizer: Any, data: st.DataObject
) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=60))
    cut = data.draw(st.integers(0, len(ids) // 2))
    start, *pieces = streamed(tokenizer, ids[:cut], ids[cut:])
    prompt = tokenizer.decode(ids[:cut])
    assert start == prompt or (prompt.startswith(start) and prompt.endswith("\ufffd"))
    assert "".join(pieces) == tokenizer.decode(ids)[len(start) :]


@PROPERTY
@given(st.text(TEXT, max_size=60), st.integers(0, 20))
def test_texts_come_out_complete_and_characters_are_never_cut(
    tokenizer: Any, text: str, cut: int
) -> None:
    if isinstance(tokenizer, Ids):
        return
    ids = ids_of(tokenizer, text)
    start, *pieces = streamed(tokenizer, ids[:cut], ids[cut:])
    assert start + "".join(pieces) == tokenizer.decode(ids)
    assert "\ufffd" not in "".join(pieces)


def test_work_per_token_does_not_grow(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    decode = tokenizer.decode

    def recorded(self: Any, ids: Any) -> str:
        sizes.append(len(ids))
        return decode(ids)

    monkeypatch.setattr(type(tokenizer), "decode", recorded)
    ids = ids_of(tokenizer, "7 8 9 " if isinstance(tokenizer, Ids) else TEXT) * 40
    streamed(tokenizer, [], ids)
    assert sum(sizes) < 100 * len(ids)


@PROPERTY
@given(st.data())
def test_bytes_of_tokens_are_the_text(tokenizer: Any, data: st.DataObject) -> None:
    def readable(token: int) -> bool:
        # A run with a wrong byte is U+FFFD throughout in SentencePiece's text; its bytes stay.
        return not (tokenizer.is_skipped(token) or tokenizer.in_byte_run(token))

    tokens = st.sampled_from([*filter(readable, range(tokenizer.vocab_size))])
    chosen = st.lists(tokens, min_size=1, max_size=20)
    has_words = not isinstance(tokenizer, Ids)
    before = data.draw(chosen)
    characters = ids_of(tokenizer, "日🙂é") if has_words else []
    ids = [*before, *characters, *data.draw(chosen)]
    pairs = zip(ids, [None, *ids], strict=False)
    joined = b"".join(token_bytes(tokenizer, token, last) for token, last in pairs)
    assert joined.decode("utf-8", "replace") == tokenizer.decode(ids)
    if has_words:
        assert token_bytes(tokenizer, tokenizer.separator, before[0]) == b""


def test_the_space_after_a_prompt_and_a_character_of_byte_tokens(tmp_path: Path) -> None:
    tokenizer = subwords(tmp_path / "tokenizer.json", sentencepiece())
    prompt = ids_of(tokenizer, "the cat")
    more = ids_of(tokenizer, "sat")
    assert streamed(tokenizer, prompt, more)[1:] == [" sat", ""]
    # The control: a text's own first space.
    for start in ([], [tokenizer.separator]):
        assert streamed(tokenizer, start, more)[1:] == ["sat", ""]
    first, *rest = (tokenizer.find(f"<0x{byte:02X}>") for byte in "日".encode())
    pieces = streamed(tokenizer, [*prompt, first], [*rest, *more])
    assert pieces == ["the cat", "", "", "日 sat", ""]
    assert token_bytes(tokenizer, first, prompt[0]) == b"\xe6"
    # A run as long as this is not held back to its end.
    assert "".join(streamed(tokenizer, prompt, [first, *rest] * 30)[1:-1]) == "日" * 30


@pytest.mark.parametrize(
    ("prompt", "ids", "pieces"),
    [
        ([*"a\ufffd".encode()], [98], ["a\ufffd", "b", ""]),
        ([*"a\ufffd".encode()[:-1]], ["\ufffd".encode()[-1], 98], ["a", "\ufffd", "b", ""]),
        ([97], [0xE6, 98, 0xFF, 0xE6], ["a", "", "\ufffdb", "\ufffd", "", "\ufffd"]),
    ],
)
def test_a_true_replacement_character_is_not_waited_for(
    prompt: list[int], ids: list[int], pieces: list[str]
) -> None:
    assert streamed(Bytes(), prompt, ids) == pieces
