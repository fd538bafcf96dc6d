"""A config turned into everything a run needs but its data: model, preset, mesh, optimizer, numbers, compiled steps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from mupax.presets import Preset
from mupax.train.config import checks
from mupax.train.config.devices import parse_rules
from mupax.train.config.preset import preset_of
from mupax.train.config.run import Config
from mupax.train.core import nonfinite, optimizer
from mupax.train.core.compile import compile_eval_step, compile_logits, trace_train_step
from mupax.train.core.factors import Numbers, check_run, init_stds, layer_decayed, resolve
from mupax.train.core.state import Initializer, StepInputs, TrainState, abstract_state
from mupax.train.data import cache
from mupax.train.parallel import compilation_cache, hardware
from mupax.train.parallel.mesh import MeshError, make_mesh
from mupax.train.parallel.sharding import Feed, MeshLayout, abstract_batch
from mupax.zoo.configs import ViTConfig
from mupax.zoo.definition import Definition, definition
from mupax.zoo.partition import LANES

if TYPE_CHECKING:
    from mupax.zoo.layers.drop_path import Drop


@dataclasses.dataclass(frozen=True)
class Program:
    """What `assemble` makes of a config. Nothing in it is allocated on a device yet."""

    config: Config
    definition: Definition
    preset: Preset
    layout: MeshLayout
    tx: optax.GradientTransformationExtraArgs
    abstract: TrainState
    initializer: Initializer
    stds: Numbers
    inputs: StepInputs
    """On the host."""

    @property
    def mesh(self) -> Mesh:
        """The devices along named axes."""
        return self.layout.mesh

    def initial_state(self) -> TrainState:
        """A fresh state on the mesh."""
        return self.initializer.state(self.config.seed, self.stds)

    def renumbered(self, config: Config) -> Program:
        """This program with the numbers of a config that differs in nothing else.

        Raises:
            PresetError: as `assemble`.
        """
        preset = preset_of(config)
        stds, inputs = init_stds(preset, self.definition), _inputs(config, preset, self.definition, self.trained)
        return dataclasses.replace(self, config=config, preset=preset, stds=stds, inputs=inputs)

    @property
    def state_bytes(self) -> int:
        """Bytes of the training state on one device, and of the frozen reference of a centred output."""
        reference = self.abstract.params if self.config.model.centered else {}
        leaves = jax.tree.leaves((self.abstract, reference))
        return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)

    @property
    def trained(self) -> frozenset[str]:
        """Names of the parameters that are not frozen."""
        return frozenset(self.inputs.factors.lr)

    @property
    def frozen(self) -> int:
        """How many numbers the frozen parameters have."""
        return sum(leaf.size for name, leaf in self.abstract.params.items() if name not in self.trained)

    def step_inputs(self) -> StepInputs:
        """`inputs` on the mesh, with the initial parameters where the model's output is centred."""
        inputs = jax.device_put(self.inputs, self.layout.replicated)
        if not self.config.model.centered:
            return inputs
        return inputs._replace(reference=self.initializer.params(self.config.seed, self.stds))

    def abstract_inputs(self) -> StepInputs:
        return self.inputs._replace(reference=self.abstract.params) if self.config.model.centered else self.inputs

    def trace_train(self) -> jax.stages.Traced:
        """The training step, (state, inputs, batch) -> (state, metrics), not compiled yet."""
        config, inputs = self.config, self.abstract_inputs()
        batch = self.abstract_train_batch()
        accumulation = config.accumulation_steps
        return trace_train_step(
            self.definition, self.tx, self.abstract, self.layout, inputs, batch, accumulation, free=self.free
        )

    def compile_train(self) -> jax.stages.Compiled:
        """The training step: (state, inputs, batch) -> (state, metrics), for a state as `placed` gives it."""
        return self.trace_train().lower().compile(compiler_options=self.compiler_options())

    def compile_eval(self, train: jax.stages.Compiled | None = None) -> jax.stages.Compiled:
        """The evaluation step: (params, inputs, batch) -> `LossSums`, for parameters that lie as the training step has them."""
        formats = _formats(train) if train is not None and self.free else None
        batch = abstract_batch(self.config.model, self.config.eval_batch_size, self.config.data)
        return compile_eval_step(self.definition, self.abstract, self.layout, self.abstract_inputs(), batch, formats)

    def compile_logits(self) -> jax.stages.Compiled:
        """(params, inputs, batch) -> logits of an evaluation batch, for parameters in their default layouts."""
        batch = abstract_batch(self.config.model, self.config.eval_batch_size, self.config.data)
        return compile_logits(self.definition, self.abstract, self.layout, self.abstract_inputs(), batch)

    def compiler_options(self) -> dict[str, Any]:
        """Flags that the training step is compiled with."""
        device = self.mesh.devices.flat[0]
        config = self.config
        return hardware.compiler_options(
            device.platform, config.xla_flags, kind=device.device_kind, vmem_kib=config.vmem_kib
        )

    @property
    def free(self) -> bool:
        """Whether the compiler chooses how the state lies in memory.

        On TPU only: there queries, keys and values lie with their heads inside, and in the order that they are declared
        in, each step copied them and their moments to that layout and back, a tenth of a small step's memory traffic. Not
        where a dimension is cut into parts of less than a vector, which is filled up where it is innermost: for the rows of
        an embedding the compiler took 65.7 MB where f32[128256,16] is 8.2, and a step of lm-8b on 256 chips is as fast
        (2.302e9 cycles) in JAX's layouts, which are the smallest.
        """

        def short(leaf: Any) -> bool:
            parts = zip(leaf.sharding.shard_shape(leaf.shape), leaf.shape, strict=True)
            return any(size != whole and size % LANES for size, whole in parts)

        return self.mesh.devices.flat[0].platform == "tpu" and not any(map(short, jax.tree.leaves(self.abstract)))

    def placed(self, state: TrainState, step: jax.stages.Compiled) -> TrainState:
        """The state in the layouts that the compiled training step takes.

        Args:
            state: on the mesh in default layouts; used up where the compiler has chosen others (`free`).
            step: from `compile_train`.
        """
        return jax.device_put(state, _formats(step), donate=True) if self.free else state

    def train_feed(self) -> Feed:
        """This process' way of training batches to the mesh."""
        return Feed(self.abstract_train_batch(), self.layout)

    def abstract_train_batch(self) -> dict[str, Any]:
        """Shapes and dtypes of a training batch; labels that are distributions over classes no evaluation has."""
        model, data = self.config.model, self.config.data
        batch = abstract_batch(model, data.batch_size, data)
        if data.transforms.soft:
            shape = data.batch_size, model.sizes()[model.output_axis]
            batch["labels"] = jax.ShapeDtypeStruct(shape, np.float32)
        return batch

    def eval_feed(self) -> Feed:
        """This process' way of evaluation batches to the mesh."""
        return Feed(abstract_batch(self.config.model, self.config.eval_batch_size, self.config.data), self.layout)


