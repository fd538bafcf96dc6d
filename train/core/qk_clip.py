"""QK-clip: shrink query and key matrices of heads whose attention logits have become too large.

The rule is that of MuonClip (Kimi Team 2025, 2507.20534, section 2.1). S_h is the largest logit of
head h over the batch, before the update. After the optimizer's update, weight decay included, the
logits of the head are multiplied by

    gamma_h = min(1, tau / S_h)

by a factor gamma_h^(1/2) on the head's query matrix and on its key matrix, and on their biases.
A logit is a product of a query and a key, and both are linear in matrix and bias together, so any
factors a on the query and b on the key with a b = gamma_h shrink every logit by gamma_h. A head
with S_h <= tau has a = b = 1.

If several query heads share a key head, a factor on the key would shrink the logits of all of them.
The factors are then gamma_h on the query and 1 on the key, as the paper has them for the rotary key
that all heads share.

Moments of the optimizer are not scaled, and the moving average of the parameters is taken after the
clip. The rule reads nothing of earlier steps, so a checkpoint holds nothing of it.

Shape suffixes: L layers, H query heads, K key heads.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping

import jax
import jax.numpy as jnp

from mupax.presets.roles import ParamSpec, Role
from mupax.zoo.configs import ConfigError
from mupax.zoo.definition import Definition
from mupax.zoo.layers.linear import readout_method


def param_scales(
    attention_logits: Mapping[str, jax.Array], tau: jax.Array, definition: Definition
) -> dict[str, jax.Array]:
    """Return the factors of the query and key matrices and of their biases, by name, float32.

    With S the largest logit of a head, queries and keys get sqrt(tau / max(S, tau)) each. If query
    heads share key heads, queries get tau / max(S, tau) and keys have no entry. A factor has the
    rank of its parameter, with a size of 1 along all axes but layers and heads.

    Args:
        attention_logits: Largest logits [L, H] by the name of the attention, "block.attention".
        tau: Largest logit that a head keeps, float32 [].
    """
    shares_keys = definition.sizes["kv_heads"] != definition.sizes["heads"]
    scales = {}
    for attention, largest_LH in attention_logits.items():
        # Not min(1, tau / S): that is negative if the largest logit S is below 0.
        gamma_LH = tau / jnp.maximum(largest_LH, tau)
        for name in _names(definition.specs, Role.QUERY, attention):
            # Several heads read a shared key, so only the queries are scaled, by the whole factor.
            query_factor_LH = gamma_LH if shares_keys else jnp.sqrt(gamma_LH)
            scales[name] = _expanded(query_factor_LH, definition.specs[name], "heads")
        if shares_keys:
            continue
        for name in _names(definition.specs, Role.KEY, attention):
            scales[name] = _expanded(jnp.sqrt(gamma_LH), definition.specs[name], "kv_heads")
    return scales


def _names(specs: Mapping[str, ParamSpec], role: Role, attention: str) -> list[str]:
    """Return the names of an attention's matrix with a role, and of the bias of that matrix.

    Args:
        attention: Name of the attention, such as "block.attention".
    """
    names = []
    for name, spec in specs.items():
        scope = name.rpartition(".")[0]
        if scope == attention and role in (spec.role, spec.of):
            names.append(name)
    return names


def _expanded(factor_LH: jax.Array, spec: ParamSpec, head_axis: str) -> jax.Array:
    """Return factors [L, H] in a shape that broadcasts against a parameter.

    Args:
        spec: Declaration of the parameter, whose first axis counts layers.
        head_axis: Logical axis of the parameter that counts heads.
    """
    shape = [1] * len(spec.axes)
    shape[0] = factor_LH.shape[0]
    shape[spec.axes.index(head_axis)] = factor_LH.shape[1]
    return factor_LH.reshape(shape)


def check_measures(definition: Definition, setting: str) -> None:
    """Refuse a model whose attention logits cannot be measured.

    Args:
        setting: Config field that asks for the logits, such as `optimizer.qk_clip`.

    Raises:
        ConfigError: The module has no method `readout_inputs` with an argument `measure_logits`.
    """
    # The first node of a graph is the model itself.
    module = getattr(definition.graph.nodes[0], "type", None)
    read = readout_method(module)
    if read is None or "measure_logits" not in inspect.signature(read).parameters:
        name = getattr(module, "__name__", "of this run")
        raise ConfigError(
            f"{setting} needs attention logits, and those of the model {name} cannot be measured; "
            "leave it out"
        )


def check_trained(definition: Definition, trained: Collection[str]) -> None:
    """Refuse QK-clip for a model with frozen query or key parameters.

    Args:
        trained: Names of the parameters that are not frozen.

    Raises:
        ConfigError: A parameter that the clip may scale is frozen. The text names it.
    """
    for name, spec in definition.specs.items():
        is_matrix_or_bias = spec.role in (Role.QUERY, Role.KEY, Role.BIAS)
        is_scaled = {spec.role, spec.of} & {Role.QUERY, Role.KEY}
        if is_matrix_or_bias and is_scaled and name not in trained:
            raise ConfigError(
                f"optimizer.qk_clip shrinks query and key matrices, and {name} is frozen; "
                "leave it out"
            )
