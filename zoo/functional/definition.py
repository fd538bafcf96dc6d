"""`define_function`: a model of any framework as a `Definition`, from its forward pass, its arrays and their declarations.

The model itself knows nothing of parameterizations. What a preset sets in the forward pass acts through parameters: the scale of
attention logits through the queries', that of a residual branch through what writes into the stream, a tied readout's on the logits.
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
"""(parameters, *inputs) -> logits."""
_WRITES = {Role.ATTENTION_OUT: 0, Role.MLP_OUT: 1, Role.EXPERT_OUT: 1}
"""What writes a branch into the stream, and the number of its branch."""


@dataclasses.dataclass(frozen=True)
class FunctionDefinition(Definition):
    """A `Definition` whose model is a function of a pytree.

    Attributes:
        function: (parameters, *inputs) -> logits.
        structure: of the tree that it takes.
        shapes: of its arrays, by name; `abstract` has them by the axes of their declarations.
        logit_scale: what the model multiplies q.k by itself.
        inside: (parameters, *inputs) -> activations by name, or None.
    """

    function: Apply
    structure: Any
    shapes: dict[str, tuple[int, ...]]
    logit_scale: float
    inside: Apply | None

    def arrays(self, params: Any) -> Arrays:
        """The arrays of a tree by name, each in the shape that its axes say.

        Raises:
            PresetError: a tree of other arrays than the declared ones.
        """
        leaves = tree.named_leaves(params)
        for name in sorted(leaves.keys() ^ self.specs.keys()):
            raise PresetError(
                f"{name} is in {'the tree' if name in leaves else 'the model'} alone; give all parameters"
            )
        return {name: jnp.reshape(leaves[name], self.abstract[name].shape) for name in self.specs}

    def tree(self, arrays: Mapping[str, Any], like: Any = None) -> Any:
        """The tree that has these arrays, in the model's own shapes.

        Args:
            arrays: by name.
            like: a tree of the kind to make; that of the model unless given.
        """
        structure = self.structure if like is None else jax.tree.structure(like)
        return jax.tree.unflatten(
            structure, [jnp.reshape(arrays[n], shape) for n, shape in self.shapes.items()]
        )

    def forward(self, params: Mapping[str, Any], factors: Mapping[str, Any]) -> Any:
        """The tree that the function is called with.

        Args:
            params: arrays by name, multipliers already in them.
            factors: numbers of the forward pass by name.

        Raises:
            PresetError: a preset that scales the stream itself, which no parameter can do.
        """
        if "skip" in factors:
            raise PresetError(
                "this preset scales the residual stream itself, which no parameter does; take another preset"
            )
        acting = dict(params)
        if "logits" in factors:
            for name in _holders(self.specs, Role.QUERY):
                acting[name] = _times(acting[name], factors["logits"] / self.logit_scale)
        for role, branch in _WRITES.items() if "branch" in factors else ():
            for name, layer in _layers(self.specs, role, self.sizes[OWN.axis]).items():
                acting[name] = _times(acting[name], factors["branch"][layer, branch])
        return self.tree(acting)

    def bind(
        self, params: Mapping[str, Any], factors: Mapping[str, Any], *, layout: Layout = ONE_DEVICE
    ) -> Any:
        """The model with these numbers, a function of its inputs.

        Args:
            params: arrays by name, multipliers already in them.
            factors: numbers of the forward pass by name.
            layout: not read; the compiler splits what a function computes.
        """
        del layout
        acting, readout = self.forward(params, factors), factors.get("readout")

        def model(*inputs: Any) -> jax.Array:
            logits = self.function(acting, *inputs)
            return (logits if readout is None else logits * readout).astype(jnp.float32)

        if self.inside is not None:
            model.internals = lambda *inputs: self.inside(acting, *inputs)  # pyright: ignore
        return model

    def model(
        self,
        params: Mapping[str, jax.Array],
        multipliers: Arrays,
        factors: Arrays,
        *,
        layout: Layout = ONE_DEVICE,
    ) -> Any:
        """The model with every parameter taken as multiplier * w.

        Args:
            params: as they are stored, w.
            multipliers: float32 [] or [layers], by the same names.
            factors: numbers of the forward pass by name.
            layout: as `bind`.
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
    """A model of any framework, without its numbers.

    Args:
        function: `(parameters, *inputs) -> logits [..., vocab or classes]`, such as `model.apply` of linen.
        params: the pytree that it takes, of arrays or of their shapes (`jax.eval_shape`): dicts, Equinox modules, an `nnx.State`.
        specs: declaration of every array, by name or pattern, or as a function of the name (`mupax.zoo.functional.tree`).
        sizes: of axes that no array shows: "layers" where a model has blocks, "heads" where a dimension is heads * head_dim.
        logit_scale: what the model multiplies q.k by itself; head_dim^-1/2 unless given, as all frameworks do.
        tied_readout: the declaration of a readout that is the embedding's table.
        internals: `(parameters, *inputs) -> activations by name` for the coordinate check: `embedding` [B, T, D], `residual` [L, B, T, D].

    Raises:
        PresetError: an array without declaration, a declaration without array, or one that does not fit; blocks without their number.
    """
    leaves = tree.named_leaves(params)
    declared = tree.declarations(leaves, specs)
    shapes = {name: tuple(leaf.shape) for name, leaf in leaves.items()}
    of_axes = tree.sizes(shapes, declared, sizes or {})
    abstract = {
        name: jax.ShapeDtypeStruct(
            tuple(of_axes[axis] for axis in declared[name].axes), jnp.dtype(leaf.dtype)
        )
        for name, leaf in leaves.items()
    }
    factors = _factors(declared, of_axes, tied_readout)
    own_scale = of_axes.get("head_dim", 1) ** -0.5 if logit_scale is None else logit_scale
    return FunctionDefinition(
        graph=nnx.graphdef(nnx.Module()), specs=declared, abstract=abstract, factors=factors, sizes=of_axes, function=function,
        structure=jax.tree.structure(params), shapes=shapes, logit_scale=own_scale, inside=internals,
    )  # fmt: skip


