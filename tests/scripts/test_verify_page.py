"""Snippets of docs/howto/verify.md on real models: JAX's, and PyTorch's (`make parity`)."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from mupax.__main__ import main
from mupax.presets.verify.command import MISTAKES, STANDARD
from mupax.presets.verify.formats import huggingface

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "howto" / "verify.md").read_text()
TORCH, JAX = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def snippet(text: str, folder: Path) -> dict[str, Any]:
    """Run a snippet of the page in a folder, and return the names that it defines."""
    defined: dict[str, Any] = {}
    with contextlib.chdir(folder):
        exec(compile(text, "docs/howto/verify.md", "exec"), defined)
    return defined


def dumped(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / f"{name}.json").read_text())


def verify(folder: Path) -> tuple[int, list[str]]:
    """The exit code for small.json and large.json, and what it is wrong about."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        code = main(["verify", *(f"{folder}/{name}.json" for name in ("small", "large")), "--json"])
    (line,) = json.loads(shown.getvalue())["lines"]
    return code, [f["sentence"] for f in line["findings"] if f["severity"] == "fault"]


def test_the_page_has_every_mistake_that_is_recognized():
    rows = re.findall(
        r"^\| (.*?) \| (.*?) \|$", PAGE.partition("## Published mistakes")[2], re.MULTILINE
    )
    assert rows[1:] == [(mistake.name, mistake.source) for mistake in (*MISTAKES, STANDARD)]


def test_snippets_are_short():
    assert len([line for line in TORCH.splitlines() if line.strip()]) <= 30


def test_jaxs_snippet_measures_what_an_optax_chain_does(tmp_path: Path):
    import optax

    page = snippet(JAX, tmp_path)
    small = dumped(tmp_path, "small")
    large = dumped(tmp_path, "large")
    hidden = large["hidden.kernel"]
    assert (hidden["lr"], hidden["wd"]) == pytest.approx((1e-3 / 4, 0.4), rel=1e-4)
    for dump in (small, large):
        assert dump["read.kernel"]["lr"] == pytest.approx(1e-3, rel=1e-5)
    assert verify(tmp_path) == (0, [])

    params, _ = page["network"](256)
    flat = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(optax.linear_schedule(0.0, 1e-3, 4), weight_decay=0.1),
    )
    page["dump"](tmp_path / "large.json", params, flat, steps=5, optimizer="adamw")
    assert dumped(tmp_path, "large")["read.kernel"]["lr"] == pytest.approx(1e-3, rel=1e-4)
    code, sentences = verify(tmp_path)
    assert code == 1
    assert [s.split()[0].strip(":") for s in sentences] == ["hidden.kernel", "out.kernel"]
    assert "Write lr 0.00025 at width 256, not 0.001" in sentences[0]


@pytest.mark.parity
@pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch not installed; `make parity` does it"
)
@pytest.mark.parametrize(
    "mistake", ["", "a scheduler that overwrites group rates", "attention by 1/sqrt(d)"]
)
def test_torchs_snippet_on_a_transformer(mistake: str, tmp_path: Path):
    import torch
    from torch import nn

    dump = snippet(TORCH, tmp_path)["dump"]
    base = 32
    torch.manual_seed(0)
    for name, width in (("small", base), ("large", 4 * base)):
        times = width / base
        heads = 2
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, norm_first=True, batch_first=True
        )
        stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        network = nn.ModuleDict(
            {
                "tok_emb": nn.Embedding(97, width),
                "trunk": stack,
                "lm_head": nn.Linear(width, 97, bias=False),
            }
        )
        for key, p in network.named_parameters():
            if p.ndim == 2:
                table = "trunk" not in key
                nn.init.normal_(
                    p, std=0.02 if table else (0.5 if "linear2" in key else 1.0) * width**-0.5
                )
        wide = [p for key, p in network.named_parameters() if p.ndim == 2 and "trunk" in key]
        vectors = [
            p for key, p in network.named_parameters() if not (p.ndim == 2 and "trunk" in key)
        ]
        groups = [
            {"params": wide, "lr": 1e-3 / times, "weight_decay": 0.1 * times},
            {"params": vectors},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1)
        network["lm_head"](torch.ones(1, width)).sum().backward()
        optimizer.step()
        if "scheduler" in mistake:
            for group in optimizer.param_groups:  # what microsoft/mup's README warns of
                group["lr"] = 1e-3
        head_dim = width // heads
        attention = head_dim**-0.5 if "attention" in mistake else 1 / head_dim
        multipliers = {"lm_head.weight": 1 / times}
        path = tmp_path / f"{name}.json"
        dump(
            path,
            network,
            optimizer,
            multipliers,
            head_dim=head_dim,
            attention=attention,
            branch=1.0,
        )
    code, sentences = verify(tmp_path)
    if not mistake:
        assert (code, sentences) == (0, [])
        return
    assert code == 1
    expected = (
        "Multiply q.k by" if "attention" in mistake else "trunk.layers.*.self_attn.in_proj_weight"
    )
    assert expected in sentences[0]


@pytest.mark.parity
@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="transformers not installed; `make parity` does it",
)
@pytest.mark.parametrize(
    "kind", [kind for kind in huggingface.DEFAULTS if kind != "minicpm"]
)  # which is in no release
def test_fields_of_configs_are_those_of_transformers(kind: str, tmp_path: Path):
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[kind]()
    assert {
        name: getattr(config, name) for name in huggingface.DEFAULTS[kind]
    } == huggingface.DEFAULTS[kind]
    dump = huggingface.Config(
        json.loads(config.to_json_string(use_diff=False)), "config.json"
    ).dump()
    assert dump.layers == config.num_hidden_layers
    if kind == "minicpm3":
        assert dump.readout == pytest.approx(1 / config.logits_scaling)
        assert dump.head_dim == config.qk_head_dim


@pytest.mark.parity
def test_the_pytorch_model_of_other_code_trains_by_its_preset():
    torch = pytest.importorskip("torch")
    page = (Path(__file__).resolve().parents[2] / "docs" / "howto" / "other_code.md").read_text()
    (text,) = re.findall(r"```py\n(.*?)```", page, re.DOTALL)
    defined: dict[str, Any] = {}
    exec(compile(text, "docs/howto/other_code.md", "exec"), defined)
    torch.manual_seed(0)
    inputs = torch.randn(64, 64)
    targets = inputs[:, :10].argmax(-1)
    for width in (64, 256):
        model = defined["MLP"](width)
        optimizer = defined["adamw"](model, lr=2**-6)
        rates = {
            name: group["lr"]
            for name, group in zip(defined["SPECS"], optimizer.param_groups, strict=True)
        }
        assert rates["hidden.weight"] == pytest.approx(2**-6 * 64 / width)
        assert rates["read.weight"] == 2**-6
        losses = []
        for _ in range(20):
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.5 * losses[0]
