"""Arrays of any pytree by name, read by the axes of their declarations; what does not fit is refused with what to write."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from mupax.presets import ParamSpec, PresetError, Role
from mupax.zoo.functional import tree
from mupax.zoo.functional.definition import define_function

HEAD = ("heads", "head_dim")
QUERY = ParamSpec(role=Role.QUERY, axes=("embed", *HEAD), fan_in=("embed",), in_block=True)
PATCH = ParamSpec(role=Role.PATCH_EMBEDDING, axes=("patch", "embed"), fan_in=("patch",))


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(3, 5, rngs=rngs)])
        self.drop = nnx.Dropout(0.1, rngs=rngs)


def test_a_name_is_the_path_and_a_variable_has_the_name_of_its_place():
    state = nnx.state(nnx.eval_shape(lambda: Net(nnx.Rngs(0))), nnx.Param)
    assert {name: leaf.shape for name, leaf in tree.named_leaves(state).items()} == {
        "layers.0.bias": (5,),
        "layers.0.kernel": (3, 5),
    }
    assert list(tree.named_leaves({"a": [shape(1), None], "b": {"value": shape(2)}})) == [
        "a.0",
        "b.value",
    ]


@pytest.mark.parametrize(
    ("shapes", "axes", "sizes"),
    [
        (
            (6, 10),
            QUERY.axes,
            {"embed": 6, "heads": 2, "head_dim": 5},
        ),  # heads and their dimension are one
        ((2, 2, 3, 7), PATCH.axes, {"patch": 12, "embed": 7}),  # three dimensions are one axis
        ((7, 3, 2, 2), PATCH.axes[::-1], {"patch": 12, "embed": 7}),
    ],
)
def test_axes_may_be_more_or_fewer_than_dimensions(shapes, axes, sizes):
    role, fan_in = (QUERY.role, ("embed",)) if "heads" in axes else (PATCH.role, ("patch",))
    spec = ParamSpec(role=role, axes=axes, fan_in=fan_in)
    axis_sizes = {axis: size for axis, size in sizes.items() if axis in ("heads", "embed")}
    assert tree.sizes({"w": shapes}, {"w": spec}, axis_sizes) == sizes


def refused(of: dict, specs, message: str, **sizes: int) -> None:
    with pytest.raises(PresetError, match=message):
        define_function(lambda params, x: x, of, specs, sizes=sizes)


def test_what_does_not_fit_is_refused():
    refused(
        {"f": jax.nn.relu}, {}, r"f is no array but a .*eqx\.filter\(model, eqx\.is_inexact_array\)"
    )
    refused(
        {"read": shape(3, 4)},
        {"reed": PATCH},
        r"read has no declaration; the nearest declared is 'reed'; write one",
    )
    refused(
        {"read": shape(3, 4)},
        lambda name: None,
        r"read has no declaration; write one: 'read': ParamSpec",
    )
    refused(
        {"read": shape(3, 4)},
        {"read": PATCH, "raed": PATCH},
        r"no parameter is named 'raed'; did you mean 'read'\?",
    )
    patterns = {"a": PATCH, "*": PATCH, "?b": QUERY}
    refused(
        {"a": shape(3, 4), "bb": shape(3, 4)},
        patterns,
        r"bb is declared by \* and \?b, differently; narrow one",
    )
    two = {"a": shape(3, 4), "b": shape(3, 5)}
    refused(two, {"*": PATCH}, r"axis 'embed' is 5 in b but 4 in a")
    refused(
        {"q": shape(6, 10)},
        {"q": QUERY},
        r"no other array shows the size of heads and head_dim; write sizes=",
        embed=6,
    )
    refused(
        {"q": shape(10, 6)},
        {"q": QUERY},
        r"q has shape \(10, 6\), and its axes .* are \(6, 2, 5\); name the axes",
        embed=6,
        heads=2,
        head_dim=5,
    )
    refused(
        {"q": shape(6, 2, 5)},
        {"q": QUERY},
        r"q is in a residual block; write how many blocks there are",
    )
    refused({"q": shape(6, 2, 5)}, {"q": QUERY}, r"no parameter writes into the stream", layers=2)


OUT = ParamSpec(role=Role.MLP_OUT, axes=("mlp", "embed"), fan_in=("mlp",), in_block=True)


def test_a_branch_is_scaled_in_all_arrays_of_its_own_layer():
    """Twelve layers of two matrices each, in the order of their numbers and not of their names."""
    names = [f"block_{layer}.{part}" for layer in range(12) for part in "ab"]
    abstract = {name: shape(3, 2) for name in sorted(names)}
    definition = define_function(lambda params: params, abstract, {"*": OUT}, sizes={"layers": 12})
    branch = jnp.stack([jnp.full(12, 100.0), jnp.arange(12.0)], axis=1)  # of attention and MLP
    ones = {name: jnp.ones((3, 2)) for name in names}
    scaled = definition.forward(ones, {"branch": branch})
    values = {name: float(scaled[name].mean()) for name in names}
    assert values == {name: float(name[6:-2]) for name in names}
    assert all(float(scaled[name].std()) == 0 for name in names)


def test_arrays_that_do_not_divide_into_layers_are_refused():
    leaves = {name: shape(3, 2) for name in "abc"}
    refused(leaves, {"*": OUT}, r"a: 3 such parameters in 2 layers; write sizes=", layers=2)


def test_a_scale_on_the_wrong_side_of_a_bias_is_refused():
    gain = ParamSpec(role=Role.NORM_GAIN, axes=("head_dim",), of=Role.QUERY)
    plain = ParamSpec(role=Role.QUERY, axes=QUERY.axes, fan_in=("embed",))
    leaves = {"q": shape(6, 2, 5), "b": shape(2, 5), "g": shape(5)}
    refused(leaves, {"q": plain, "b": plain.bias, "g": gain}, "g scales what b is added to")
