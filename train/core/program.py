"""`assemble`: turn a config into everything that a run needs but its data.

A `Program` holds the model, preset, mesh, optimizer, factors and compiled steps.

Compiled programs are kept on disk, so that a command that is started again compiles nothing. By
default they are in JAX's persistent compilation cache:

    CACHE/programs-KEY/PROGRAM-cache      digest of a program, followed by the program

KEY stands for the versions, this CPU and the user. Machine code for another CPU ends a process, and
whoever can write such a file runs code in the process.

JAX's own file store writes in place, so a kill or a full disk leaves a broken file for good, and
its size limit needs a lock. In `Store`, a file is either complete or a miss, the programs that were
used longest ago are deleted first, and no failure ends a run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import hashlib
import math
import os
import platform
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import xxhash
from jax._src import compilation_cache as _jax_cache  # no public name for its file store
from jax.sharding import Mesh

from mupax import terminal
from mupax.presets import Preset
from mupax.train.config import checks
from mupax.train.config.preset import preset_of
from mupax.train.config.run import Config, FaultsConfig, OptimizerConfig, parse_rules
from mupax.train.core import optimizer
from mupax.train.core.factors import (
    ParamValues,
    check_run,
    hyperparams,
    init_stds,
    layer_decayed,
    resolve,
)
from mupax.train.core.state import Initializer, Limits, StepInputs, TrainState, abstract_state
from mupax.train.core.step import compile_eval_step, compile_logits, trace_train_step
from mupax.train.data import cache
from mupax.train.parallel import hardware
from mupax.train.parallel.processes import Processes
from mupax.train.parallel.sharding import (
    BatchSharding,
    MeshError,
    MeshLayout,
    abstract_batch,
    make_mesh,
)
from mupax.zoo.configs import ViTConfig
from mupax.zoo.definition import Definition, definition
from mupax.zoo.partition import LANES

if TYPE_CHECKING:
    from mupax.zoo.layers.drop_path import Drop

VARIABLE = "MUPAX_COMPILATION_CACHE"
"""Environment variable with the folder of compiled programs, or `none`.

`--compilation-cache` sets it.
"""
LIMIT = 2 * 2**30
"""Largest size of all kept programs in bytes, unless `jax_compilation_cache_max_size` is set."""
_options: Any = jax.config
_DIGEST_BYTES = 16
_CPU = Path("/proc/cpuinfo")
_FEATURES = re.compile(
    r"^(?:vendor_id|cpu family|model|model name|flags|Features|CPU \w+|cpu|isa|features)\s*:.*$",
    re.MULTILINE,
)
"""Lines of `_CPU` that name the CPU and its features: x86, Arm, POWER, RISC-V, IBM Z.

