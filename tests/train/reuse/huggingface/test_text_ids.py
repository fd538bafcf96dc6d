"""Ids that start, end and are forced in texts of published encoder-decoders, as in `transformers`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mupax.train.reuse.huggingface import text_ids
from mupax.train.reuse.huggingface.text_ids import TextIds, TextIdsError
from mupax.zoo.encoder_decoder.config import EncoderDecoderConfig
from tests.train.reuse import random_weights
from tests.train.reuse.commands import call, read_json, refuse, succeed

SIZES: Any = {
    "width": 8,
    "depth": 1,
    "encoder_depth": 1,
    "num_heads": 2,
    "vocab_size": 263,
    "seq_len": 24,
}
MODELS = {
    "mbart": EncoderDecoderConfig(**SIZES, activation="gelu_exact"),
    "t5": EncoderDecoderConfig(
        **SIZES,
        target_len=11,
        positions="relative",
        distance_buckets=8,
        longest_distance=12,
        norm="rmsnorm",
        norm_eps=1e-6,
        activation="relu",
        bias=False,
        embedding_norm=False,
    ),
}
IDS = {"decoder_start_token_id": 259, "bos_token_id": 260, "eos_token_id": 261, "pad_token_id": 262}
# h and !, so that a text shows them.
FORCED = {"forced_bos_token_id": 104, "forced_eos_token_id": 33}
BYTES = "--data.tokenizer bytes --prompt"
WORDS = [BYTES, ["a text"], "--temperature 0 --tokens 9"]


def published(folder: Path, name: str, **generation: int) -> Path:
    """Write a model that does not end by itself, and its generation config."""
    folder = random_weights.published(folder / name, MODELS[name], seed=5, tokens=IDS)
    if generation:
        (folder / text_ids.FILE).write_text(json.dumps(generation))
    return folder


def test_generation_config_decides_and_alone_says_what_is_forced(tmp_path: Path) -> None:
    config = {"model_type": "mbart", **IDS}
    assert text_ids.recorded(tmp_path, config) == {**IDS, "forced_eos_token_id": 2}
    assert text_ids.recorded(tmp_path, {**config, "forced_eos_token_id": None}) == IDS
    fields = {"eos_token_id": [5], "forced_bos_token_id": 7}
    (tmp_path / text_ids.FILE).write_text(json.dumps(fields))
    ids = text_ids.recorded(tmp_path, config)
    assert ids == {**IDS, "eos_token_id": 5, "forced_bos_token_id": 7}
    assert text_ids.of(ids, tmp_path, 263) == TextIds(259, 5, 262, 7, None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"eos_token_id": [5, 6]}, r"eos_token_id is \[5, 6\]"),
        ({"forced_bos_token_id": "en"}, "'en'"),
    ],
)
def test_ids_that_are_none_are_refused(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / text_ids.FILE).write_text(json.dumps(fields))
    with pytest.raises(TextIdsError, match=message):
        text_ids.recorded(tmp_path, IDS)


def test_ids_must_name_a_start_and_be_in_the_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(TextIdsError, match="nothing says decoder_start_token_id"):
        text_ids.of({"eos_token_id": 5}, tmp_path, 263)
    message = r"and the model's 100 tokens have ids below 100; correct config\.json or gen"
    with pytest.raises(TextIdsError, match=message):
        text_ids.of(IDS, tmp_path, 100)


def test_forced_tokens_are_written_by_weights_as_published_and_as_imported(tmp_path: Path) -> None:
    weights = published(tmp_path, "t5", **IDS)
    plain = succeed("generate", weights, *WORDS).out.rstrip("\n")
    (weights / text_ids.FILE).write_text(json.dumps({**IDS, **FORCED}))
    forced = succeed("generate", weights, *WORDS).out.rstrip("\n")
    assert (forced[0], forced[-1]) == ("h", "!") != (plain[0], plain[-1])
    imported = tmp_path / "in"
    succeed("import", weights, "--preset mup --base ed-proxy --out", imported)
    assert succeed("generate", imported, *WORDS).out.rstrip("\n") == forced
    succeed("export", imported, "--out", tmp_path / "out")
    config = read_json(tmp_path, "out", "config.json")
    assert config.items() >= {**IDS, **FORCED}.items()
    err = refuse("generate", weights, BYTES, "x" * 24)
    assert "the prompt is 25 tokens, and the model reads 1 to 24" in err
    code, _, err = call("eval", weights, "--data.name text:x")
    assert code == 2
    assert "not what noise it was trained on" in err


@pytest.mark.parity
@pytest.mark.parametrize(("name", "beams"), [("mbart", 1), ("t5", 3)])
def test_text_is_that_of_transformers(name: str, beams: int, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForSeq2SeqLM

    prompt = torch.tensor([[*b"a text", IDS["eos_token_id"]]])
    texts = set()
    for generation in ({**IDS, **FORCED}, {}):  # by config.json alone at last
        (tmp_path / str(len(texts))).mkdir()
        folder = published(tmp_path / str(len(texts)), name, **generation)
        theirs = AutoModelForSeq2SeqLM.from_pretrained(folder).generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=9,
            do_sample=False,
            num_beams=beams,
        )[0]
        expected = bytes(i for i in theirs.tolist() if i < 256).decode(errors="replace")
        text = succeed("generate", folder, *WORDS, "--beams", beams).out
        assert text.removesuffix("\n").encode() == expected.encode()
        texts.add(text)
    assert len(texts) == 2
