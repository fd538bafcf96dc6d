"""Training for the figures, with observations between the steps.

The models are the zoo's, and the step is that of `train/`. One compiled program serves many seeds
and presets. Models have the form of Bordelon et al. 2024 under absolute presets: a ViT on the
endless image set with heavy-ball SGD, and a decoder on Python's sources with Adam. By default they
have the constants of the authors' code (`with_constants`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mupax.presets import Role
from mupax.train import data
from mupax.train.config.run import Config, DataConfig, OptimizerConfig, PresetConfig
from mupax.train.core.program import Program, assemble
from mupax.train.core.step import Batch, StepInputs, logits_of
from mupax.train.studies.check.observables import internals
from mupax.zoo import configs
from mupax.zoo.configs import ComputeConfig

_ENDS = (Role.TOKEN_EMBEDDING, Role.PATCH_EMBEDDING, Role.POSITION, Role.READOUT)
"""Roles of the parameters at the input and the output of a model."""


def vit(
    *,
    head_dim: int,
    heads: int,
    depth: int,
    rate: float,
    steps: int,
    alpha_a: float = 1.0,
    alpha_l: float = 1.0,
    gamma0: float = 0.1,
    beta0: float = 4.0,
    batch_size: int = 64,
    image_size: int = 32,
    channels: int = 3,
    patch_size: int = 8,
    data_name: str = "shapes",
) -> Config:
    """Return a run config of the paper's ViT with a centred output.

    The optimizer is SGD with momentum 0.9 and a constant learning rate.

    Args:
        rate: Learning rate, the same at all steps.
        alpha_a: Exponent of N in the scale of attention logits.
        alpha_l: Exponent of the depth in the scale of branches.
        gamma0: Scale of feature learning; 0 in the limit of lazy training.
        beta0: Factor on branches, which are multiplied by beta0 depth^-alpha_l.
    """
    model = configs.get("bordelon-vit")
    assert isinstance(model, configs.ViTConfig)
    model = replace(
        model,
        width=head_dim * heads,
        num_heads=heads,
        depth=depth,
        image_size=image_size,
        channels=channels,
        patch_size=patch_size,
        norm_eps=1e-5,
        compute=_compute(depth),
    )
    return Config(
        recipe="figure",
        model=model,
        data=DataConfig(
            name=data_name,
            batch_size=batch_size,
            seed=0,
            eval_batch_size=64,
            eval_examples=64,
            augment=False,
        ),
        preset=_preset(alpha_a, alpha_l, gamma0, beta0),
        optimizer=OptimizerConfig(name="sgd", peak_lr=rate, momentum=0.9, schedule="constant"),
        steps=steps,
    )


def lm(
    *,
    head_dim: int,
    heads: int,
    depth: int,
    rate: float,
    steps: int,
    alpha_a: float = 1.0,
    alpha_l: float = 1.0,
    gamma0: float = 0.25,
    beta0: float = 4.0,
    batch_size: int = 16,
    seq_len: int = 64,
    warmup_steps: int = 20,
) -> Config:
    """Return a run config of the paper's decoder on bytes: Adam (eps 1e-20), warm-up, cosine to 0.

    The decoder is that of the paper's text, with a centred output. The authors' code alone has a
    GELU before branches, a norm of queries and keys, and a bias of the readout.

    Args:
        rate: Learning rate at its peak, after the warm-up.
        alpha_a: Exponent of N in the scale of attention logits.
        alpha_l: Exponent of the depth in the scale of branches.
        gamma0: Scale of feature learning; 0 in the limit of lazy training.
        beta0: Factor on branches, which are multiplied by beta0 depth^-alpha_l.
    """
    model = configs.get("bordelon-lm")
    assert isinstance(model, configs.DecoderConfig)
    model = replace(
        model,
        width=head_dim * heads,
        num_heads=heads,
        depth=depth,
        vocab_size=256,
        seq_len=seq_len,
        norm_eps=1e-5,
        branch_activation="none",
        qk_norm=False,
        qk_norm_kind="rmsnorm",
        readout_bias=False,
        compute=_compute(depth),
    )
    return Config(
        recipe="figure",
        model=model,
        data=DataConfig(
            name="python_corpus",
            batch_size=batch_size,
            seed=0,
            eval_batch_size=16,
            eval_examples=16,
        ),
        preset=_preset(alpha_a, alpha_l, gamma0, beta0),
        optimizer=OptimizerConfig(
            name="adam", peak_lr=rate, b2=0.999, eps=1e-20, warmup_steps=warmup_steps
        ),
        steps=steps,
    )


def _compute(depth: int) -> ComputeConfig:
    """Return how to run a stack of layers: as a loop if it is deep, else unrolled."""
    # A loop compiles as fast at any depth, and an unrolled stack runs faster on a CPU.
    return ComputeConfig(layers="scan" if depth > 4 else "auto")


def _preset(alpha_a: float, alpha_l: float, gamma0: float, beta0: float) -> PresetConfig:
    """Return `depth-mup` in the paper's absolute form."""
    return PresetConfig(
        name="depth-mup", base=None, alpha_a=alpha_a, alpha_l=alpha_l, gamma0=gamma0, beta0=beta0
    )


