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
    if request.param in ("bytes", "ids"):
        return {"bytes": Bytes(), "ids": Ids("ids", 50)}[request.param]
    return subwords(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json", KINDS[request.param]())


def streamed(tokenizer: Any, prompt: list[int], ids: list[int]) -> list[str]:
    """The prompt's text, and what comes out after each token and at the end."""
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
def test_texts_come_out_whole_and_characters_are_never_cut(
    tokenizer: Any, text: str, cut: int
) -> None:
    if isinstance(tokenizer, Ids):
        return
    ids = tokenizer.encode([text.encode()])[0].tolist()
    start, *pieces = streamed(tokenizer, ids[:cut], ids[cut:])
    assert start + "".join(pieces) == tokenizer.decode(ids)
    assert "\ufffd" not in "".join(pieces)


def test_work_per_token_does_not_grow(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    decode = tokenizer.decode
    recorded = lambda ids: sizes.append(len(ids)) or decode(ids)  # noqa: E731
    monkeypatch.setattr(type(tokenizer), "decode", lambda self, ids: recorded(list(ids)))
    ids = tokenizer.encode([b"7 8 9 " if isinstance(tokenizer, Ids) else TEXT.encode()])[0].tolist()
    streamed(tokenizer, [], ids * 40)
    assert sum(sizes) < 100 * len(ids) * 40


@PROPERTY
@given(st.data())
def test_bytes_of_tokens_are_the_text(tokenizer: Any, data: st.DataObject) -> None:
    # A run with a wrong byte is U+FFFD throughout in SentencePiece's text; its bytes stay.
    texts = [t for t in range(tokenizer.vocab_size) if not tokenizer.is_skipped(t)]
    chosen = st.lists(
        st.sampled_from([t for t in texts if not tokenizer.in_byte_run(t)]), min_size=1, max_size=20
    )
    character = (
        [] if isinstance(tokenizer, Ids) else tokenizer.encode(["日🙂é".encode()])[0].tolist()
    )
    before = data.draw(chosen)
    ids = [*before, *character, *data.draw(chosen)]
    pairs = zip(ids, [None, *ids], strict=False)
    joined = b"".join(token_bytes(tokenizer, token, last) for token, last in pairs)
    assert joined.decode("utf-8", "replace") == tokenizer.decode(ids)
    if not isinstance(tokenizer, Ids):
        assert token_bytes(tokenizer, tokenizer.separator, before[0]) == b""


def test_the_space_after_a_prompt_and_a_character_of_byte_tokens(tmp_path: Path) -> None:
    tokenizer = subwords(tmp_path / "tokenizer.json", sentencepiece())
    prompt, more = (tokenizer.encode([text])[0].tolist() for text in (b"the cat", b"sat"))
    assert streamed(tokenizer, prompt, more)[1:] == [" sat", ""]
    assert streamed(tokenizer, [], more)[1:] == ["sat", ""]  # Control: a text's own first space.
    assert streamed(tokenizer, [tokenizer.separator], more)[1:] == ["sat", ""]
    byte_ids: list[Any] = [tokenizer.find(f"<0x{byte:02X}>") for byte in "日".encode()]
    start, *pieces = streamed(tokenizer, [*prompt, byte_ids[0]], [*byte_ids[1:], *more])
    assert (start, pieces) == ("the cat", ["", "", "日 sat", ""])
    assert token_bytes(tokenizer, byte_ids[0], prompt[0]) == b"\xe6"
    many = byte_ids * 30  # a run as long as this is not held back to its end
    assert "".join(streamed(tokenizer, prompt, many)[1:-1]) == "日" * 30


def test_a_true_replacement_character_is_not_waited_for() -> None:
    ids = [*"a\ufffd".encode()]
    assert streamed(Bytes(), ids, [98]) == ["a\ufffd", "b", ""]
    assert streamed(Bytes(), ids[:3], [ids[3], 98]) == ["a", "\ufffd", "b", ""]
    assert streamed(Bytes(), [97], [0xE6, 98, 0xFF, 0xE6]) == [
        "a",
        "",
        "\ufffdb",
        "\ufffd",
        "",
        "\ufffd",
    ]
