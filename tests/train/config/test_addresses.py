"""Addresses of storage on the network are refused where a folder or a file is meant."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from mupax.train.config.recipes import RECIPES
from mupax.train.config.run import Config, InitConfig
from mupax.train.data import cache
from mupax.zoo.__main__ import main as zoo_main
from mupax.zoo.configs import ConfigError
from tests.train.config.test_cli import Capture, refused, started

pytestmark = pytest.mark.core
__all__ = ["started"]  # fixtures


ADDRESSES = [
    ("lm-tiny --workdir gs://bucket/run", "--workdir is gs://bucket/run, and gs:// is no folder of this machine"),
    ("lm-tiny --workdir=S3://bucket/run --dry-run", "--workdir is S3://bucket/run"),
    ("lm-tiny --init-from hf://org/model", "--init-from is hf://org/model"),
    ("lm-tiny --data.name text:gs://bucket/text", "--data.name is text:gs://bucket/text"),
    ("vit-digits --data.name images:s3://bucket/images", "--data.name is images:s3://bucket/images"),
    ("lm-tiny --data.data-dir gs://bucket/tfds", "--data.data-dir is gs://bucket/tfds"),
    ("lm-tiny --data.tokenizer https://host/tokenizer.json", "--data.tokenizer is https://host/tokenizer.json"),
    ("lm-tiny --preset measured:gs://bucket/table.json", "--preset is measured:gs://bucket/table.json"),
    ("eval gs://bucket/run", "the path is gs://bucket/run"),
    ("generate s3://bucket/run --prompt a", "the path is s3://bucket/run"),
    ("checkpoints gs://bucket/run", "the path is gs://bucket/run"),
    ("convert nowhere --form plain --out gs://bucket/run", "--out is gs://bucket/run"),
]


@pytest.mark.parametrize(("words", "said"), ADDRESSES, ids=[words.partition("://")[0] for words, _ in ADDRESSES])
def test_an_address_is_no_path(
    words: str, said: str, capsys: Capture, started: list[Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every one of them names a folder of this machine to pathlib, which would be made and then lost with the machine."""
    monkeypatch.chdir(tmp_path)
    err = refused(capsys, *words.split())
    assert said in err
    assert "mount the bucket (gcsfuse, mount-s3) or copy the files here" in err
    assert not started
    assert not list(tmp_path.iterdir())


def test_an_address_is_no_path_in_a_config_of_code() -> None:
    config = RECIPES["lm-tiny"]()
    with pytest.raises(ConfigError, match="workdir is gs://b/r"):
        dataclasses.replace(config, workdir="gs://b/r")
    with pytest.raises(ConfigError, match=r"data\.name is text:gs://b/t"):
        dataclasses.replace(config.data, name="text:gs://b/t")
    with pytest.raises(ConfigError, match="--init-from is gs://b/r"):
        InitConfig(init_from="gs://b/r")


def test_an_address_is_no_cache_of_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUPAX_DATA", "gs://bucket/data")
    with pytest.raises(ConfigError, match="MUPAX_DATA is gs://bucket/data"):
        cache.root()


def test_weights_come_from_no_address_and_go_to_none(capsys: Capture) -> None:
    for words in ("import hf://org/model --out here", "export nowhere --out gs://bucket/weights"):
        assert zoo_main(words.split()) == 2
        assert "is no folder of this machine" in capsys.readouterr().err


def test_control_an_address_in_a_prompt_is_text(capsys: Capture) -> None:
    for words in (["--prompt", "https://host"], ["--prompt=https://host"]):
        assert "nowhere holds no run" in refused(capsys, "generate", "nowhere", *words)