The clock frequency is not among them, because it changes.
"""


class _StoredFile(NamedTuple):
    """File of a compiled program. Tuples sort by the time of last use.

    `used` is that time in seconds since 1970, and `size` is in bytes.
    """

    used: float
    size: int
    path: Path


class Store:
    """File store for compiled programs (`jax._src.compilation_cache_interface`).

    Args:
        folder: Existing folder for the programs of this machine.
        limit: Largest number of bytes of all programs in this folder and in those of other keys.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self._path = folder
        self._limit = limit
        self._bytes = -1  # not counted yet
        self._full = False

    def get(self, key: str) -> bytes | None:
        """Return the program of a key, or `None` if it is missing or damaged.

        The time of its file is set to now, as the time of last use.
        """
        path = self._file(key)
        try:
            content = path.read_bytes()
        except OSError:
            return None
        # The modification time stands for the last use. Files used longest ago are deleted first.
        with contextlib.suppress(OSError):
            os.utime(path)
        digest = content[:_DIGEST_BYTES]
        program = content[_DIGEST_BYTES:]
        if xxhash.xxh3_128_digest(program) != digest:
            return None
        return program

    def put(self, key: str, program: bytes) -> None:
        """Write a program, and delete those used longest ago if the folder exceeds its limit.

        A program larger than the limit is not written. After the first one that cannot be written,
        one line is printed, and later calls do nothing.
        """
        size = len(program) + _DIGEST_BYTES
        if self._full or size > self._limit:
            return
        path = self._file(key)
        # A random name, because another process may write the same program at this moment.
        part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
        try:
            self._make_room(size)
            part.write_bytes(xxhash.xxh3_128_digest(program) + program)
            part.replace(path)
        except OSError as error:
            self._full = True
            with contextlib.suppress(OSError):
                part.unlink()
            _caution(self._path, error)

    def _file(self, key: str) -> Path:
        return self._path / f"{key}-cache"

    def _make_room(self, size: int) -> None:
        """Count `size` more bytes. Delete files until they fit, those used longest ago first.

        Files of other keys are deleted, too.

        Raises:
            OSError: A file cannot be deleted, and `size` bytes do not fit beside what is left.
        """
        # Other processes write here as well, so files are listed again before any is deleted.
        if self._bytes < 0 or self._bytes + size > self._limit:
            files = self._stored_files()
            self._bytes = sum(file.size for file in files)
            failure = None
            for file in sorted(files):
                if self._bytes + size <= self._limit:
                    break
                try:
                    # Another process may have deleted it meanwhile.
                    file.path.unlink(missing_ok=True)
                except OSError as error:
                    text = f"{file.path} cannot be deleted: {error.strerror}"
                    failure = OSError(error.errno, text)
                    continue
                self._bytes -= file.size
            if failure is not None and self._bytes + size > self._limit:
                raise failure
        self._bytes += size

    def _stored_files(self) -> list[_StoredFile]:
        """Return the programs in this folder and in those of other keys (`programs-KEY`)."""
        files = []
        for folder in self._path.parent.glob("programs-*"):
            # A file, or a folder of other versions, may be deleted by another process meanwhile.
            with contextlib.suppress(OSError):
                paths = list(folder.glob("*-cache*"))
                for path in paths:
                    with contextlib.suppress(OSError):
                        status = path.stat()
                        files.append(_StoredFile(status.st_mtime, status.st_size, path))
        return files


def use(
    root: Callable[[], Path],
    processes: Processes | None = None,
    devices: Sequence[Any] | None = None,
) -> None:
    """Make JAX keep compiled programs on disk, unless the user has chosen otherwise.

    JAX_COMPILATION_CACHE_DIR and JAX_ENABLE_COMPILATION_CACHE=false take effect if neither
    `--compilation-cache` nor its variable is given. A second call changes nothing.

    Args:
        root: Returns mupax's cache folder, for everything that can be made again.
        processes: Processes of the run, which all call this. Several processes keep programs only
            in a folder that all of them see.
        devices: Devices to compile for. Default: those of this machine. For other devices no
            program is kept from then on.
    """
    if devices is not None and devices[0] not in jax.devices():
        # Programs for devices that this machine does not have cannot be loaded from the cache.
        _options.update("jax_enable_compilation_cache", False)
    folder = _folder(root)
    if processes is not None and processes.count > 1 and not _shared(folder, processes):
        # Only process 0 writes the cache. Without a shared folder it would find programs that the
        # other processes still have to compile. On GPU the processes share the work of compiling,
        # so the others would wait for process 0.
        folder = None
        if not _options.jax_compilation_cache_dir:
            _options.update("jax_enable_compilation_cache", False)
    if folder is None or _options.jax_compilation_cache_dir == str(folder):
        return

    limit = _options.jax_compilation_cache_max_size
    if limit < 0:
        limit = LIMIT
    # JAX opens its store once. Without this call, a store that is open already would stay in use.
    _jax_cache.reset_cache()
    _jax_cache.get_file_cache = lambda path: (Store(Path(path), limit), path)
    _options.update("jax_compilation_cache_dir", str(folder))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        # JAX's default is 1 s, but most of a start is spent in smaller programs.
        _options.update("jax_persistent_cache_min_compile_time_secs", 0)


def _folder(root: Callable[[], Path]) -> Path | None:
    """Make and return the folder for programs of this machine.

    Return `None` if no programs are kept, or if JAX's own folder is set. If the folder cannot be
    made or written, turn the cache off, print a caution and return `None`.
    """
    choice = os.environ.get(VARIABLE)
    if choice == "none":
        _options.update("jax_enable_compilation_cache", False)
    if not _options.jax_enable_compilation_cache:
        return None
    if _options.jax_compilation_cache_dir and not choice:
        return None

    folder = None
    try:
        parent = Path(choice).expanduser().absolute() if choice else root()
        folder = parent / f"programs-{key()}"
        # Whoever can write to this folder can run code in later processes, so it is closed to other
        # users.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise PermissionError(errno.EPERM, "it belongs to another user")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "no permission")
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        _options.update("jax_enable_compilation_cache", False)
        _caution(folder, error)
        return None
    return folder