def _formats(step: jax.stages.Compiled) -> Any:
    """How a training step takes the state's arrays: layout and sharding of each."""
    return step.input_formats[0][0]


def assemble(config: Config, devices: Sequence[Any] | None = None, *, swept: bool = False) -> Program:
    """The program of a config on the devices there are; every error of input comes from here, before anything is allocated.

    Args:
        config: of the run.
        devices: all there are unless given.
        swept: whether it is one of many points, which the mesh axis `sweep` may split.

    Raises:
        ConfigError, PresetError, MeshError: what does not fit, and what to write instead.
    """
    compilation_cache.use(cache.root, devices=devices)
    preset = preset_of(config)
    rings = config.xla_flags == "scatter"
    mesh = make_mesh(config.mesh, devices, swept=swept, rings=rings)
    sent = config.mesh.gradient_dtype
    if sent and (mesh.shape["fsdp"] == 1 or mesh.shape["sequence"] * mesh.shape["tensor"] > 1):
        raise MeshError(
            f"mesh.gradient_dtype {sent} is for parameters that fsdp splits, and neither sequence nor tensor; "
            "leave it out, or write --mesh.fsdp -1 --mesh.data 1"
        )
    layout = MeshLayout(mesh, parse_rules(config.mesh.rules), rings=rings, gradient_dtype=sent)
    layout.check_batch(config.data.batch_size, config.accumulation_steps)
    layout.check_batch(config.eval_batch_size, 1, "data.eval_batch_size")
    layout.check_positions(config.model)
    layout.check_experts(config.model)
    model = definition(config.model)
    if layout.platform == "tpu":  # elsewhere no loss is chosen by the step's peak
        from mupax.train.core.costs import memory

        layout.room = memory.room(config, model, layout)
    trained = checks.trained(config.train_only, config.freeze, model.specs)
    tx = optimizer.build(config.scaled_optimizer, trained)
    inputs = _inputs(config, preset, model, trained)
    abstract = abstract_state(model, tx, layout, averaged=config.ema.decay is not None, trained=trained)
    initializer = Initializer(model, tx, abstract, trained)
    return Program(config, model, preset, layout, tx, abstract, initializer, init_stds(preset, model), inputs)


def _drop(config: Config) -> Drop | None:
    """What training leaves out of the model's stack; None where it asks for nothing."""
    model = config.model
    if not isinstance(model, ViTConfig) or not model.drop_path:
        return None
    from mupax.zoo.layers.drop_path import Drop

    return Drop(np.uint32(config.seed), np.array(model.drop_rates, np.float32))


def _stores_bfloat16(model: Definition) -> bool:
    return any(leaf.dtype == jnp.bfloat16 for leaf in model.abstract.values())


def _inputs(config: Config, preset: Preset, model: Definition, trained: Collection[str]) -> StepInputs:
    scaled = config.scaled_optimizer
    inputs = StepInputs(
        resolve(preset, model, scaled.name, scaled.decay).moving(trained),
        optimizer.hyper(scaled, config.steps),
        ema_decay=None if config.ema.decay is None else np.float32(config.ema.decay),
        limits=nonfinite.limits(config.faults),
        drop=_drop(config),
        z_loss=np.float32(config.z_loss) if config.z_loss else None,
        rounding_seed=np.uint32(config.seed) if _stores_bfloat16(model) else None,
    )
    check_run(preset, model, inputs.factors, scaled)
    if scaled.layer_decay != 1:
        inputs = inputs._replace(factors=layer_decayed(inputs.factors, model, scaled.layer_decay))
    return inputs
