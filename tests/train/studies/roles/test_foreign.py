"""Three models that know nothing of mupax, and the command that finds their roles."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from mupax import presets, zoo
from mupax.presets.roles import MATRICES, ParamSpec, Role
from mupax.train.studies.roles import models
from mupax.zoo import configs
from mupax.zoo.decoder.model import Decoder
from tests.fixtures.commands import command, output
from tests.train.studies.roles import traced_roles

HAND = "examples.foreign_roles:by_hand"
SIZES = "embed=20,heads=4,head_dim=6,mlp=28,vocab=50,position=12"


def without_layers(name: str) -> ParamSpec:
    """The zoo's declaration of a matrix as one of a layer's own."""
    spec = MATRICES[name]
    return dataclasses.replace(spec, axes=tuple(axis for axis in spec.axes if axis != "layers"))


ATTENTION = ("query", "key", "value", "out")
PLACES = {
    "dicts of arrays by hand": ("h.{}.wq", "h.{}.wk", "h.{}.wv", "h.{}.wo", "h.{}.w1", "h.{}.w2"),
    "flax.linen": (
        *(f"MultiHeadDotProductAttention_{{0}}.{name}.kernel" for name in ATTENTION),
        "Dense_{2}.kernel", "Dense_{1}.kernel",
    ),
    "NNX: nnx.Linear, nnx.MultiHeadAttention": (
        *(f"attention.{{}}.{name}.kernel" for name in ATTENTION), "up.{}.kernel", "down.{}.kernel",
    ),
}  # fmt: skip
"""Names of each model's queries, keys, values, output, up and down, by layer.

flax.linen numbers what is called last first.
"""


@pytest.mark.parametrize("name", traced_roles.FOREIGN)
def test_every_role_is_found(name: str) -> None:
    roles = traced_roles.traced(name)
    assert roles.refused == {}
    matrices = (*(f"attention.{matrix}" for matrix in ATTENTION), "mlp.up", "mlp.down")
    for layer in (0, 1):
        for place, matrix in zip(PLACES[name], matrices, strict=True):
            path = place.format(layer, 2 * layer, 2 * layer + 1)
            assert roles.specs[path] == without_layers(f"block.{matrix}"), path


def test_norms_embeddings_and_readouts_of_others() -> None:
    hand, linen, classifier = (traced_roles.traced(name) for name in traced_roles.FOREIGN)
    assert {hand.specs[name].group for name in ("h.0.norm1", "h.1.norm2")} == {"block.norm_gain"}
    groups = [hand.specs[name].group for name in ("norm", "wpe", "wte")]
    assert groups == ["norm_gain", "position", "token_embedding"]
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
    key = definition.specs[PLACES[name][1].format(0)]
    presets.get("mup", base=sizes).scales(key, definition.sizes)


def test_the_command_on_a_function() -> None:
    out = output("models roles", HAND, "--sizes", SIZES)
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


def test_what_is_refused_makes_it_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "squared_model.py").write_text(SQUARED)
    monkeypatch.chdir(tmp_path)
    done = command("models roles squared_model:build --sizes embed=6,output=14")
    assert done.code == 1
    assert (
        "refused: square: two of its dimensions (6, 6) are the same axis, embed; "
        "give one of them a name and a number of its own in the sizes\n" in done.out
    )
    assert (
        "refused: patch: dimension 0, of size 5, grows with none of embed, output; name it among the sizes\n"
        in done.out
    )
    assert done.out.endswith("1 of 3 parameters found\n")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("return params, loss, ", "return params, ", "has to return three values: the shapes of"),
        ("return params, loss", "return params, 3", "has to return three values: the shapes of"),
        ("return params", "return {}", "the model has no parameters; return their shapes"),
        ('sizes["embed"], sizes["output"]', "6, 14", "the same shapes at all sizes; make it of"),
        (
            "return params,",
            "return shapes,",
            "patch is the bare shape (5, 6); write jax.ShapeDtypeStruct((5, 6), jnp.float32)",
        ),
        (
            "jax.ShapeDtypeStruct((2, 5), jnp.float32)",
            "(2, 5)",
            "the batch has the bare shape (2, 5); write jax.ShapeDtypeStruct((2, 5), jnp.float32), or jnp.int32 for",
        ),
        ("def build(sizes)", "build = 3\ndef other(sizes)", "squared_model:build is 3, and no"),
    ],
)
def test_a_function_that_builds_no_model_is_refused(
    old: str, new: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert old in SQUARED
    (tmp_path / "squared_model.py").write_text(SQUARED.replace(old, new))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "squared_model", raising=False)
    done = command("models roles squared_model:build --sizes embed=6,output=14")
    assert done.code == 2
    assert message in done.message
    assert "Traceback" not in done.err


@pytest.mark.parametrize("axis", ["layers", "encoder_layers"])
def test_layers_may_be_parameters_of_their_own(axis: str) -> None:
    def build(sizes: Mapping[str, int]) -> tuple[Any, Any, Any]:
        embed, mlp = sizes["embed"], sizes["mlp"]
        shapes = {"patch": (5, embed), "readout": (embed, 3)}
        for layer in range(sizes[axis]):
            shapes |= {f"up{layer}": (embed, mlp), f"down{layer}": (mlp, embed)}
        params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}

        def loss(p: Any, batch: jax.Array) -> jax.Array:
            x = batch @ p["patch"]
            for layer in range(sizes[axis]):
                x = x + jax.nn.gelu(x @ p[f"up{layer}"]) @ p[f"down{layer}"]
            return jnp.sum(jnp.tanh(x @ p["readout"]))

        return params, loss, jax.ShapeDtypeStruct((2, 5), jnp.float32)

    roles = models.roles_of(build, {"embed": 6, "mlp": 14, axis: 2})
    assert {name: roles.specs[name].group for name in ("up1", "down1")} == {
        "up1": "block.mlp_in",
        "down1": "block.mlp_out",
    }


def fields_of(config: Any) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of the zoo that declares its queries outside of blocks."""
    config = configs.CONFIGS["lm-proxy"]

    class Wrong(type(config)):  # pyright: ignore[reportUntypedBaseClass]
        def parameters(self) -> dict[str, ParamSpec]:
            specs = dict(super().parameters())
            query = "block.attention.query"
            return specs | {query: dataclasses.replace(specs[query], in_block=False)}

    model = Wrong(**fields_of(config))  # pyright: ignore[reportAbstractUsage]
    monkeypatch.setitem(configs.CONFIGS, "lm-wrong", model)


