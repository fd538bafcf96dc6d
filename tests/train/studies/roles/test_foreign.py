"""Three models that know nothing of mupax, and the command that finds their roles."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from mupax import presets, zoo
from mupax.__main__ import main
from mupax.presets.roles import MATRICES, ParamSpec, Role
from mupax.train.studies.roles import models
from mupax.zoo import configs
from mupax.zoo.decoder.model import Decoder
from tests.train.studies.roles import traced_roles

HAND = "examples.foreign_roles:by_hand"
SIZES = "embed=20,heads=4,head_dim=6,mlp=28,vocab=50,position=12"


def without_layers(name: str) -> ParamSpec:
    """The zoo's declaration of a matrix as one of a layer's own."""
    spec = MATRICES[name]
    return dataclasses.replace(spec, axes=tuple(axis for axis in spec.axes if axis != "layers"))


PLACES = {
    "dicts of arrays by hand": ("h.{}.wq", "h.{}.wk", "h.{}.wv", "h.{}.wo", "h.{}.w1", "h.{}.w2"),
    "flax.linen": (
        *(f"MultiHeadDotProductAttention_{{}}.{name}.kernel" for name in ("query", "key", "value", "out")),
        "Dense_{1}.kernel", "Dense_{0}.kernel",
    ),
    "NNX: nnx.Linear, nnx.MultiHeadAttention": (
        *(f"attention.{{}}.{name}.kernel" for name in ("query", "key", "value", "out")), "up.{}.kernel", "down.{}.kernel",
    ),
}  # fmt: skip
"""Names of each model's queries, keys, values, output, up and down, by layer.

flax.linen numbers what is called last first.
"""


@pytest.mark.parametrize("name", traced_roles.FOREIGN)
def test_every_role_is_found(name: str) -> None:
    roles = traced_roles.traced(name)
    assert roles.refused == {}
    names = (
        "attention.query",
        "attention.key",
        "attention.value",
        "attention.out",
        "mlp.up",
        "mlp.down",
    )
    for layer in (0, 1):
        linen = (2 * layer, 2 * layer + 1)
        for place, matrix in zip(PLACES[name], names, strict=True):
            path = place.format(*linen) if "{1}" in place or "{0}" in place else place.format(layer)
            assert roles.specs[path] == without_layers(f"block.{matrix}"), path


def test_norms_embeddings_and_readouts_of_others() -> None:
    hand, linen, classifier = (traced_roles.traced(name) for name in traced_roles.FOREIGN)
    assert {hand.specs[name].group for name in ("h.0.norm1", "h.1.norm2")} == {"block.norm_gain"}
    assert [hand.specs[name].group for name in ("norm", "wpe", "wte")] == [
        "norm_gain",
        "position",
        "token_embedding",
    ]
    assert hand.tied is not None
    assert hand.tied.fan_in == ("embed",)
    attention = "MultiHeadDotProductAttention_0"
    assert linen.specs[f"{attention}.query_ln.scale"].group == "block.query.norm_gain"
    assert linen.specs[f"{attention}.key.bias"].group == "block.key.bias"
    assert linen.specs["LayerNorm_4.bias"].group == "norm_gain.bias"
    assert (linen.specs["Dense_4.kernel"], linen.tied) == (MATRICES["readout"], None)
    assert classifier.specs["patch.kernel"].group == "patch_embedding"
    assert classifier.specs["readout.bias"].axes == ("classes",)


@pytest.mark.parametrize(
    "name", ["dicts of arrays by hand", "NNX: nnx.Linear, nnx.MultiHeadAttention"]
)
def test_what_is_found_gives_the_model_a_preset(name: str) -> None:
    (build, sizes), roles = traced_roles.FOREIGN[name], traced_roles.traced(name)
    definition = zoo.define_function(
        lambda *_: None, build(sizes)[0], roles.specs, sizes={"layers": 2}, tied_readout=roles.tied
    )
    assert definition.specs == roles.specs
    assert definition.sizes == {**sizes, "kv_heads": sizes["heads"], "layers": 2}
    presets.get("mup", base=sizes).scales(
        definition.specs[PLACES[name][1].format(0)], definition.sizes
    )


def test_the_command_on_a_function(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "roles", HAND, "--sizes", SIZES]) == 0
    out = capsys.readouterr().out
    assert "contracts mlp of a hidden layer; its product ends the branch" in " ".join(out.split())
    assert out.endswith("\n21 of 21 parameters found\n")


SQUARED = """
import jax, jax.numpy as jnp