def _caution(folder: Path | None, error: Exception) -> None:
    """Print that compiled programs are not kept in a folder, and why."""
    location = f" in {folder}" if folder else ""
    reason = getattr(error, "strerror", None) or error
    terminal.note(
        f"caution: compiled programs are not kept{location}: {reason}; "
        "name another folder, or none, by --compilation-cache"
    )


def _shared(folder: Path | None, processes: Processes) -> bool:
    """Return whether all processes see the folder of process 0. All processes call it together.

    Process 0 makes a file in its folder for the test, and deletes it. If a process does not see the
    file, process 0 prints a caution.

    Args:
        folder: Folder of this process. `None` if it has none, and the result is then False.
    """
    mark = folder / f"shared-{secrets.token_hex(4)}" if folder else None
    if processes.leader and mark is not None:
        with contextlib.suppress(OSError):
            mark.touch()
    name = processes.broadcast("compilation cache", lambda: mark and mark.name)

    visible = False
    if folder is not None and name:
        visible = _appears(folder / name)
    all_visible = processes.gather("compilation cache", visible) or []
    absent = []
    for process, sees in enumerate(all_visible):
        if not sees:
            absent.append(process)
    verdict = processes.broadcast("compilation cache shared", lambda: not absent)

    if processes.leader and mark is not None:
        with contextlib.suppress(OSError):
            mark.unlink()
        if not verdict:
            _caution(folder, RuntimeError(f"process {absent[0]} does not see it"))
    return verdict


def _appears(path: Path) -> bool:
    """Wait up to 1.2 s for a file, and return whether it exists.

    A network file system may show a file late.
    """
    for wait_s in (0, 0.2, 1):
        time.sleep(wait_s)
        if path.exists():
            return True
    return False


@functools.cache
def key() -> str:
    """Return 16 hexadecimal digits that stand for JAX's versions, this machine's CPU and the user.

    Compiled programs are kept in a folder of this name, because they are valid only for these.
    """
    versions = [version(name) for name in ("jax", "jaxlib")]
    parts = [*versions, sys.platform, platform.machine(), _cpu(), str(os.getuid())]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _cpu() -> str:
    """Return the model and the features of this machine's CPUs."""
    with contextlib.suppress(OSError):
        lines = _FEATURES.findall(_CPU.read_text(errors="replace"))
        return "\n".join(sorted(set(lines)))
    with contextlib.suppress(OSError, subprocess.SubprocessError):  # macOS
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return result.stdout
    return platform.processor()


