"""`mupax models`: the list, one model's tree, and what a wrong word is answered."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest

from mupax.__main__ import main
from mupax.terminal import si
from mupax.zoo import families
from mupax.zoo.configs import CONFIGS

pytestmark = pytest.mark.core


@pytest.mark.parametrize("argv", [[], ["list"]])
def test_list_has_every_model(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", *argv]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert set(CONFIGS) < set(lines)
    assert lines["gpt2"].split()[2:7] == ["768", "12", "12", "64", "3072"]
    assert "124 M" in lines["gpt2"]
    assert "/ token" in lines["gpt2"]
    assert "/ image" in lines["vit-s16"]


def test_list_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == list(CONFIGS)
    for row in rows:
        model = CONFIGS[row["name"]]
        assert row["sizes"] == model.sizes()
        assert row["parameters"] == families.params(model)
        assert row["forward_flops"] == families.forward_flops(model)


def test_describe_prints_the_tree(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "describe", "lm-tiny"]) == 0
    out = capsys.readouterr().out
    lines = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert "layers embed* kv_heads head_dim" in lines["block.attention.key"]
    assert f"{families.params(CONFIGS['lm-tiny']):,}" in lines["total"]


@pytest.mark.parametrize("name", ["vit-tiny", "lm-proxy", "bordelon-vit"])
def test_describe_as_json_is_the_built_model(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "describe", name, "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    sizes = CONFIGS[name].sizes()
    assert row["tree"]
    for leaf in row["tree"]:
        assert leaf["shape"] == [sizes[axis] for axis in leaf["axes"]]
        assert leaf["count"] == math.prod(leaf["shape"])
        assert set(leaf["fan_in"]) <= set(leaf["axes"])
    assert sum(leaf["count"] for leaf in row["tree"]) == row["parameters"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["describe", "gpt3"], "did you mean gpt2"),
        (["describe"], "this needs MODEL|RECIPE|FILE"),
        (["describe", "gpt2", "lm-tiny"], "nothing takes the word 'lm-tiny'"),
        (["describ", "gpt2"], "did you mean describe?"),
        (["gpt2"], "mupax models describe gpt2"),
        (["list", "gpt2"], "nothing takes the word 'gpt2'"),
        (["--jsn"], "no flag is named --jsn; did you mean --json?"),
        (["describe", "gpt2", "--deep"], "no flag is named --deep"),
    ],
)
def test_a_wrong_word_is_answered(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", *argv]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert len(err.splitlines()) <= 10
    assert not out


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--help"]) == 0
    assert "describe  print every parameter of a model" in capsys.readouterr().out


def test_the_list_imports_no_jax() -> None:
    code = "import sys; from mupax.zoo.__main__ import main; main([]); print({'jax', 'flax', 'numpy'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "set()"


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1.00 k"),
        (26_400, "26.4 k"),
        (999_600, "1.00 M"),
        (124_430_592, "124 M"),
        (3.2e18, "3200000 T"),
    ],
)
def test_si(number: float, text: str) -> None:
    assert si(number) == text
