"""All factors of a run, as data: preset x specs x sizes, and the optimizer's numbers, computed on the host and passed to the jitted step.

Factors are arguments, never constants of the program and never in a checkpoint: one compiled step serves every preset.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mupax.presets import Decay, ParamSpec, Preset, PresetError, Role, Scales
from mupax.presets.optimizers import OPTIMIZERS
from mupax.presets.roles import EMBEDDINGS, OWN
from mupax.presets.rule import Number, constant_power
from mupax.train.config.run import OptimizerConfig
from mupax.train.core.optimizer import OptimizerHyperparams
from mupax.zoo.definition import SHARED_INIT, Definition

TOLERANCE = 0.02
"""Relative difference of two rates that are the same: betas and Nesterov momentum change a first step by a common factor."""

LEAST_STEPS = 1024
"""Schedules have this length or the next power of two that holds the run, so that a run of more or fewer steps is the same program."""

ParamValues = dict[str, np.ndarray]
"""Name to float32 [] or, for a parameter stacked over layers, [layers]."""


class Factors(NamedTuple):
    """What a preset gives a model and its optimizer, one entry per parameter.

    `forward` has one per `mupax.zoo.definition.Factor`, but for a skip that is 1 everywhere: the program is then made without it.
    """

    multiplier: ParamValues
    lr: ParamValues
    eps: ParamValues
    weight_decay: ParamValues
    forward: ParamValues

    def moving(self, trained: Collection[str]) -> Factors:
        """These factors for a run that trains only some parameters: the others have multipliers, and no rate."""
        rates = {field: getattr(self, field) for field in ("lr", "eps", "weight_decay")}
        return self._replace(
            **{field: {n: x for n, x in of.items() if n in trained} for field, of in rates.items()}
        )


def resolve(
    preset: Preset, definition: Definition, optimizer: str = "adam", decay: Decay = "coupled"
) -> Factors:
    """What a preset gives a model: every number the step needs, on the host.

    Args:
        preset: from `presets.get`.
        definition: the model, from `mupax.zoo.definition.definition` or `mupax.zoo.definition.define`.
        optimizer: a name the preset has a rule for.
        decay: how weight decay enters the update.

    Raises:
        presets.PresetError: a role or optimizer without a rule, a size that a rule needs, or a constant of no group.
    """
    preset.family(optimizer)
    if preset.constants:
        from mupax.presets.constants import check

        tied = (
            declared["spec"]
            for declared in definition.factors.values()
            if declared["kind"] == "readout"
        )
        check(preset.constants, [*definition.specs.values(), *tied], preset.name)

    def one(name: str, spec: ParamSpec) -> Scales:
        try:
            return preset.scales(spec, definition.sizes, optimizer, decay)
        except PresetError as error:
            raise PresetError(f"{name}: {error}") from error

    scales = {name: one(name, spec) for name, spec in definition.specs.items()}
    forward = {
        name: _forward(preset, definition, declared)
        for name, declared in definition.factors.items()
    }

    def column(field: str) -> ParamValues:
        return {
            name: _number(getattr(s, field), definition.specs[name], definition)
            for name, s in scales.items()
        }

    columns = {field: column(field) for field in ("multiplier", "lr", "eps", "weight_decay")}
    needless = {
        n for n, v in forward.items() if definition.factors[n]["kind"] == "skip" and (v == 1).all()
    }
    return Factors(**columns, forward={n: v for n, v in forward.items() if n not in needless})


def layer_decayed(factors: Factors, definition: Definition, decay: float) -> Factors:
    """These factors with rates that fall towards the input (Clark et al. 2020, as BEiT and timm count layers).

    The readout and the norm before it keep theirs, block l of L has decay^(L - l), l from 0, what reads the input decay^(L + 1).
    Coupled weight decay falls with the rate; independent decay stays.

    Args:
        factors: of the run; names in `lr` are trained.
        definition: of its model, whose blocks are one stack (`Config` refuses others).
        decay: a block's factor, in (0, 1].
    """
    depth = definition.sizes[OWN.axis]
    blocks = decay ** (depth - np.arange(depth, dtype=np.float32))

    def one(name: str) -> np.ndarray:
        spec = definition.specs[name]
        if spec.stacked:
            return blocks
        return np.asarray(decay ** (depth + 1) if {spec.role, spec.of} & EMBEDDINGS else 1.0)

    return factors._replace(
        lr={name: np.asarray(lr * one(name), np.float32) for name, lr in factors.lr.items()}
    )


def init_stds(preset: Preset, definition: Definition) -> ParamValues:
    """Initial standard deviation (for gains: value) of every parameter, by name; and whose numbers keys start from, if not their own.

    Args:
        preset: gives the same for each of its optimizers, so that none is named.
        definition: whose specs the preset is evaluated for, at its sizes.

    Raises:
        PresetError: keys that start as queries and have not their shape.
    """
    # The same whatever the optimizer; a measured table knows only its own.
    first, sizes = preset.optimizers[0], definition.sizes
    stds = {
        name: preset.scales(spec, sizes, first).init_std for name, spec in definition.specs.items()
    }
    numbers = {name: _number(std, definition.specs[name], definition) for name, std in stds.items()}
    return {**numbers, **(_alike(preset, definition) if preset.key_as_query else {})}


def draw_of(name: str) -> np.ndarray:
    """What a parameter of this name is drawn with, uint32 []."""
    return np.asarray(zlib.crc32(name.encode()), np.uint32)


def _alike(preset: Preset, definition: Definition) -> ParamValues:
    queries = {name for name, spec in definition.specs.items() if spec.role is Role.QUERY}
    draws = {}
    for name, spec in definition.specs.items():
        if spec.role is Role.KEY:
            query = next(
                (of for of in queries if of.rpartition(".")[0] == name.rpartition(".")[0]), None
            )
            if query is None or definition.abstract[query].shape != definition.abstract[name].shape:
                raise PresetError(
                    f"{name}: {preset.label} starts keys as queries, and they are not as many; write num_kv_heads as num_heads"
                )
            draws[SHARED_INIT + name] = draw_of(query)
    return draws


def check_run(
    preset: Preset, definition: Definition, factors: Factors, config: OptimizerConfig
) -> None:
    """Refuse a model that has grown from the base in a way that the preset's rules do not cover.

    Args:
        preset: the run's.
        definition: its model.
        factors: `resolve` of the two.
        config: its optimizer.

    Raises:
        PresetError: widths have not grown together and something explodes for it, or the pull lr*wd of a parameter is not
            what it is at the base, unless a constant of the preset was named that asks for it.
    """
    if not preset.grows_evenly(definition.sizes):
        from mupax.presets.analysis.uneven import refuse_uneven

        refuse_uneven(preset, definition.sizes, config.name)
    decays = config.weight_decay != 0 and "weight_decay" in OPTIMIZERS[config.name].reads
    if not decays or {"decay", "decay_width"} & set(preset.choices) or preset.name == "measured":
        return
    for name, decay in factors.weight_decay.items():
        pull = decay * factors.lr[name] if config.decay == "coupled" else decay
        named = constant_power("decays", definition.specs[name], preset.constants)
        pull = pull / (named(preset.ratios(definition.sizes)) or 1.0)
        worst = float(pull.flat[np.argmax(np.abs(pull - 1))])
        if decay.any() and abs(worst - 1) > TOLERANCE:
            how = "give its rule a decay that keeps it"
            if preset.name == "completep":
                how = "write the constant decay=rate to keep it, or decay=table to accept it"
            raise PresetError(
                f"{name}: lr*wd is {worst:.3g} times its value at the base under {preset.label}, and drifts as the model grows; "
                f"{how} (or train without weight decay)"
            )


def _number(value: Number, spec: ParamSpec, definition: Definition) -> np.ndarray:
    shape = (definition.sizes[spec.blocks],) if spec.stacked else ()
    if np.shape(value) not in ((), shape):
        raise PresetError(
            f"{spec.group}: {np.size(value)} numbers for a parameter of {shape or 'no'} layers"
        )
    return np.broadcast_to(np.asarray(value, np.float32), shape).copy()


def _forward(preset: Preset, definition: Definition, declared: dict) -> np.ndarray:
    sizes, shape = definition.sizes, declared["shape"]
    match declared["kind"]:
        case "logits":
            value = preset.logit_scale(sizes)
        case "readout":
            value = preset.scales(declared["spec"], sizes, preset.optimizers[0]).multiplier
        case "skip" | "branch" as kind:
            which, stack = ("skip", "branch").index(kind), declared["stack"] or OWN
            where = () if stack == OWN else (stack,)
            value = [
                [
                    preset.residual_scale(sizes, i, branch, *where)[which]
                    for branch in stack.branches
                ]
                for i in range(shape[0])
            ]
        case kind:
            raise ValueError(
                f"no factor is of kind {kind!r}; write logits, skip, branch or readout"
            )
    return np.broadcast_to(np.asarray(value, np.float32), shape)


def hyperparams(config: OptimizerConfig, steps: int) -> OptimizerHyperparams:
    """The optimizer's numbers for a whole run, on the host; no weight decay where the optimizer reads none.

    Args:
        config: has them as numbers, and the schedule as a shape.
        steps: of the run; the schedule goes on at its last value.
    """
    table = schedule_table(config, steps)
    return OptimizerHyperparams(
        peak_lr=np.float32(config.peak_lr),
        schedule=np.pad(table, (0, length(steps) - steps), mode="edge"),
        weight_decay=np.float32(
            config.weight_decay if "weight_decay" in OPTIMIZERS[config.name].reads else 0.0
        ),
        eps=np.float32(config.eps),
    )


def length(steps: int) -> int:
    """How many numbers the schedule of a run of so many steps has."""
    return max(LEAST_STEPS, 1 << (steps - 1).bit_length())


def schedule_table(config: OptimizerConfig, steps: int) -> np.ndarray:
    """Learning rate over peak at every step, float32 [steps]: linear warm-up, then the named shape.

    Warm-up rises by 1/warmup_steps of the peak each step, from the first, and reaches it at its last, or from 0 and at the step
    after its last; a decay reaches `final_lr_fraction` at the step after the run's last.

    Args:
        config: names the shape; a warm-up longer than the run is cut off at its end.
        steps: of the run.
    """
    warmup = min(config.warmup_steps, steps)
    rest, final = max(steps - warmup, 1), config.final_lr_fraction
    match config.schedule:
        case "constant":
            shape = optax.constant_schedule(1.0)
        case "cosine":
            shape = optax.cosine_decay_schedule(1.0, rest, alpha=final)
        case "linear":
            shape = optax.linear_schedule(1.0, final, rest)
        case "wsd":
            tail = config.decay_steps if config.decay_steps is not None else max(rest // 5, 1)
            shape = optax.linear_schedule(1.0, final, tail, transition_begin=max(rest - tail, 0))
    ramp = (np.arange(warmup) + (not config.warmup_from_zero)) / max(warmup, 1)
    body = np.asarray(
        jax.vmap(shape)(jnp.arange(length(steps)))
    )  # optax's operations one by one: programs by length
    return np.concatenate([ramp, body[: steps - warmup]]).astype(np.float32)