@dataclasses.dataclass(frozen=True)
class Program:
    """Model, preset, mesh, optimizer and step inputs of a config, with no array on a device yet."""

    config: Config
    definition: Definition
    preset: Preset
    layout: MeshLayout
    tx: optax.GradientTransformationExtraArgs
    abstract: TrainState
    """Shapes, dtypes and shardings of the state."""
    initializer: Initializer
    stds: ParamValues
    """Initial standard deviations (`factors.init_stds`)."""
    inputs: StepInputs
    """Inputs of the compiled step besides state and batch, such as factors and hyperparameters.

    They are on the host, and without the initial parameters that a centred output needs.
    """

    @property
    def mesh(self) -> Mesh:
        """Devices along named axes."""
        return self.layout.mesh

    def initial_state(self) -> TrainState:
        """Return a fresh state on the mesh, at step 0."""
        return self.initializer.state(self.config.seed, self.stds)

    def with_config(self, config: Config) -> Program:
        """Return this program with the factors and hyperparameters of another config.

        Args:
            config: Config that differs in nothing else. The compiled steps stay valid.

        Raises:
            PresetError: As in `assemble`.
        """
        preset = preset_of(config)
        stds = init_stds(preset, self.definition)
        inputs = _inputs(config, config.scaled_optimizer, preset, self.definition, self.trained)
        return dataclasses.replace(self, config=config, preset=preset, stds=stds, inputs=inputs)

    @property
    def state_bytes(self) -> int:
        """Bytes of the training state on one device.

        If the model's output is centred (the logits of the initial parameters are subtracted), the
        initial parameters are counted, too.
        """
        reference = self.abstract.params if self.config.model.centered else {}
        leaves = jax.tree.leaves((self.abstract, reference))
        total = 0
        for leaf in leaves:
            shard_shape = leaf.sharding.shard_shape(leaf.shape)
            total += math.prod(shard_shape) * leaf.dtype.itemsize
        return total

    @property
    def trained(self) -> frozenset[str]:
        """Names of the parameters that are not frozen."""
        return frozenset(self.inputs.factors.lr)

    @property
    def frozen(self) -> int:
        """Number of frozen scalars: the sizes of all frozen parameters, added up."""
        trained = self.trained
        frozen_sizes = []
        for name, leaf in self.abstract.params.items():
            if name not in trained:
                frozen_sizes.append(leaf.size)
        return sum(frozen_sizes)

    def step_inputs(self) -> StepInputs:
        """Return the inputs of the compiled step besides state and batch, replicated on the mesh.

        If the model's output is centred (the logits of the initial parameters are subtracted), they
        include freshly drawn initial parameters, sharded as parameters.
        """
        inputs = jax.device_put(self.inputs, self.layout.replicated)
        if not self.config.model.centered:
            return inputs
        return inputs._replace(reference=self.initializer.params(self.config.seed, self.stds))

    def abstract_inputs(self) -> StepInputs:
        """Return the step inputs with which a step is traced, without arrays on devices.

        They are `inputs` and, if the model's output is centred, the shapes of the initial
        parameters.
        """
        if not self.config.model.centered:
            return self.inputs
        return self.inputs._replace(reference=self.abstract.params)

    def trace_train(self) -> jax.stages.Traced:
        """Trace the training step, (state, step_inputs, batch) -> (state, metrics)."""
        return trace_train_step(
            self.definition,
            self.tx,
            self.abstract,
            self.layout,
            self.abstract_inputs(),
            self.abstract_train_batch(),
            self.config.accumulation_steps,
            free_layout=self.free_layout,
            measure_logits=self.config.measures_attention_logits,
        )

    def compile_train(self) -> jax.stages.Compiled:
        """Compile the training step, (state, step_inputs, batch) -> (state, metrics).

        The compiled step takes a state that `placed` has laid out.
        """
        return self.trace_train().lower().compile(compiler_options=self.compiler_options())

    def compile_eval(self, train: jax.stages.Compiled | None = None) -> jax.stages.Compiled:
        """Compile the evaluation step, (params, step_inputs, batch) -> `LossSums`.

        The sums are those of the global batch, on every device (`compile_eval_step`).

        Args:
            train: Compiled training step, whose memory layouts the parameters then have. Default:
                the default layouts.
        """
        formats = None
        if train is not None and self.free_layout:
            formats = _formats(train)
        batch = self._abstract_eval_batch()
        return compile_eval_step(
            self.definition, self.abstract, self.layout, self.abstract_inputs(), batch, formats
        )

    def compile_logits(self) -> jax.stages.Compiled:
        """Compile a function (params, step_inputs, batch) -> logits of an evaluation batch.

        The parameters have their default memory layouts.
        """
        batch = self._abstract_eval_batch()
        return compile_logits(
            self.definition, self.abstract, self.layout, self.abstract_inputs(), batch
        )

    def compiler_options(self) -> dict[str, Any]:
        """Return the XLA flags of the training step by name, without those that the user sets."""
        device = self.mesh.devices.flat[0]
        config = self.config
        return hardware.compiler_options(
            device.platform, config.xla_flags, kind=device.device_kind, vmem_kib=config.vmem_kib
        )

    @property
    def free_layout(self) -> bool:
        """Permission for the compiler to choose the memory layout of the state.

        `True` on TPU, unless an axis of an array is split into parts that are no multiple of
        `LANES`.
        """
        # On TPU the layers take the query, key and value matrices with their heads innermost. In
        # the declared layout, each step copied the matrices and their moments to that layout and
        # back: a tenth of the memory traffic of a small step.
        if self.mesh.devices.flat[0].platform != "tpu":
            return False

        # If a shard of less than `LANES` entries becomes the innermost dimension, it is padded to a
        # full vector: f32[128256,16], an embedding of 8.2 MB, took 65.7 MB. The layouts of JAX take
        # the least memory, and a step of lm-8b on 256 chips is as fast in them (2.302e9 cycles).
        for leaf in jax.tree.leaves(self.abstract):
            shard_shape = leaf.sharding.shard_shape(leaf.shape)
            for shard_size, size in zip(shard_shape, leaf.shape, strict=True):
                if shard_size != size and shard_size % LANES:
                    return False
        return True

    def placed(self, state: TrainState, step: jax.stages.Compiled) -> TrainState:
        """Return the state in the memory layouts that the compiled training step takes.

        Args:
            state: State on the mesh in default layouts. It is donated if the compiler has chosen
                others (`free_layout`).
            step: Result of `compile_train`.
        """
        if not self.free_layout:
            return state
        return jax.device_put(state, _formats(step), donate=True)

    def train_feed(self) -> BatchSharding:
        """Return the sharding by which this process puts training batches on the mesh."""
        return BatchSharding(self.abstract_train_batch(), self.layout)

    def abstract_train_batch(self) -> dict[str, Any]:
        """Return shapes and dtypes of the arrays of a global training batch, by name.

        With `data.transforms.soft` they include `labels`, distributions over classes that only
        training batches have.
        """
        model = self.config.model
        data = self.config.data
        batch = abstract_batch(model, data.batch_size, data)
        if data.transforms.soft:
            num_classes = model.sizes()[model.output_axis]
            batch["labels"] = jax.ShapeDtypeStruct((data.batch_size, num_classes), np.float32)
        return batch

    def _abstract_eval_batch(self) -> dict[str, Any]:
        """Return shapes and dtypes of the arrays of a global evaluation batch, by name."""
        return abstract_batch(self.config.model, self.config.eval_batch_size, self.config.data)

    def eval_feed(self) -> BatchSharding:
        """Return the sharding by which this process puts evaluation batches on the mesh."""
        return BatchSharding(self._abstract_eval_batch(), self.layout)


