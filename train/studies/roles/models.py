"""What is traced: a model of the zoo, or anyone's `build(sizes)`, at a base and with every size changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from mupax.presets.roles import AXES, ParamSpec, PresetError
from mupax.train.core.loss import cross_entropy, cross_entropy_from_logits
from mupax.train.studies.roles.deduce import Roles, Sample, deduce
from mupax.train.studies.roles.interpret import trace
from mupax.zoo.definition import Definition, definition
from mupax.zoo.families import ConfigError, ModelConfig
from mupax.zoo.functional.tree import named_leaves
from mupax.zoo.partition import ONE_DEVICE, Layout

BATCH = 2
_ALONE = {
    "head_dim": "heads_dim", "num_kv_heads": "kv_heads", "encoder_depth": "encoder_blocks", "target_len": "targets",
}  # fmt: skip
"""Fields that follow others unless given, and what they then are."""
_TOGETHER = (("num_heads", "num_kv_heads"), ("image_size", "patch_size"))


class Build(Protocol):
    """A model of one's own: (sizes) to its parameters' shapes, loss(params, batch), and the batch's shapes."""

    def __call__(self, sizes: Mapping[str, int], /) -> tuple[Any, Callable[[Any, Any], jax.Array], Any]: ...


class _Sizes(dict[str, int]):
    def __missing__(self, axis: str) -> int:
        raise PresetError(f"the model asks for the size of {axis!r}, which is not among {', '.join(self)}; name it too")


def roles_of(build: Build, sizes: Mapping[str, int]) -> Roles:
    """Declarations of a model of one's own, from its loss.

    Args:
        build: makes it at any sizes; shapes (`jax.ShapeDtypeStruct`) do, nothing is computed.
        sizes: of the base, by logical axis (`mupax.presets.roles.AXES`); each is doubled alone.

    Raises:
        PresetError: an axis that there is none of, or a tree of another structure at other sizes.
    """
    for axis in sizes:
        if axis not in AXES:
            raise PresetError(f"no logical axis is named {axis!r}; the axes are {', '.join(AXES)}")
    sizes = _Sizes(sizes)
    params, loss, batch = build(sizes)
    samples = [Sample(sizes, _shapes(params))]
    for axis, size in sizes.items():
        other = _Sizes({**sizes, axis: 2 * size})
        samples.append(Sample(other, _shapes(build(other)[0])))
        if axis != "layers" and samples[-1].shapes.keys() != samples[0].shapes.keys():
            changed = sorted(samples[-1].shapes.keys() ^ samples[0].shapes.keys())
            raise PresetError(f"with {axis} {2 * size} the model has other parameters: {', '.join(changed[:3])}")
    shared = [s for s in samples if samples[0].shapes.keys() <= s.shapes.keys()]
    return deduce(trace(loss, params, batch), shared)


def _shapes(params: Any) -> dict[str, tuple[int, ...]]:
    # By the names of `define_function`, which takes the declarations: of an nnx.Variable without ".value".
    return {name: tuple(leaf.shape) for name, leaf in named_leaves(params).items()}


def roles_of_config(config: ModelConfig) -> Roles:
    """Declarations of a model of the zoo, from the loss that it trains with."""
    model = definition(config)
    example = {k: jax.ShapeDtypeStruct((BATCH, *a.shape), a.dtype) for k, a in config.example().items()}
    samples = [_sample(of) for of in (config, *variations(config))]
    # As for a CPU, where attention is made of operations: through a kernel nothing could be seen.
    cpu = Layout(Mesh(np.array(jax.devices("cpu")[:1]), "data"), {})
    graph = trace(loss_of(model, cpu), model.abstract, example)
    return deduce(graph, samples)


def loss_of(
    model: Definition, layout: Layout = ONE_DEVICE
) -> Callable[[Mapping[str, Any], Mapping[str, Any]], jax.Array]:
    """Return the loss of a model of the zoo, of parameters and a batch, every factor being 1.

    Args:
        model: taken apart.
        layout: of the devices that the loss is traced for.
    """
    ones = {name: np.ones(of["shape"], np.float32) for name, of in model.factors.items()}

    def loss(params: Mapping[str, Any], batch: Mapping[str, Any]) -> jax.Array:
        module: Any = model.bind(params, ones, layout=layout)
        inputs = {name: x for name, x in batch.items() if name not in ("inputs", "targets", "weights")}
        reader = getattr(module, "reading", None)
        if reader is None:
            return cross_entropy_from_logits(module(batch["inputs"], **inputs), batch["targets"], batch["weights"]).loss
        reading = reader(batch["inputs"], **inputs)
        sums = cross_entropy(reading, batch["targets"], batch["weights"], how="plain", layout=layout)
        return sums.loss if sums.routing is None else sums.loss + sums.routing.penalty

    return loss


def variations(config: ModelConfig) -> list[ModelConfig]:
    """The same model with every size that can be changed doubled, one at a time or two that must go together."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    alone = {name: getattr(config, of) for name, of in _ALONE.items() if name in values and values[name] is None}
    values |= alone
    counts = [(name,) for name, value in values.items() if type(value) is int or name == "mlp_ratio"]
    out = []
    for fields in (*counts, *_TOGETHER):
        changed = {name: 2 * values[name] for name in fields if values.get(name) is not None}
        try:
            other = dataclasses.replace(config, **alone | changed)
        except ConfigError:
            continue
        if other.sizes() != config.sizes():
            out.append(other)
    return out


def _sample(config: ModelConfig) -> Sample:
    """Sizes and shapes of a config, whose modules make every parameter so (`mupax.zoo.definition.Init.param`)."""
    sizes = config.sizes()
    shapes = {name: tuple(sizes[axis] for axis in spec.axes) for name, spec in config.parameters().items()}
    return Sample(sizes, shapes)


def differences(config: ModelConfig, roles: Roles, declared: Mapping[str, ParamSpec] | None = None) -> dict[str, str]:
    """What differs from declarations, by parameter, in words; what a gain starts at is in no loss and not compared.

    Args:
        config: of the model.
        roles: what its loss says.
        declared: in place of the config's declarations.
    """
    declared, out = config.parameters() if declared is None else declared, {}
    for name in sorted(declared.keys() | roles.specs.keys()):
        spec, other = declared.get(name), roles.specs.get(name)
        if spec is None:
            out[name] = f"is not declared: {roles.evidence[name]}"
        elif other is not None and (words := _fields(spec, other)):
            out[name] = f"{words}: {roles.evidence[name]}"
    if config.tied_readout != roles.tied:
        out["tied readout"] = f"is declared {config.tied_readout} and traced {roles.tied}"
    return out


def refuse_wrong_declarations(config: ModelConfig) -> None:
    """Raises PresetError where declarations of a model are not what its loss does; what tracing refuses is let through."""
    if differing := differences(config, roles_of_config(config)):
        lines = "\n".join(f"{name}: {words}" for name, words in differing.items())
        raise PresetError(f"the declarations of {config.family} are not what its loss does; mend them:\n{lines}")


def _fields(spec: ParamSpec, other: ParamSpec) -> str:
    names = [field.name for field in dataclasses.fields(spec) if field.name != "start"]
    pairs = [(name, getattr(spec, name), getattr(other, name)) for name in names]
    return "; ".join(f"{name} is declared {_text(a)} and traced {_text(b)}" for name, a, b in pairs if a != b)


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(value)})"
    return str(getattr(value, "value", value))
