"""`define_function`: the `Definition` of a model written in any framework.

It is made from the model's forward pass, its arrays and their declarations. The model itself knows
nothing of parameterizations. What a preset sets in the forward pass therefore acts through
parameters: the scale of attention logits through those of the queries, the scale of a residual
branch through those that write into the stream. The scale of a tied readout acts on the logits.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mupax.presets.roles import OWN, ParamSpec, PresetError, Role
from mupax.zoo.definition import Arrays, Definition, ScaledParam, multiplied
from mupax.zoo.functional import tree
from mupax.zoo.partition import ONE_DEVICE, Layout

Apply = Callable[..., Any]
"""Function (parameters, *inputs) -> logits."""
_WRITES = {Role.ATTENTION_OUT: 0, Role.MLP_OUT: 1, Role.EXPERT_OUT: 1}
"""Index of the residual branch (0 attention, 1 MLP) by the role of the matrix that ends it."""


@dataclasses.dataclass(frozen=True)
class FunctionDefinition(Definition):
    """A `Definition` whose model is a function of a pytree.

    Attributes:
        function: Function (parameters, *inputs) -> logits.
        structure: Structure of the tree that the function takes.
        shapes: Shapes of the tree's arrays by name. In `abstract` the same arrays have one
            dimension for each axis of their declaration.
        logit_scale: Factor on q.k that the model itself applies.
        inside: Function (parameters, *inputs) -> activations by name, or `None`.
    """

    function: Apply
    structure: Any
    shapes: dict[str, tuple[int, ...]]
    logit_scale: float
    inside: Apply | None

    def arrays(self, params: Any) -> Arrays:
        """Return the arrays of a tree by name, reshaped to one dimension per declared axis.

        `tree` is the inverse.

        Raises:
            PresetError: If the tree does not have the declared arrays.
        """
        leaves = tree.named_leaves(params)
        for name in sorted(leaves.keys() ^ self.specs.keys()):
            owner = "the tree" if name in leaves else "the model"
            raise PresetError(f"{name} is in {owner} alone; give all parameters")
        return {name: jnp.reshape(leaves[name], self.abstract[name].shape) for name in self.specs}

    def tree(self, arrays: Mapping[str, Any], like: Any = None) -> Any:
        """Return the tree that the model's function takes, made of arrays by name.

        Args:
            arrays: Arrays by name, in any shape with the same number of entries.
            like: Tree whose structure the result has, with as many arrays in the same order. By
                default the result has the structure of the model's own tree.
        """
        structure = self.structure
        if like is not None:
            structure = jax.tree.structure(like)
        leaves = [jnp.reshape(arrays[name], shape) for name, shape in self.shapes.items()]
        return jax.tree.unflatten(structure, leaves)

    def forward(self, params: Mapping[str, Any], factors: Mapping[str, Any]) -> Any:
        """Return the tree that the function is called with, with forward multipliers folded in.

        Args:
            params: Arrays by name, already multiplied by their multipliers.
            factors: Forward multipliers by name. "logits" and "branch" are multiplied into
                parameters, "readout" is left to `bind`.

        Raises:
            PresetError: If the preset scales the residual stream itself, which no parameter can do.
        """
        # A preset changes a plain function only through its parameters. A parameter can scale a
        # branch, but not the residual stream itself.
        if "skip" in factors:
            raise PresetError(
                "this preset scales the residual stream itself, which no parameter does; take "
                "another preset"
            )
        scaled = dict(params)
        if "logits" in factors:
            for name in _holders(self.specs, Role.QUERY):
                scaled[name] = _times(scaled[name], factors["logits"] / self.logit_scale)
        if "branch" in factors:
            depth = self.sizes[OWN.axis]
            for role, branch in _WRITES.items():
                for name, layer in _layers(self.specs, role, depth).items():
                    scaled[name] = _times(scaled[name], factors["branch"][layer, branch])
        return self.tree(scaled)

    def bind(
        self, params: Mapping[str, Any], factors: Mapping[str, Any], *, layout: Layout = ONE_DEVICE
    ) -> Any:
        """Return the model with these values, a function *inputs -> float32 logits.

        If the definition has `inside`, the model has a method `internals` (*inputs -> activations).

        Args:
            params: Arrays by name, already multiplied by their multipliers.
            factors: Factors of attention logits, branches and a tied readout, as in `forward`.
            layout: Not read. The compiler splits what a function computes.

        Raises:
            PresetError: If the preset scales the residual stream itself.
        """
        del layout
        scaled_tree = self.forward(params, factors)
        readout = factors.get("readout")

        def model(*inputs: Any) -> jax.Array:
            logits = self.function(scaled_tree, *inputs)
            if readout is not None:
                logits = logits * readout
            return logits.astype(jnp.float32)

        if self.inside is not None:
            model.internals = lambda *inputs: self.inside(scaled_tree, *inputs)  # pyright: ignore
        return model

    def model(
        self,
        params: Mapping[str, jax.Array],
        multipliers: Arrays,
        factors: Arrays,
        *,
        layout: Layout = ONE_DEVICE,
    ) -> Any:
        """Return the model in which every parameter acts as multiplier * w.

        Args:
            params: Parameters w by name, as they are stored.
            multipliers: Multipliers by the same names, float32 [] or [layers].
            factors: Factors of attention logits, branches and a tied readout, as in `forward`.
            layout: Not read, as in `bind`.

        Raises:
            PresetError: If the preset scales the residual stream itself.
        """
        return self.bind(multiplied(params, multipliers), factors, layout=layout)


def define_function(
    function: Apply,
    params: Any,
    specs: tree.Specs,
    *,
    sizes: Mapping[str, int] | None = None,
    logit_scale: float | None = None,
    tied_readout: ParamSpec | None = None,
    internals: Apply | None = None,
) -> FunctionDefinition:
    """Return the definition of a model written in any framework, without its values.

    Args:
        function: `(parameters, *inputs) -> logits [..., vocab or classes]`, such as `model.apply`
            of linen.
        params: Pytree that the function takes, of arrays or their shapes (`jax.eval_shape`): dicts,
            Equinox modules, an `nnx.State`.
        specs: Declaration of every array, by name or pattern, or as a function of the name
            (`mupax.zoo.functional.tree`).
        sizes: Sizes of axes that no array shows: "layers" if the model has blocks, "heads" if a
            dimension is heads * head_dim.
        logit_scale: Factor on q.k that the model itself applies. Default: head_dim^-1/2, as in all
            frameworks.
        tied_readout: Declaration of a readout that shares the embedding's table.
        internals: `(parameters, *inputs) -> activations by name` for the coordinate check:
            `embedding` [B, T, D], `residual` [L, B, T, D].

    Raises:
        PresetError: If an array has no declaration or does not fit it, if a declaration matches no
            array, or if there are blocks but not their number.
    """
    leaves = tree.named_leaves(params)
    declared = tree.declarations(leaves, specs)
    shapes = {name: tuple(leaf.shape) for name, leaf in leaves.items()}
    axis_sizes = tree.sizes(shapes, declared, sizes or {})
    abstract = {}
    for name, leaf in leaves.items():
        shape = tuple(axis_sizes[axis] for axis in declared[name].axes)
        abstract[name] = jax.ShapeDtypeStruct(shape, jnp.dtype(leaf.dtype))
    # The preset's scale replaces the one of the model, which is divided out in `forward`.
    own_scale = logit_scale
    if own_scale is None:
        own_scale = axis_sizes.get("head_dim", 1) ** -0.5
    return FunctionDefinition(
        graph=nnx.graphdef(nnx.Module()),
        specs=declared,
        abstract=abstract,
        factors=_factors(declared, axis_sizes, tied_readout),
        sizes=axis_sizes,
        function=function,
        structure=jax.tree.structure(params),
        shapes=shapes,
        logit_scale=own_scale,
        inside=internals,
    )


def _factors(
    specs: Mapping[str, ParamSpec], sizes: Mapping[str, int], tied_readout: ParamSpec | None
) -> dict[str, dict[str, Any]]:
    """Return the metadata of the model's forward multipliers, in the form of `Definition.factors`.

    Raises:
        PresetError: If there are residual blocks and `sizes` lacks their number, if no parameter
            writes into the residual stream, or if no parameter can absorb a multiplier.
    """
    factors: dict[str, dict[str, Any]] = {}
    if tied_readout is not None:
        factors["readout"] = {"kind": "readout", "shape": (), "spec": tied_readout, "stack": None}
    if any(spec.role is Role.QUERY for spec in specs.values()):
        factors["logits"] = {"kind": "logits", "shape": (), "spec": None, "stack": None}
        # Called here only for its errors, so that they are raised when the model is defined.
        _holders(specs, Role.QUERY)

    in_block = [name for name, spec in specs.items() if spec.in_block]
    if not in_block:
        return factors
    if OWN.axis not in sizes:
        raise PresetError(
            f"{in_block[0]} is in a residual block; write how many blocks there are: "
            "sizes={'layers': ...}"
        )
    if not any(spec.role in _WRITES for spec in specs.values()):
        raise PresetError(
            f"{in_block[0]} is in a residual block, and no parameter writes into the stream; "
            "declare what does as Role.ATTENTION_OUT or Role.MLP_OUT"
        )
    depth = sizes[OWN.axis]
    for kind in ("skip", "branch"):
        factors[kind] = {"kind": kind, "shape": (depth, 2), "spec": None, "stack": None}
    for role in _WRITES:
        _layers(specs, role, depth)
    return factors


def _holders(specs: Mapping[str, ParamSpec], role: Role) -> list[str]:
    """Return the names of the parameters into which a factor on a role's output is multiplied.

    These are the gains after the role's matrices if there are any, otherwise the matrices and their
    biases.

    Raises:
        PresetError: If the matrices have both gains and biases.
    """
    matrices = []
    biases = []
    gains = []
    for name, spec in specs.items():
        if spec.role is role:
            matrices.append(name)
        elif spec.of is role and spec.role is Role.BIAS:
            biases.append(name)
        elif spec.of is role and spec.role is Role.NORM_GAIN:
            gains.append(name)
    if gains and biases:
        raise PresetError(
            f"{gains[0]} scales what {biases[0]} is added to, or is added to by it: the preset's "
            "scale would be on the wrong side of one; leave the bias out of the model"
        )
    # A norm between a matrix and its gain would undo a factor on the matrix.
    return gains or [*matrices, *biases]


def _layers(specs: Mapping[str, ParamSpec], role: Role, depth: int) -> dict[str, Any]:
    """Return the layer of every parameter into which a branch's scale is multiplied, by name.

    The parameters are those of residual blocks that `_holders` returns: the gains after the role's
    matrices if there are any, otherwise the matrices and their biases.

    The layer is an index into an axis of layers: `slice(None)` for a stacked array, which has all
    layers, otherwise a number. Arrays that are not stacked are sorted by the numbers in their
    names and split evenly over the layers, so that a layer may have several.

    Args:
        role: Role of the matrices that end the branch, such as `Role.MLP_OUT`.
        depth: Number of layers that arrays are split over if they are not stacked.

    Raises:
        PresetError: If the number of arrays that are not stacked is not a multiple of `depth`, or
            the matrices have both gains and biases.
    """
    groups: dict[str, list[str]] = {}
    for name in _holders(specs, role):
        if specs[name].in_block:
            groups.setdefault(specs[name].group, []).append(name)

    layers: dict[str, Any] = {}
    for members in groups.values():
        if all(specs[name].stacked for name in members):
            for name in members:
                layers[name] = slice(None)
            continue
        if len(members) % depth:
            raise PresetError(
                f"{members[0]}: {len(members)} such parameters in {depth} layers; write "
                "sizes={'layers': ...}"
            )
        for index, name in enumerate(sorted(members, key=_natural_order)):
            # A layer can have several such arrays, which then follow one another.
            layers[name] = index * depth // len(members)
    return layers


def _natural_order(name: str) -> list[int | str]:
    """Return a sorting key that orders numbers in names by value: block_2 before block_10."""
    words = re.split(r"(\d+)", name)
    return [int(word) if word.isdigit() else word for word in words]


def _times(array: jax.Array, factor: jax.Array) -> jax.Array:
    """Return the array multiplied by a factor, [] or [layers], in the array's dtype."""
    return ScaledParam(array, jnp.asarray(factor)).array()
