"""Addresses of storage on the network are refused where a folder or a file is meant."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mupax.__main__ import main
from mupax.train.config.checks import check_words
from mupax.train.config.recipes import RECIPES
from mupax.train.config.run import Config, InitConfig
from mupax.train.data import cache
from mupax.zoo.configs import ConfigError
from tests.fixtures.command_line import Capture, refused, started

pytestmark = pytest.mark.core
__all__ = ["started"]  # fixtures


NOBODY = "127.0.0.1:1"
"""Address of this machine at which nothing listens."""
UNREACHED = """
import asyncio, sys, time

async def at_once(*_):
    pass

# gcsfs and google.auth wait for longer and longer before they try again.
asyncio.sleep = at_once
time.sleep = lambda seconds: None
from mupax.__main__ import main

sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("words", ["eval gs://no-such/run", "train lm-tiny --workdir gs://b/run"])
def test_a_bucket_that_is_not_reached_is_one_line(words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", UNREACHED, *words.split()],
        env=os.environ
        | {
            "STORAGE_EMULATOR_HOST": f"http://{NOBODY}",
            # Google's libraries would wait for the credentials of a machine in its cloud.
            "GCE_METADATA_HOST": NOBODY,
            "GCE_METADATA_IP": NOBODY,
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    address = words.split()[-1]
    assert done.stderr.startswith(f"error: {address}")
    assert "the bucket is not reached: Cannot connect to host 127.0.0.1:1 " in done.stderr


ADDRESSES = [
    (
        "train lm-tiny --workdir s3://bucket/run",
        "--workdir is s3://bucket/run, and s3:// is no folder of this machine and not gs://",
    ),
    ("train lm-tiny --workdir=S3://bucket/run --dry-run", "--workdir is S3://bucket/run"),
    ("train lm-tiny --init-from hf://org/model", "--init-from is hf://org/model"),
    ("train lm-tiny --data.name text:az://bucket/text", "--data.name is text:az://bucket/text"),
    (
        "train vit-digits --data.name images:s3://bucket/images",
        "--data.name is images:s3://bucket/images",
    ),
    ("train lm-tiny --data.data-dir s3://bucket/tfds", "--data.data-dir is s3://bucket/tfds"),
    (
        "train lm-tiny --data.tokenizer https://host/tokenizer.json",
        "--data.tokenizer is https://host/tokenizer.json",
    ),
    (
        "train lm-tiny --preset measured:gs://bucket/table.json",
        "--preset is measured:gs://bucket/table.json",
    ),
    ("eval s3://bucket/run", "the path is s3://bucket/run"),
    ("eval nowhere --json gs://bucket/numbers.json", "--json is gs://bucket/numbers.json"),
    ("generate s3://bucket/run --prompt a", "the path is s3://bucket/run"),
    ("checkpoints s3://bucket/run", "the path is s3://bucket/run"),
    ("sweep lm-tiny --out gs://bucket/sweep", "--out is gs://bucket/sweep"),
    ("convert nowhere --form plain --out s3://bucket/run", "--out is s3://bucket/run"),
]


@pytest.mark.parametrize(
    ("words", "message"), ADDRESSES, ids=[words.partition("://")[0] for words, _ in ADDRESSES]
)
def test_an_address_is_no_path(
    words: str,
    message: str,
    capsys: Capture,
    started: list[Config],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every one of them names a folder of this machine to pathlib, which would be made and then lost with the machine."""
    monkeypatch.chdir(tmp_path)
    err = refused(capsys, *words.split())
    assert message in err
    assert "mount the bucket (gcsfuse, mount-s3) or copy the files here" in err
    assert not started
    assert not list(tmp_path.iterdir())


def test_an_address_is_no_path_in_a_config_of_code() -> None:
    config = RECIPES["lm-tiny"]()
    with pytest.raises(ConfigError, match="workdir is s3://b/r"):
        dataclasses.replace(config, workdir="s3://b/r")
    with pytest.raises(ConfigError, match=r"data\.name is text:s3://b/t"):
        dataclasses.replace(config.data, name="text:s3://b/t")
    with pytest.raises(ConfigError, match="--init-from is s3://b/r"):
        InitConfig(init_from="s3://b/r")


def test_a_word_behind_a_flag_with_its_value_is_no_value_of_it() -> None:
    check_words(["--data.batch-size=4", "gs://b/run"])
    with pytest.raises(ConfigError, match=r"--data\.batch-size is gs://b/run"):
        check_words(["--data.batch-size", "gs://b/run"])


def test_a_bucket_needs_a_package_and_a_name(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    assert "--workdir: gs://b/r needs gcsfs; run `pip install 'mupax[gcs]'`" in refused(
        capsys, *["train", "lm-tiny", "--workdir", "gs://b/r"]
    )
    assert "the path: gs:// is no gs://bucket/folder" in refused(capsys, "eval", "gs://")


@pytest.mark.parametrize("name", ["[a]", "*", "a?b", "a#b"])
def test_a_bucket_has_no_place_that_reads_as_a_pattern(
    name: str, capsys: Capture, started: list[Config]
) -> None:
    assert f"--workdir: gs://b/{name} has " in refused(
        capsys, "train", "lm-tiny", "--workdir", f"gs://b/{name}"
    )
    assert not started


def test_an_address_is_no_cache_of_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUPAX_DATA", "gs://bucket/data")
    with pytest.raises(ConfigError, match="MUPAX_DATA is gs://bucket/data"):
        cache.root()


def test_weights_come_from_no_address_and_go_to_none(capsys: Capture) -> None:
    for words in ("import hf://org/model --out here", "export nowhere --out s3://bucket/weights"):
        assert main(words.split()) == 2
        assert "is no folder of this machine" in capsys.readouterr().err


def test_control_an_address_in_a_prompt_is_text(capsys: Capture) -> None:
    for words in (["--prompt", "https://host"], ["--prompt=https://host"]):
        assert "nowhere: no run and no weights there" in refused(
            capsys, "generate", "nowhere", *words
        )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"workdir": Path("runs/a")}, "workdir is .*; write the path as text, such as 'runs/a'"),
        ({"seed": "0"}, "seed is '0'; write a number of at least 0"),
    ],
)
def test_values_of_another_type_are_named_from_python(fields: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(RECIPES["lm-tiny"](), **fields)
