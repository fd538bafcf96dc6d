"""Factors of a run as data: preset x specs x sizes, and the optimizer's hyperparameters.

They are computed on the host and passed to the jitted step as arguments. They are never constants
of the program and never in a checkpoint, so one compiled step serves every preset.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mupax.presets import Decay, ParamSpec, Preset, PresetError, Role
from mupax.presets.optimizers import OPTIMIZERS
from mupax.presets.roles import EMBEDDINGS, OWN
from mupax.presets.rule import Number, constant_power
from mupax.train.config.run import OptimizerConfig
from mupax.train.core.optimizer import OptimizerHyperparams
from mupax.zoo.definition import SHARED_INIT, Definition

TOLERANCE = 0.02
"""Relative difference up to which two learning rates, or two products lr*wd, count as equal."""

LEAST_STEPS = 1024
"""Smallest length of a schedule. A longer run has the next power of two.

Runs of different lengths can then share one program.
"""

ParamValues = dict[str, np.ndarray]
"""Values by parameter name: float32 [] or, for a parameter stacked over layers, [layers]."""


class Factors(NamedTuple):
    """Numbers that a preset gives to a model and its optimizer, one entry per parameter.

    `multiplier` scales the parameter in the forward pass. `lr`, `eps` and `weight_decay` multiply
    the optimizer's hyperparameters (`OptimizerHyperparams`).

    `forward` has the other factors of the forward pass, one entry per
    `mupax.zoo.definition.Factor`: on attention logits, residual branches, skip connections and the
    readout. A skip connection with a factor of 1 in all layers has no entry, so that the program
    has no multiplication for it.
    """

    multiplier: ParamValues
    lr: ParamValues
    eps: ParamValues
    weight_decay: ParamValues
    forward: ParamValues

    def moving(self, trained: Collection[str]) -> Factors:
        """Return the factors of a run that trains only some parameters.

        The other parameters keep their multiplier and have no `lr`, `eps` and `weight_decay`.
        """

        def only_trained(values: ParamValues) -> ParamValues:
            return {name: value for name, value in values.items() if name in trained}

        return self._replace(
            lr=only_trained(self.lr),
            eps=only_trained(self.eps),
            weight_decay=only_trained(self.weight_decay),
        )


def resolve(
    preset: Preset, definition: Definition, optimizer: str = "adam", decay: Decay = "coupled"
) -> Factors:
    """Return the factors that a preset gives to a model, on the host.

    Args:
        preset: Preset from `presets.get`.
        definition: Model from `mupax.zoo.definition.definition` or `mupax.zoo.definition.define`.
        optimizer: Name of an optimizer that the preset has a rule for.
        decay: Form of weight decay: `coupled` to the learning rate, or `independent`.

    Raises:
        presets.PresetError: The preset has no rule for a role or the optimizer, a rule needs a size
            that the model does not have, or a constant names a group that no parameter is in.
    """
    # Raises before any work if the preset has no rule for the optimizer.
    preset.family(optimizer)
    if preset.constants:
        from mupax.presets.constants import check

        specs = list(definition.specs.values())
        for declared in definition.factors.values():
            if declared["kind"] == "readout":
                specs.append(declared["spec"])  # readout that is tied to the embedding
        check(preset.constants, specs, preset.name)

    scales = {}
    for name, spec in definition.specs.items():
        try:
            scales[name] = preset.scales(spec, definition.sizes, optimizer, decay)
        except PresetError as error:
            raise PresetError(f"{name}: {error}") from error

    forward = {}
    for name, declared in definition.factors.items():
        value = _forward(preset, definition, declared)
        if declared["kind"] == "skip" and (value == 1).all():
            continue
        forward[name] = value

    columns = {}
    for field in ("multiplier", "lr", "eps", "weight_decay"):
        values = {}
        for name, scale in scales.items():
            value = getattr(scale, field)
            values[name] = _per_layer(value, definition.specs[name], definition)
        columns[field] = values
    return Factors(**columns, forward=forward)


def layer_decayed(factors: Factors, definition: Definition, decay: float) -> Factors:
    """Return factors whose learning rates fall towards the input (Clark et al. 2020).

    Layers are counted as in BEiT and timm: the readout and the norm before it keep their learning
    rate, block l of L has decay^(L - l) of it, with l from 0, and parameters that read the input
    have decay^(L + 1). Coupled weight decay falls with the learning rate. Independent decay stays.

    Args:
        factors: Factors of the run. The names in `lr` are trained.
        definition: Model whose blocks are one stack (`Config` refuses others).
        decay: Factor per block, in (0, 1].
    """
    depth = definition.sizes[OWN.axis]
    block_factors = decay ** (depth - np.arange(depth, dtype=np.float32))

    lr = {}
    for name, value in factors.lr.items():
        spec = definition.specs[name]
        if spec.stacked:
            factor = block_factors
        elif {spec.role, spec.of} & EMBEDDINGS:
            factor = np.asarray(decay ** (depth + 1))
        else:
            factor = np.asarray(1.0)
        lr[name] = np.asarray(value * factor, np.float32)
    return factors._replace(lr=lr)


def init_stds(preset: Preset, definition: Definition) -> ParamValues:
    """Return the initial standard deviation of every parameter by name. For gains, the value.

    If the preset starts keys as copies of queries, the result has a further entry for each key
    parameter, under `SHARED_INIT` + name. It is no standard deviation: it is the hash of the query
    parameter's name (`name_hash`), from which both then draw the same random numbers.

    Args:
        preset: Any preset. Its initialization does not depend on the optimizer.

    Raises:
        PresetError: The preset has no rule for a parameter, or keys start as queries and differ
            from them in shape.
    """
    # The result does not depend on the optimizer. A measured table knows one optimizer only, so the
    # first one of the preset is used.
    optimizer = preset.optimizers[0]
    stds = {}
    for name, spec in definition.specs.items():
        std = preset.scales(spec, definition.sizes, optimizer).init_std
        stds[name] = _per_layer(std, spec, definition)
    if preset.key_as_query:
        stds |= _shared_draws(preset, definition)
    return stds


def name_hash(name: str) -> np.ndarray:
    """Return the hash of a parameter's name that its random key is made from, uint32 []."""
    # `hash` of a text differs between processes, CRC-32 does not.
    return np.asarray(zlib.crc32(name.encode()), np.uint32)


