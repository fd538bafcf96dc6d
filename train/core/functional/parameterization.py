"""`parameterize`: apply a preset to a model of any framework, as pytrees for any training loop.

definition = zoo.define_function(model.apply, shapes, SPECS)
preset = presets.get("mup", base=BASE)
mup = parameterize(definition, preset, OptimizerConfig(peak_lr=0.01))
params = mup.init(0)                 # initial values, a tree like `shapes`
tx = mup.optimizer(steps=1000)       # optax chain: learning rate, decay and eps per parameter
logits = mup.apply(params, tokens)   # forward pass with multipliers
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from mupax.presets import Preset
from mupax.train.config.run import OptimizerConfig
from mupax.train.core.factors import Factors, check_run, hyperparams, init_stds, resolve
from mupax.train.core.optimizer import build
from mupax.zoo.definition import multiplied
from mupax.zoo.functional.definition import FunctionDefinition


class State(NamedTuple):
    """Optimizer state of the transformation that `Parameterization.optimizer` returns."""

    step: jax.Array
    """Number of steps done, int32 []."""
    chain: Any
    """State of the optimizer chain, over arrays by name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameterization:
    """Initialization, multipliers and optimizer that a preset gives to a model (`parameterize`).

    Attributes:
        definition: Model without parameters.
        preset: Preset relative to its base.
        config: Optimizer with its schedule.
        factors: Multiplier, learning rate, eps and decay of every parameter, by name.
        stds: Initial standard deviation (of gains: the value) of every parameter, by name.
    """

    definition: FunctionDefinition
    preset: Preset
    config: OptimizerConfig
    factors: Factors
    stds: dict[str, Any]

    @property
    def scales(self) -> Any:
        """`Scales` of every parameter in a tree like the model's, for your own optax chain.

        `Scales` has the factors on learning rate, eps and weight decay, the forward multiplier and
        the initial standard deviation.
        """
        sizes = self.definition.sizes
        name = self.config.name
        decay = self.config.decay
        scales = []
        for spec in self.definition.specs.values():
            scales.append(self.preset.scales(spec, sizes, name, decay))
        return jax.tree.unflatten(self.definition.structure, scales)

    def init(self, seed: jax.Array | int) -> Any:
        """Return initial parameters in a tree like the model's.

        Matrices and embeddings are Gaussian, gains have their value, and biases are 0.

        Args:
            seed: Seed from 0 to 2**32 - 1. It may be a traced array, uint32 [].
        """
        return self.definition.tree(self.definition.initialize(seed, self.stds))

    def forward(self, params: Any) -> Any:
        """Return the parameters that the model is called with, in a tree like the model's.

        Each is times its multiplier. Factors of the preset on attention logits and residual
        branches are multiplied into parameters, too. The multiplier of a tied readout is not.
        """
        arrays = multiplied(self.definition.arrays(params), self.factors.multiplier)
        return self.definition.forward(arrays, self.factors.forward)

    def apply(self, params: Any, *inputs: Any) -> Any:
        """Call the model with the preset's multipliers, and return its logits in float32.

        The model is called with `forward(params)`. Logits of a tied readout are also multiplied by
        the readout's multiplier.

        Args:
            params: Parameters as they are stored and trained, without multipliers.
            *inputs: Arguments of the model's function after the parameters, such as tokens [B, T].
        """
        arrays = self.definition.arrays(params)
        model = self.definition.model(arrays, self.factors.multiplier, self.factors.forward)
        return model(*inputs)

    def optimizer(
        self, steps: int, peak_lr: jax.typing.ArrayLike | None = None
    ) -> optax.GradientTransformation:
        """Return the config's optimizer, over trees like the model's.

        It applies the schedule, and the learning rate, decay and eps of every parameter. Its update
        raises `ValueError` if it gets no parameters.

        Args:
            steps: Number of steps of the run. After them the schedule keeps its last value.
            peak_lr: Peak learning rate. It may be traced, so that one program trains at many
                learning rates. Default: that of the config. The config's `adam_lr` stays.
        """
        specs = self.definition.specs
        matrix_steps = self.preset.matrix_steps(specs, self.definition.sizes, self.config.name)
        chain = build(self.config, specs, matrix_steps)
        # Inside a jitted function optax's schedule would be traced, and NumPy cannot read it.
        with jax.ensure_compile_time_eval():
            hyper = hyperparams(self.config, steps)
        if peak_lr is not None:
            hyper = hyper._replace(peak_lr=peak_lr)
        factors = self.factors
        if self.config.adam_peak is not None:
            # Imported only here, because other optimizers run without it.
            from mupax.train.core.muon import with_adam_lr

            lr = with_adam_lr(factors.lr, specs, self.config.adam_peak, hyper.peak_lr)
            factors = factors._replace(lr=lr)
        arrays = self.definition.arrays

        def init(params: Any) -> State:
            return State(jnp.zeros([], jnp.int32), chain.init(arrays(params)))

        def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, State]:
            if params is None:
                raise ValueError(
                    "the update reads the parameters: write tx.update(grads, state, params)"
                )
            new_updates: Any
            new_updates, chain_state = chain.update(
                arrays(updates),
                state.chain,
                arrays(params),
                factors=factors,
                hyper=hyper.at(state.step),
            )
            new_state = State(state.step + 1, chain_state)
            return self.definition.tree(new_updates, like=updates), new_state

        return optax.GradientTransformation(init, update)


def parameterize(
    definition: FunctionDefinition, preset: Preset, config: OptimizerConfig
) -> Parameterization:
    """Return the initialization, multipliers and optimizer of a model of any framework.

    They are those that a preset has for the model's sizes.

    Args:
        definition: Model from `mupax.zoo.define_function`.
        preset: Preset from `presets.get`, relative to a base.
        config: Name of the optimizer, peak learning rate, schedule, decay, eps and moments.

    Raises:
        presets.PresetError: The preset has no rule for the optimizer, a rule needs a size that the
            model does not have, the model has grown in a way that no rule covers, or the preset
            scales the residual stream itself.
    """
    factors = resolve(preset, definition, config.name, config.decay)
    check_run(preset, definition, factors, config)
    stds = init_stds(preset, definition)
    # Called for its errors only: it refuses factors that no parameter of the model can carry.
    jax.eval_shape(definition.forward, definition.abstract, factors.forward)
    return Parameterization(
        definition=definition, preset=preset, config=config, factors=factors, stds=stds
    )
