"""Training for the figures: the zoo's models with train/'s own step, many seeds and presets of one program, and looks between.

The models are in the form of Bordelon et al. 2024, absolute presets, by default with the constants of the authors' code
(`with_constants`): a ViT on the endless image set with heavy-ball SGD, a decoder on Python's sources with Adam.
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
    """A run of the paper's ViT: momentum 0.9, constant rate, centred output."""
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
    """A run of the paper's decoder on bytes: Adam with eps 1e-20, warm-up and cosine to 0, centred output.

    As in its text: the GELU before branches, the norm of queries and keys and the readout's bias are its code's alone.
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
    """A deep stack as a loop, whose compilation takes no longer; a shallow one unrolled, which runs faster on a CPU."""
    return ComputeConfig(layers="scan" if depth > 4 else "auto")


def _preset(alpha_a: float, alpha_l: float, gamma0: float, beta0: float) -> PresetConfig:
    return PresetConfig(
        name="depth-mup", base=None, alpha_a=alpha_a, alpha_l=alpha_l, gamma0=gamma0, beta0=beta0
    )


def with_constants(run: StepInputs, program: Program, ends: float = 4.0) -> StepInputs:
    """The run's numbers with the constants of the authors' code.

    Args:
        run: numbers from the preset.
        program: of the run.
        ends: by how much more than by the rule the embeddings, positions and readout learn: beta0 in most figures.

    Returns:
        The same with those rates, and queries and keys divided by the square root of two each.
    """
    specs, factors = program.definition.specs, run.factors
    lr = {
        name: rate * (ends if specs[name].role in _ENDS else 1) for name, rate in factors.lr.items()
    }
    pair = (Role.QUERY, Role.KEY)
    multiplier = {
        name: one * (0.5**0.5 if specs[name].role in pair else 1)
        for name, one in factors.multiplier.items()
    }
    return run._replace(factors=factors._replace(lr=lr, multiplier=multiplier))


@dataclass(frozen=True)
class Snapshot:
    """A model between two steps.

    Attributes:
        step: optimizer steps done.
        params: the parameters now; `start` those at step 0.
        run: numbers they are used with.
    """

    step: int
    params: dict[str, jax.Array]
    start: dict[str, jax.Array]
    run: StepInputs


class Trainer:
    """Trains runs that differ in seed and in the preset's and optimizer's numbers, with one compilation, on one device.

    Args:
        config: whose model, data and optimizer all runs share.
        batches: of the data, shared between trainers on the same data; made when None.
        ends: see `with_constants`.
    """

    def __init__(self, config: Config, batches: Batches | None = None, ends: float = 4.0) -> None:
        self.program = assemble(config, jax.devices()[:1])
        self.batches = batches or Batches(config)
        self.definition = self.program.definition
        self._step, self.ends = self.program.compile_train(), ends
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
        """The training losses float64 [steps] of a run, and what `look` saw after the steps `at` (0 is before the first)."""
        numbers = assemble(config, jax.devices()[:1])
        program = replace(
            numbers, initializer=self.program.initializer
        )  # compiled once for all runs
        start = program.initializer.params(config.seed, program.stds)
        run = with_constants(program.step_inputs(), program, self.ends)
        state = program.placed(program.initial_state(), self._step)
        losses, observations = [], []
        for step in range(config.steps + 1):
            if step in at:
                observations.append(look(Snapshot(step, state.params, start, run)))
            if step < config.steps:
                state, metrics = self._step(state, run, self.batches[step])
                losses.append(metrics["loss"])
        return np.asarray(jax.device_get(losses), np.float64), observations

    def internals(self, snapshot: Snapshot, inputs: np.ndarray) -> dict[str, np.ndarray]:
        """`mupax.train.studies.check.observables.internals` of the model as it is."""
        return jax.device_get(self._internals(snapshot.params, snapshot.run, jnp.asarray(inputs)))

    def logits(self, snapshot: Snapshot, inputs: np.ndarray) -> np.ndarray:
        """The centred output."""
        return np.asarray(self._logits(snapshot.params, snapshot.run, jnp.asarray(inputs)))

    def names(self, *roles: Role) -> list[str]:
        """Parameters of these roles."""
        return [name for name, spec in self.definition.specs.items() if spec.role in roles]


class Batches:
    """The training batches of a config's data from the first on, each made once, and some evaluation examples."""

    def __init__(self, config: Config) -> None:
        seed = config.seed if config.data.seed is None else config.data.seed
        self._data = data.load(config.data, config.model, seed=seed, note=lambda line: None)
        self._batches: list[Batch] = []

    def __getitem__(self, k: int) -> Batch:
        while len(self._batches) <= k:
            self._batches.append(
                jax.tree.map(jnp.asarray, self._data.train_batch(len(self._batches)))
            )
        return self._batches[k]

    def probe(self, count: int) -> np.ndarray:
        """Inputs of the first evaluation examples."""
        return self._data.eval_batch(0, slice(0, count))["inputs"]

    def probe_targets(self, count: int) -> np.ndarray:
        """Their targets."""
        return self._data.eval_batch(0, slice(0, count))["targets"]


def smoothed(losses: np.ndarray, points: int = 60) -> np.ndarray:
    """Means of losses [..., steps] over `points` windows of equal length, [..., points]."""
    windows = np.array_split(np.asarray(losses), min(points, losses.shape[-1]), axis=-1)
    return np.stack([window.mean(axis=-1) for window in windows], axis=-1)