def _formats(step: jax.stages.Compiled) -> Any:
    """Return the memory layout and sharding of each array of a training step's state."""
    arguments, _ = step.input_formats
    return arguments[0]


def assemble(
    config: Config, devices: Sequence[Any] | None = None, *, swept: bool = False
) -> Program:
    """Return the program of a config, with no state on a device and no step compiled.

    Every error of input is raised here. JAX keeps compiled programs on disk from then on (`use`).

    Args:
        devices: Devices of the mesh. Default: all devices.
        swept: The config is one of many points of a sweep, which the mesh axis `sweep` may split.

    Raises:
        ConfigError: A setting does not fit the model or the mesh.
        PresetError: The preset has no rule for this model or optimizer.
        MeshError: The mesh does not fit the devices, or the batch does not fit the mesh.
    """
    use(cache.root, devices=devices)
    preset = preset_of(config)

    rings = config.xla_flags == "scatter"
    mesh = make_mesh(config.mesh, devices, swept=swept, rings=rings)
    gradient_dtype = config.mesh.gradient_dtype
    if gradient_dtype:
        unsplit = mesh.shape["fsdp"] == 1
        splits_more = mesh.shape["sequence"] * mesh.shape["tensor"] > 1
        if unsplit or splits_more:
            raise MeshError(
                f"mesh.gradient_dtype {gradient_dtype} is for parameters that fsdp splits, "
                "and neither sequence nor tensor; leave it out, or write --mesh.fsdp -1 "
                "--mesh.data 1"
            )
    layout = MeshLayout(
        mesh, parse_rules(config.mesh.rules), rings=rings, gradient_dtype=gradient_dtype
    )
    layout.check_batch(config.data.batch_size, config.accumulation_steps)
    layout.check_batch(config.eval_batch_size, 1, "data.eval_batch_size")
    layout.check_positions(config.model)
    layout.check_experts(config.model)
    layout.matrix_dtype = jnp.dtype(config.model.compute.dtype)

    model = definition(config.model)
    if layout.platform == "tpu":
        # Only on TPU is the loss chosen by the step's peak memory.
        from mupax.train.core.costs import memory

        layout.room = memory.room(config, model, layout)
    trained = checks.trained(config.train_only, config.freeze, model.specs)
    if config.measures_attention_logits:
        _check_attention_logits(config, model, trained)
    scaled = config.scaled_optimizer
    matrix_steps = preset.matrix_steps(trained, model.sizes, scaled.name)
    tx = optimizer.build(scaled, trained, matrix_steps)
    inputs = _inputs(config, scaled, preset, model, trained)

    has_average = config.ema.decay is not None
    abstract = abstract_state(model, tx, layout, averaged=has_average, trained=trained)
    return Program(
        config=config,
        definition=model,
        preset=preset,
        layout=layout,
        tx=tx,
        abstract=abstract,
        initializer=Initializer(model, tx, abstract, trained),
        stds=init_stds(preset, model),
        inputs=inputs,
    )