def _shared_draws(preset: Preset, definition: Definition) -> ParamValues:
    """Return the name hash (`name_hash`) of the query parameter that each key parameter copies.

    The result is keyed by `SHARED_INIT` + name of the key parameter. A key parameter that has no
    query parameter of its shape in its module raises `PresetError`.
    """
    query_names = {}
    for name, spec in definition.specs.items():
        if spec.role is Role.QUERY:
            query_names[_module_of(name)] = name

    draws = {}
    for name, spec in definition.specs.items():
        if spec.role is not Role.KEY:
            continue
        query_name = query_names.get(_module_of(name))
        shape = definition.abstract[name].shape
        if query_name is None or definition.abstract[query_name].shape != shape:
            raise PresetError(
                f"{name}: {preset.label} starts keys as queries, and they are not as many; "
                "write num_kv_heads as num_heads"
            )
        draws[SHARED_INIT + name] = name_hash(query_name)
    return draws


def _module_of(name: str) -> str:
    """Return a parameter's dotted name without its last part: the path of its module."""
    return name.rpartition(".")[0]


def check_run(
    preset: Preset, definition: Definition, factors: Factors, config: OptimizerConfig
) -> None:
    """Refuse a model that has grown from the base in a way that the preset's rules do not cover.

    Args:
        factors: Result of `resolve` for this preset and model.

    Raises:
        PresetError: Widths have grown so unevenly that the change of an activation in one step
            becomes too large (`refuse_uneven`). Or the lr*wd of a parameter differs from that at
            the base. The second check is left out without weight decay, for the preset `measured`,
            and if the constant `decay` or `decay_width` was chosen.
    """
    if not preset.grows_evenly(definition.sizes):
        from mupax.presets.analysis.uneven import refuse_uneven

        refuse_uneven(preset, definition.sizes, config.name, definition.specs.values())

    decays = config.weight_decay != 0 and "weight_decay" in OPTIMIZERS[config.name].reads
    chosen = {"decay", "decay_width"} & set(preset.choices)
    if not decays or chosen or preset.name == "measured":
        return
    for name, decay in factors.weight_decay.items():
        # `pull` is lr*wd of this model over lr*wd of the base model, divided by the factor that the
        # preset's constants ask for.
        pull = decay
        if config.decay == "coupled":
            pull = decay * factors.lr[name]
        constant = constant_power("decays", definition.specs[name], preset.constants)
        # A constant of 0 turns decay off. `or 1.0` avoids a division by zero, and `decay.any()`
        # below is then False.
        pull = pull / (constant(preset.ratios(definition.sizes)) or 1.0)
        worst = float(pull.flat[np.argmax(np.abs(pull - 1))])
        if decay.any() and abs(worst - 1) > TOLERANCE:
            how = "give its rule a decay that keeps it"
            if preset.name == "completep":
                how = "write the constant decay=rate to keep it, or decay=table to accept it"
            raise PresetError(
                f"{name}: lr*wd is {worst:.3g} times its value at the base under {preset.label}, "
                f"and drifts as the model grows; {how} (or train without weight decay)"
            )


