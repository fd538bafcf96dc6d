"""`parameterize`: what a preset gives a model of any framework, as the pytrees that its own training loop works with.

mup = parameterize(zoo.define_function(model.apply, shapes, SPECS), presets.get("mup", base=BASE), OptimizerConfig(peak_lr=0.01))
params = mup.init(0)                       # the initial values, a tree like `shapes`
tx = mup.optimizer(steps=1000)             # optax: rate, decay and eps of every parameter
logits = mup.apply(params, tokens)         # the forward pass, multipliers included
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from mupax.presets import Preset
from mupax.train.config.run import OptimizerConfig
from mupax.train.core import factors as of_preset
from mupax.train.core import optimizer as chains
from mupax.train.core.factors import hyperparams
from mupax.zoo.definition import multiplied
from mupax.zoo.functional.definition import FunctionDefinition


class State(NamedTuple):
    """State of `Parameterization.optimizer`: steps taken, int32 [], and the chain's over arrays by name."""

    step: jax.Array
    chain: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameterization:
    """A preset at the sizes of a model. Made by `parameterize`.

    Attributes:
        definition: the model.
        preset: relative to its base.
        config: the optimizer.
        factors: multipliers, rates, eps and decay of every parameter, by name.
        stds: initial standard deviation of every parameter (of gains the value), by name.
    """

    definition: FunctionDefinition
    preset: Preset
    config: OptimizerConfig
    factors: of_preset.Factors
    stds: dict[str, Any]

    @property
    def scales(self) -> Any:
        """A tree of the model's own kind with the `Scales` of every parameter: for an optax chain of one's own."""
        each = self.definition.specs.values()
        sizes, name, decay = self.definition.sizes, self.config.name, self.config.decay
        scales = [self.preset.scales(spec, sizes, name, decay) for spec in each]
        return jax.tree.unflatten(self.definition.structure, scales)

    def init(self, seed: jax.Array | int) -> Any:
        """Initial values, a tree of the model's own kind: gaussian matrices and embeddings, gains at their value, biases at 0."""
        return self.definition.tree(self.definition.initialize(seed, self.stds))

    def forward(self, params: Any) -> Any:
        """The parameters as the model shall be called with them: each times its multiplier."""
        arrays = multiplied(self.definition.arrays(params), self.factors.multiplier)
        return self.definition.forward(arrays, self.factors.forward)

    def apply(self, params: Any, *inputs: Any) -> Any:
        """Logits, float32: the model of `forward(params)`, times what a tied readout is multiplied by.

        Args:
            params: as they are stored and trained.
            *inputs: what the model's function takes beside them.
        """
        of, arrays = self.factors, self.definition.arrays(params)
        return self.definition.model(arrays, of.multiplier, of.forward)(*inputs)

    def optimizer(
        self, steps: int, peak_lr: jax.typing.ArrayLike | None = None
    ) -> optax.GradientTransformation:
        """The config's optimizer over trees of the model's own kind: schedule, rate, decay and eps of every parameter.

        Args:
            steps: of the run; the schedule keeps its last value.
            peak_lr: in place of the config's; it may be traced, so that one program trains at many rates.
        """
        chain = chains.build(self.config, self.definition.specs)
        with (
            jax.ensure_compile_time_eval()
        ):  # the schedule is a table on the host, also inside of a jitted function
            hyper = hyperparams(self.config, steps)
        hyper = hyper if peak_lr is None else hyper._replace(peak_lr=peak_lr)
        arrays = self.definition.arrays

        def init(params: Any) -> State:
            return State(jnp.zeros([], jnp.int32), chain.init(arrays(params)))

        def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, State]:
            if params is None:
                raise ValueError(
                    "the update reads the parameters: write tx.update(grads, state, params)"
                )
            moved: Any
            moved, after = chain.update(
                arrays(updates),
                state.chain,
                arrays(params),
                factors=self.factors,
                hyper=hyper.at(state.step),
            )
            return self.definition.tree(moved, like=updates), State(state.step + 1, after)

        return optax.GradientTransformation(init, update)


def parameterize(
    definition: FunctionDefinition, preset: Preset, config: OptimizerConfig
) -> Parameterization:
    """A preset at the sizes of a model of any framework.

    Args:
        definition: the model, from `mupax.zoo.define_function`.
        preset: from `presets.get`, relative to a base.
        config: the optimizer: its name, peak rate, schedule, decay, eps and moments.

    Raises:
        presets.PresetError: no rule for the optimizer, a size that a rule needs, or a model that has grown as no rule covers.
    """
    factors = of_preset.resolve(preset, definition, config.name, config.decay)
    of_preset.check_run(preset, definition, factors, config)
    stds = of_preset.init_stds(preset, definition)
    jax.eval_shape(
        definition.forward, definition.abstract, factors.forward
    )  # refuses what no parameter can do
    return Parameterization(
        definition=definition, preset=preset, config=config, factors=factors, stds=stds
    )
