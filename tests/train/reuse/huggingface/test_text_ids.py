"""What starts, ends and is forced in the texts of published encoder-decoders: read as `transformers` does, and written so."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mupax.__main__ import main
from mupax.train.reuse.huggingface import text_ids
from mupax.train.reuse.huggingface.text_ids import TextIds, TextIdsError
from mupax.zoo.definition import definition
from mupax.zoo.encoder_decoder.config import EncoderDecoderConfig
from mupax.zoo.huggingface import weights
from mupax.zoo.huggingface.config import to_huggingface
from mupax.zoo.huggingface.tensorfile import write_tensors

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
        **SIZES, target_len=11, positions="relative", distance_buckets=8, longest_distance=12, norm="rmsnorm", norm_eps=1e-6,
        activation="relu", bias=False, embedding_norm=False,
    ),
}  # fmt: skip
IDS = {"decoder_start_token_id": 259, "bos_token_id": 260, "eos_token_id": 261, "pad_token_id": 262}
FORCED = {
    "forced_bos_token_id": 104,
    "forced_eos_token_id": 33,
}  # h and !, so that a text shows them
WORDS = ["--data.tokenizer", "bytes", "--prompt", "a text", "--temperature", "0", "--tokens"]


def published(folder: Path, name: str, **generation: int) -> Path:
    """A model of random weights that does not end by itself, and what its files say of generation."""
    draw, folder = np.random.default_rng(5), folder / name
    params = {
        k: draw.standard_normal(leaf.shape, np.float32)
        for k, leaf in definition(MODELS[name]).abstract.items()
    }
    folder.mkdir()
    write_tensors(folder, weights.to_huggingface(MODELS[name], params), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(to_huggingface(MODELS[name], tokens=IDS)))
    if generation:
        (folder / text_ids.FILE).write_text(json.dumps(generation))
    return folder


def run_command(*words: Any) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(word) for word in words])
    return code, out.getvalue(), " ".join(err.getvalue().split())


def test_generation_config_decides_and_alone_says_what_is_forced(tmp_path: Path) -> None:
    assert text_ids.recorded(tmp_path, {"model_type": "mbart", **IDS}) == {
        **IDS,
        "forced_eos_token_id": 2,
    }
    assert (
        text_ids.recorded(tmp_path, {"model_type": "mbart", **IDS, "forced_eos_token_id": None})
        == IDS
    )
    (tmp_path / text_ids.FILE).write_text(
        json.dumps({"eos_token_id": [5], "forced_bos_token_id": 7})
    )
    ids = text_ids.recorded(tmp_path, {"model_type": "mbart", **IDS})
    assert ids == {**IDS, "eos_token_id": 5, "forced_bos_token_id": 7}
    assert text_ids.of(ids, tmp_path, 263) == TextIds(259, 5, 262, 7, None)
    for wrong, message in (
        ({"eos_token_id": [5, 6]}, r"eos_token_id is \[5, 6\]"),
        ({"forced_bos_token_id": "en"}, "'en'"),
    ):
        (tmp_path / text_ids.FILE).write_text(json.dumps(wrong))
        with pytest.raises(TextIdsError, match=message):
            text_ids.recorded(tmp_path, IDS)
    with pytest.raises(TextIdsError, match="nothing says decoder_start_token_id"):
        text_ids.of({"eos_token_id": 5}, tmp_path, 263)
    with pytest.raises(TextIdsError, match="the model has 100 tokens"):
        text_ids.of(IDS, tmp_path, 100)


def test_forced_tokens_are_written_by_weights_as_published_and_as_imported(tmp_path: Path) -> None:
    free = published(tmp_path, "t5", **IDS)
    code, plain, err = run_command("generate", free, *WORDS, 9)
    assert code == 0, err
    (free / text_ids.FILE).write_text(json.dumps({**IDS, **FORCED}))
    code, forced, err = run_command("generate", free, *WORDS, 9)
    assert code == 0, err
    assert (forced[0], forced.rstrip("\n")[-1]) == ("h", "!") != (plain[0], plain.rstrip("\n")[-1])
    assert (
        run_command(
            "import", free, "--out", tmp_path / "in", "--preset", "mup", "--base", "ed-proxy"
        )[0]
        == 0
    )
    assert run_command("generate", tmp_path / "in", *WORDS, 9)[1] == forced
    assert run_command("export", tmp_path / "in", "--out", tmp_path / "out")[0] == 0
    assert (
        json.loads((tmp_path / "out" / "config.json").read_text()).items()
        >= {**IDS, **FORCED}.items()
    )
    code, _, err = run_command("generate", free, "--data.tokenizer", "bytes", "--prompt", "x" * 24)
    assert (code, "the prompt is 25 tokens, and the model reads 1 to 24" in err) == (2, True)
    code, _, err = run_command("eval", free, "--data.name", "text:x")
    assert (code, "not what noise it was trained on" in err) == (2, True)


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
        code, text, err = run_command("generate", folder, *WORDS, 9, "--beams", beams)
        assert code == 0, err
        assert text.removesuffix("\n").encode() == expected.encode()
        texts.add(text)
    assert len(texts) == 2