def _check_attention_logits(config: Config, model: Definition, trained: Collection[str]) -> None:
    """Raise `ConfigError` if attention logits cannot be measured or, with QK-clip, clipped."""
    # Imported only here, because most runs do not measure attention logits.
    from mupax.train.core import qk_clip

    clips = config.optimizer.qk_clip is not None
    qk_clip.check_measures(model, "optimizer.qk_clip" if clips else "log.attention_logits")
    if clips:
        qk_clip.check_trained(model, trained)


def _drop(config: Config) -> Drop | None:
    """Return seed and rates of drop path, or `None` if the config has none."""
    model = config.model
    if not isinstance(model, ViTConfig) or not model.drop_path:
        return None
    # Imported only here, because most runs have no drop path.
    from mupax.zoo.layers.drop_path import Drop

    return Drop(np.uint32(config.seed), np.array(model.drop_rates, np.float32))


def _stores_bfloat16(model: Definition) -> bool:
    return any(leaf.dtype == jnp.bfloat16 for leaf in model.abstract.values())


def _inputs(
    config: Config,
    scaled: OptimizerConfig,
    preset: Preset,
    model: Definition,
    trained: Collection[str],
) -> StepInputs:
    """Return what the compiled step of a config reads besides the state and the batch.

    These inputs are on the host: the preset's factors, the optimizer's hyperparameters, limits for
    loss spikes, and scalars such as the EMA decay. `reference`, the initial parameters that a
    centred output needs, is left out (`Program.step_inputs` adds it).

    The function first checks that the preset covers the model's sizes (`check_run`). Only then it
    changes learning rates by `optimizer.adam_lr` and `optimizer.layer_decay`, because both deviate
    from the preset on purpose.

    Args:
        scaled: Optimizer of the config, scaled by the preset's joint rule if it has one.
        trained: Names of the parameters that are not frozen.
    """
    factors = resolve(preset, model, scaled.name, scaled.decay).moving(trained)
    # `None` leaves a part of the step out of the compiled program. A 0 would be an input like any
    # other, and the part would be computed.
    ema_decay = None
    if config.ema.decay is not None:
        ema_decay = np.float32(config.ema.decay)
    z_loss = None
    if config.z_loss:
        z_loss = np.float32(config.z_loss)
    qk_clip = None
    if scaled.qk_clip is not None:
        qk_clip = np.float32(scaled.qk_clip)
    rounding_seed = None
    if _stores_bfloat16(model):
        rounding_seed = np.uint32(config.seed)
    inputs = StepInputs(
        factors,
        hyperparams(scaled, config.steps),
        ema_decay=ema_decay,
        limits=_limits(config.faults),
        drop=_drop(config),
        z_loss=z_loss,
        rounding_seed=rounding_seed,
        qk_clip=qk_clip,
    )
    # Check before layer decay and the second peak (`adam_peak`) are applied, because both deviate
    # from the preset on purpose.
    check_run(preset, model, inputs.factors, scaled)
    if scaled.adam_peak is not None:
        # Imported only here, because other optimizers run without it.
        from mupax.train.core.muon import with_adam_lr

        factors = inputs.factors
        peak_lr = inputs.hyper.peak_lr
        lr = with_adam_lr(factors.lr, model.specs, np.float32(scaled.adam_peak), peak_lr)
        inputs = inputs._replace(factors=factors._replace(lr=lr))
    if scaled.layer_decay != 1:
        inputs = inputs._replace(factors=layer_decayed(inputs.factors, model, scaled.layer_decay))
    return inputs


def _limits(config: FaultsConfig) -> Limits:
    """Return from what loss on a step is a spike, and whether spikes are skipped, on the host.

    If `spike_deviations` is `None`, no loss is a spike.
    """
    deviations = np.inf if config.spike_deviations is None else config.spike_deviations
    return Limits(np.float32(deviations), np.bool_(config.skip_spikes))