def build(sizes):
    E, F = sizes["embed"], sizes["output"]
    shapes = {"square": (E, E), "read": (E, F), "patch": (5, E)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    loss = lambda p, x: jnp.sum(jnp.tanh(x @ p["patch"] @ p["square"]) @ p["read"])
    return params, loss, jax.ShapeDtypeStruct((2, 5), jnp.float32)
"""


def test_what_is_refused_makes_it_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "squared_model.py").write_text(SQUARED)
    monkeypatch.chdir(tmp_path)
    assert main(["models", "roles", "squared_model:build", "--sizes", "embed=6,output=14"]) == 1
    out = capsys.readouterr().out
    assert (
        "refused: square: two of its dimensions (6, 6) are the same axis, embed; "
        "give one of them a name and a number of its own in the sizes\n" in out
    )
    assert (
        "refused: patch: dimension 0, of size 5, grows with none of embed, output; name it among the sizes\n"
        in out
    )
    assert out.endswith("1 of 3 parameters found\n")


@pytest.fixture
def wrong() -> Iterator[None]:
    """A model of the zoo that declares its queries as keys."""
    config = configs.CONFIGS["lm-proxy"]

    class Wrong(type(config)):  # pyright: ignore[reportUntypedBaseClass]
        def parameters(self) -> dict[str, ParamSpec]:
            specs = super().parameters()
            return {
                **specs,
                "block.attention.query": dataclasses.replace(
                    specs["block.attention.query"], in_block=False
                ),
            }

    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    configs.CONFIGS["lm-wrong"] = Wrong(**fields)  # pyright: ignore[reportAbstractUsage]
    yield
    del configs.CONFIGS["lm-wrong"]


@pytest.mark.usefixtures("wrong")
def test_the_command_on_models_of_the_zoo(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "roles", "lm-tiny"]) == 0
    assert capsys.readouterr().out.endswith("\n12 of 12 parameters found, 12 as declared\n")
    assert main(["models", "roles", "lm-wrong"]) == 1
    *_, differs, last = capsys.readouterr().out.splitlines()
    assert differs.startswith(
        "differs: block.attention.query: in_block is declared False and traced True: its products with "
    )
    assert last == "12 of 12 parameters found, 11 as declared"
    assert main(["models", "roles", "lm-wrong", "--json"]) == 1
    out = json.loads(capsys.readouterr().out)
    assert list(out["differs"]) == ["block.attention.query"]
    assert out["parameters"]["readout"]["fan_in"] == ["embed"]


@pytest.mark.usefixtures("wrong")
def test_the_coordinate_check_begins_with_declarations_of_ones_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["check", "lm-wrong", "--dry-run"]) == 2
    message = capsys.readouterr().err
    assert "Wrong are not what its loss does; mend them:" in message
    assert (
        "block.attention.query: in_block is declared False and traced True: its products with"
        in message
    )
    assert main(["check", "lm-proxy", "--dry-run"]) == 0


class BoundedDecoder(Decoder):
    """Decoder that looks up the tanh of its table, which tracing refuses."""

    def embed(self, *args: Any, **kwargs: Any) -> jax.Array:
        return jnp.tanh(self.token[...])[args[0]]


@pytest.mark.parametrize("tied_wrongly", [False, True])
def test_a_tied_table_that_tracing_refuses_passes(
    tied_wrongly: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Control: a wrong declaration of the tied readout is refused."""
    config = configs.get("lm-proxy")
    assert isinstance(config, configs.DecoderConfig)

    class Bounded(configs.DecoderConfig):
        def module(self, rngs: Any) -> Any:
            return Decoder(self, rngs) if tied_wrongly else BoundedDecoder(self, rngs)

        @property
        def tied_readout(self) -> ParamSpec | None:
            tied = super().tied_readout
            assert tied is not None
            return dataclasses.replace(tied, fan_in=("vocab",)) if tied_wrongly else tied

    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    monkeypatch.setitem(configs.CONFIGS, "lm-bounded", Bounded(**{**fields, "tied": True}))
    assert main(["models", "roles", "lm-bounded"]) == 1
    out = capsys.readouterr().out
    assert ("refused: token:" in out) is not tied_wrongly
    assert ("differs: tied readout:" in out) is tied_wrongly
    assert main(["check", "lm-bounded", "--dry-run"]) == (2 if tied_wrongly else 0)
    assert ("tied readout: is declared" in capsys.readouterr().err) is tied_wrongly


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lm-tinyy"], "did you mean lm-tiny"),
        (["lm-tiny", "--sizes", "embed=3"], "--sizes is for a MODULE:FUNCTION"),
        ([HAND], "examples.foreign_roles:by_hand needs --sizes, such as --sizes embed=32"),
        ([HAND, "--sizes", "embed"], "'embed' is no AXIS=N of at least 2; write each axis once"),
        ([HAND, "--sizes", "embed=4,embed=5"], "'embed=5' is no AXIS=N of at least 2"),
        ([HAND, "--sizes", "width=4"], "no logical axis is named 'width'"),
        (
            [HAND, "--sizes", "embed=20"],
            "asks for the size of 'vocab', which is not among embed; name it too",
        ),
        (
            ["examples.foreign_roles:nothing", "--sizes", SIZES],
            "examples.foreign_roles:nothing cannot be imported here",
        ),
        (["no_such_module:build", "--sizes", SIZES], "cannot be imported here: No module named"),
    ],
)
def test_bad_words_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", "roles", *words]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_the_model_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = traced_roles.PAGE.read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "my_model.py").write_text(example)
    monkeypatch.chdir(tmp_path)
    (command,) = (
        line for line in text.splitlines() if line.startswith("mupax models roles my_model")
    )
    assert main(command.split()[1:]) == 0
    assert capsys.readouterr().out.endswith("\n3 of 3 parameters found\n")
    (example,) = (line for line in text.splitlines() if line.startswith("differs: "))
    config = traced_roles.CASES["decoder, rotary, gated, unrolled"]
    declared = dict(config.parameters())
    declared["block.attention.query"] = dataclasses.replace(
        declared["block.attention.query"], role=Role.MLP_IN
    )
    roles = traced_roles.traced("decoder, rotary, gated, unrolled")
    (words,) = models.differences(config, roles, declared).values()
    assert example == f"differs: block.attention.query: {words}"