@pytest.mark.usefixtures("wrong")
def test_the_command_on_models_of_the_zoo() -> None:
    tiny = output("models roles lm-tiny")
    assert tiny.endswith("\n12 of 12 parameters found, 12 as declared\n")
    done = command("models roles lm-wrong")
    assert done.code == 1
    *_, differs, last = done.out.splitlines()
    assert differs.startswith(
        "differs: block.attention.query: in_block is declared False and traced True: its products with "
    )
    assert last == "12 of 12 parameters found, 11 as declared"
    done = command("models roles lm-wrong --json")
    assert done.code == 1
    out = json.loads(done.out)
    assert list(out["differs"]) == ["block.attention.query"]
    assert out["parameters"]["readout"]["fan_in"] == ["embed"]


@pytest.mark.usefixtures("wrong")
def test_the_coordinate_check_begins_with_declarations_of_ones_own() -> None:
    done = command("check lm-wrong --dry-run")
    assert done.code == 2
    assert "Wrong are not what its loss does; mend them:" in done.err
    assert (
        "block.attention.query: in_block is declared False and traced True: its products with"
        in done.err
    )
    assert command("check lm-proxy --dry-run").code == 0


class BoundedDecoder(Decoder):
    """Decoder that looks up the tanh of its table, which tracing refuses."""

    def embed(self, *args: Any, **kwargs: Any) -> jax.Array:
        return jnp.tanh(self.token[...])[args[0]]


@pytest.mark.parametrize("tied_wrongly", [False, True])
def test_a_tied_table_that_tracing_refuses_passes(
    tied_wrongly: bool, monkeypatch: pytest.MonkeyPatch
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

    model = Bounded(**{**fields_of(config), "tied": True})
    monkeypatch.setitem(configs.CONFIGS, "lm-bounded", model)
    roles = command("models roles lm-bounded")
    assert roles.code == 1
    assert ("refused: token:" in roles.out) is not tied_wrongly
    assert ("differs: tied readout:" in roles.out) is tied_wrongly
    check = command("check lm-bounded --dry-run")
    assert check.code == (2 if tied_wrongly else 0)
    assert ("tied readout: is declared" in check.err) is tied_wrongly


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("lm-tinyy", "did you mean lm-tiny"),
        ("lm-tiny --sizes embed=3", "--sizes is for a MODULE:FUNCTION"),
        (HAND, "examples.foreign_roles:by_hand needs --sizes, such as --sizes embed=32"),
        (f"{HAND} --sizes embed", "'embed' is no AXIS=N of at least 2; write each axis once"),
        (f"{HAND} --sizes embed=4,embed=5", "'embed=5' is no AXIS=N of at least 2"),
        (f"{HAND} --sizes width=4", "no logical axis is named 'width'"),
        (f"{HAND} --sizes embed=20", "asks for the size of 'vocab', which is not among embed; name it too"),
        (
            f"examples.foreign_roles:nothing --sizes {SIZES}",
            "examples.foreign_roles:nothing cannot be imported here",
        ),
        (f"no_such_module:build --sizes {SIZES}", "cannot be imported here: No module named"),
    ],
)  # fmt: skip
def test_bad_words_are_refused(words: str, message: str) -> None:
    done = command("models roles", words)
    assert done.code == 2
    assert message in done.message


def test_the_model_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = traced_roles.PAGE.read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "my_model.py").write_text(example)
    monkeypatch.chdir(tmp_path)
    (words,) = re.findall(r"(?m)^mupax (models roles my_model.*)", text)
    assert output(words).endswith("\n3 of 3 parameters found\n")
    (example,) = re.findall(r"(?m)^differs: .*", text)
    case = "decoder, rotary, gated, unrolled"
    config = traced_roles.CASES[case]
    declared = dict(config.parameters())
    query = "block.attention.query"
    declared[query] = dataclasses.replace(declared[query], role=Role.MLP_IN)
    differences = models.differences(config, traced_roles.traced(case), declared)
    assert example == f"differs: {query}: {differences[query]}"
    assert list(differences) == [query]