def _factors(
    specs: Mapping[str, ParamSpec], sizes: Mapping[str, int], tied: ParamSpec | None
) -> dict[str, dict[str, Any]]:
    """What a preset sets in the forward pass of such a model, as `Definition.factors` has it."""
    factors: dict[str, dict[str, Any]] = {}
    blank = {"spec": None, "stack": None}
    if tied is not None:
        factors["readout"] = {"kind": "readout", "shape": (), **blank, "spec": tied}
    if any(spec.role is Role.QUERY for spec in specs.values()):
        factors["logits"] = {"kind": "logits", "shape": (), **blank}
        _holders(specs, Role.QUERY)
    if inside := [name for name, spec in specs.items() if spec.in_block]:
        if OWN.axis not in sizes:
            raise PresetError(
                f"{inside[0]} is in a residual block; write how many blocks there are: sizes={{'layers': ...}}"
            )
        if not any(spec.role in _WRITES for spec in specs.values()):
            raise PresetError(
                f"{inside[0]} is in a residual block, and no parameter writes into the stream; declare what does as "
                "Role.ATTENTION_OUT or Role.MLP_OUT"
            )
        factors |= {
            kind: {"kind": kind, "shape": (sizes[OWN.axis], 2), **blank}
            for kind in ("skip", "branch")
        }
        for role in _WRITES:
            _layers(specs, role, sizes[OWN.axis])
    return factors


def _holders(specs: Mapping[str, ParamSpec], role: Role) -> list[str]:
    """The parameters that scale what a matrix of this role writes: itself and its bias, or the gain after it where there is one."""
    matrices, biases, gains = (
        [name for name, spec in specs.items() if test(spec)]
        for test in (
            lambda spec: spec.role is role,
            lambda spec: spec.of is role and spec.role is Role.BIAS,
            lambda spec: spec.of is role and spec.role is Role.NORM_GAIN,
        )
    )
    if gains and biases:
        raise PresetError(
            f"{gains[0]} scales what {biases[0]} is added to, or is added to by it: the preset's scale would be on the wrong side of "
            "one; leave the bias out of the model"
        )
    return gains or [*matrices, *biases]


def _layers(specs: Mapping[str, ParamSpec], role: Role, depth: int) -> dict[str, Any]:
    """Name to the layers that an array is of, of every holder in a block: all where it is stacked, else by the numbers in names."""
    layers: dict[str, Any] = {}
    groups: dict[str, list[str]] = {}
    for name in (name for name in _holders(specs, role) if specs[name].in_block):
        groups.setdefault(specs[name].group, []).append(name)
    for members in groups.values():
        if all(specs[name].stacked for name in members):
            layers |= dict.fromkeys(members, slice(None))
            continue
        if len(members) % depth:
            raise PresetError(
                f"{members[0]}: {len(members)} such parameters in {depth} layers; write sizes={{'layers': ...}}"
            )
        members.sort(
            key=lambda name: [
                int(word) if word.isdigit() else word for word in re.split(r"(\d+)", name)
            ]
        )
        layers |= {name: i * depth // len(members) for i, name in enumerate(members)}
    return layers


def _times(array: jax.Array, factor: jax.Array) -> jax.Array:
    return ScaledParam(array, jnp.asarray(factor)).array()