def _per_layer(value: Number, spec: ParamSpec, definition: Definition) -> np.ndarray:
    """Return a value as float32 [] or, for a stacked parameter, broadcast to [layers].

    Raises:
        PresetError: The value is neither a scalar nor one number per layer of the parameter.
    """
    shape = (definition.sizes[spec.blocks],) if spec.stacked else ()
    if np.shape(value) not in ((), shape):
        raise PresetError(
            f"{spec.group}: {np.size(value)} numbers for a parameter of {shape or 'no'} layers"
        )
    # A copy, because a broadcast array is a read-only view.
    return np.broadcast_to(np.asarray(value, np.float32), shape).copy()


def _forward(preset: Preset, definition: Definition, declared: dict) -> np.ndarray:
    """Return the value of one entry of `Factors.forward`, float32 of the declared shape.

    Args:
        declared: Declaration of the factor (`mupax.zoo.definition.Factor`).

    Raises:
        ValueError: The declared kind is not logits, skip, branch or readout.
    """
    sizes = definition.sizes
    shape = declared["shape"]
    match declared["kind"]:
        case "logits":
            value = preset.logit_scale(sizes)
        case "readout":
            value = preset.scales(declared["spec"], sizes, preset.optimizers[0]).multiplier
        case "skip" | "branch" as kind:
            index = ("skip", "branch").index(kind)
            stack = declared["stack"] or OWN
            stack_argument = () if stack == OWN else (stack,)
            value = []
            for layer in range(shape[0]):
                row = []
                for branch in stack.branches:
                    scale = preset.residual_scale(sizes, layer, branch, *stack_argument)
                    row.append(scale[index])
                value.append(row)
        case kind:
            raise ValueError(
                f"no factor is of kind {kind!r}; write logits, skip, branch or readout"
            )
    return np.broadcast_to(np.asarray(value, np.float32), shape)


def hyperparams(config: OptimizerConfig, steps: int) -> OptimizerHyperparams:
    """Return the optimizer's hyperparameters for a whole run, on the host.

    `weight_decay` is 0 for an optimizer that reads none. The schedule is padded with its last value
    to `length(steps)` entries.

    Args:
        config: Hyperparameters, and the name of the schedule.
        steps: Number of steps of the run. After them the schedule keeps its last value.
    """
    table = schedule_table(config, steps)
    weight_decay = config.weight_decay
    if "weight_decay" not in OPTIMIZERS[config.name].reads:
        weight_decay = 0.0
    return OptimizerHyperparams(
        peak_lr=np.float32(config.peak_lr),
        # Padded, so that runs of different lengths share one compiled program.
        schedule=np.pad(table, (0, length(steps) - steps), mode="edge"),
        weight_decay=np.float32(weight_decay),
        eps=np.float32(config.eps),
    )


def length(steps: int) -> int:
    """Return the length of the schedule array of a run: a power of two, at least `LEAST_STEPS`."""
    return max(LEAST_STEPS, 1 << (steps - 1).bit_length())


def schedule_table(config: OptimizerConfig, steps: int) -> np.ndarray:
    """Return the learning rate over its peak at every step, float32 [steps].

    A linear warm-up is followed by the named schedule. The warm-up rises by 1/warmup_steps per
    step. It starts at 1/warmup_steps and reaches the peak at its last step or, with
    `warmup_from_zero`, it starts at 0 and reaches the peak at the step after its last. A decay
    reaches `final_lr_fraction` at the step after the run's last.

    Args:
        config: Name and constants of the schedule. A warm-up longer than the run is cut off.
        steps: Number of steps of the run.
    """
    warmup = min(config.warmup_steps, steps)
    rest = max(steps - warmup, 1)
    final = config.final_lr_fraction
    match config.schedule:
        case "constant":
            schedule = optax.constant_schedule(1.0)
        case "cosine":
            schedule = optax.cosine_decay_schedule(1.0, rest, alpha=final)
        case "linear":
            schedule = optax.linear_schedule(1.0, final, rest)
        case "wsd":
            tail = config.decay_steps
            if tail is None:
                tail = max(rest // 5, 1)
            begin = max(rest - tail, 0)
            schedule = optax.linear_schedule(1.0, final, tail, transition_begin=begin)
    ramp = (np.arange(warmup) + (not config.warmup_from_zero)) / max(warmup, 1)
    # The padded length, because optax runs op by op and compiles a program for every length.
    body = np.asarray(jax.vmap(schedule)(jnp.arange(length(steps))))
    return np.concatenate([ramp, body[: steps - warmup]]).astype(np.float32)