def with_constants(step_inputs: StepInputs, program: Program, ends: float = 4.0) -> StepInputs:
    """Return a run's step inputs with the constants of the authors' code.

    Embeddings, positions and the readout learn `ends` times as fast as by the preset's rule.
    Queries and keys are divided by the square root of two each.

    Args:
        ends: Factor on the learning rates of embeddings, positions and readout. Most figures have
            beta0.
    """
    specs = program.definition.specs
    factors = step_inputs.factors
    lr = {}
    for name, rate in factors.lr.items():
        lr[name] = rate * (ends if specs[name].role in _ENDS else 1)
    multiplier = {}
    for name, value in factors.multiplier.items():
        is_query_or_key = specs[name].role in (Role.QUERY, Role.KEY)
        multiplier[name] = value * (0.5**0.5 if is_query_or_key else 1)
    return step_inputs._replace(factors=factors._replace(lr=lr, multiplier=multiplier))


@dataclass(frozen=True)
class Snapshot:
    """Parameters of a model between two steps of a run, for an observation.

    Attributes:
        step: Number of finished optimizer steps.
        params: Present parameters.
        start: Parameters at step 0.
        run: Step inputs of the run, which have the model's multipliers.
    """

    step: int
    params: dict[str, jax.Array]
    start: dict[str, jax.Array]
    run: StepInputs


class Trainer:
    """Trainer of runs that share one compiled program, on one device.

    The runs may differ in their seeds and in the values of their presets and optimizers.

    Args:
        config: Configuration with the model, data and optimizer that all runs share.
        batches: Batches of the data, to share them between trainers. `None` loads them.
        ends: Factor on the learning rates of embeddings, positions and the readout.
    """

    def __init__(self, config: Config, batches: Batches | None = None, ends: float = 4.0) -> None:
        self.program = assemble(config, jax.devices()[:1])
        self.batches = batches or Batches(config)
        self.definition = self.program.definition
        self.ends = ends
        self._step = self.program.compile_train()
        self._internals = jax.jit(
            lambda params, run, inputs: internals(
                self.definition.model(params, run.factors.multiplier, run.factors.forward), inputs
            )
        )
        self._logits = jax.jit(
            lambda params, run, inputs: logits_of(self.definition, params, run, inputs)
        )

    def train(
        self,
        config: Config,
        *,
        at: Sequence[int] = (),
        look: Callable[[Snapshot], Any] = lambda snapshot: None,
    ) -> tuple[np.ndarray, list[Any]]:
        """Train a run and return its training losses and observations.

        Args:
            config: Configuration of the run. It may differ from the trainer's in the seed and in
                the values of preset and optimizer.
            at: Numbers of finished steps at which to observe; 0 is before the first step.
            look: Function that makes an observation from the parameters at such a step.

        Returns:
            Losses float64 [steps], and what `look` returned at each step of `at`.
        """
        # The first program's initializer is compiled already.
        assembled = assemble(config, jax.devices()[:1])
        program = replace(assembled, initializer=self.program.initializer)
        start = program.initializer.params(config.seed, program.stds)
        run = with_constants(program.step_inputs(), program, self.ends)
        state = program.placed(program.initial_state(), self._step)
        losses = []
        observations = []
        for step in range(config.steps + 1):
            if step in at:
                observations.append(look(Snapshot(step, state.params, start, run)))
            if step < config.steps:
                state, metrics = self._step(state, run, self.batches[step])
                # Losses stay on the device until the end, so that no step waits for them.
                losses.append(metrics["loss"])
        return np.asarray(jax.device_get(losses), np.float64), observations

    def internals(self, snapshot: Snapshot, inputs: np.ndarray) -> dict[str, np.ndarray]:
        """Return the activations that `check.observables.internals` reads from the model."""
        return jax.device_get(self._internals(snapshot.params, snapshot.run, jnp.asarray(inputs)))

    def logits(self, snapshot: Snapshot, inputs: np.ndarray) -> np.ndarray:
        """Return the centred logits of the model."""
        return np.asarray(self._logits(snapshot.params, snapshot.run, jnp.asarray(inputs)))

    def names(self, *roles: Role) -> list[str]:
        """Return the names of the parameters that have one of the roles."""
        names = []
        for name, spec in self.definition.specs.items():
            if spec.role in roles:
                names.append(name)
        return names


class Batches:
    """Training batches of a configuration's data, each loaded once, and its evaluation examples."""

    def __init__(self, config: Config) -> None:
        seed = config.seed if config.data.seed is None else config.data.seed
        self._data = data.load(config.data, config.model, seed=seed, note=lambda line: None)
        self._batches: list[Batch] = []

    def __getitem__(self, step: int) -> Batch:
        """Return the batch of a step, counted from 0."""
        while len(self._batches) <= step:
            batch = self._data.train_batch(len(self._batches))
            self._batches.append(jax.tree.map(jnp.asarray, batch))
        return self._batches[step]

    def probe(self, count: int) -> np.ndarray:
        """Return the inputs of the first `count` evaluation examples."""
        return self._data.eval_batch(0, slice(0, count))["inputs"]

    def probe_targets(self, count: int) -> np.ndarray:
        """Return the targets of the first `count` evaluation examples."""
        return self._data.eval_batch(0, slice(0, count))["targets"]


def smoothed(losses: np.ndarray, points: int = 60) -> np.ndarray:
    """Return means of losses [..., steps] over `points` windows of equal length, [..., points].

    There are fewer points if there are fewer steps.
    """
    windows = np.array_split(np.asarray(losses), min(points, losses.shape[-1]), axis=-1)
    return np.stack([window.mean(axis=-1) for window in windows], axis=-1)
