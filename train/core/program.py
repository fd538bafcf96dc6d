"""A config turned into everything a run needs but its data: model, preset, mesh, optimizer, numbers, compiled steps.

Compiled programs are kept on disk, so that a command started again compiles nothing: JAX's persistent compilation cache, by default.

    CACHE/programs-KEY/PROGRAM-cache      the digest of a program, and the program

KEY stands for the versions, this CPU and the user: machine code for another CPU ends a process, and whoever can write such a
file runs code in it. JAX's own store writes in place, so a kill or a full disk leaves a broken file for good, and needs a lock
to have a limit. Here a file is whole or a miss, the oldest go first, and nothing that fails ends a run.
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
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import xxhash
from jax._src import compilation_cache as _jax_cache  # its store has no public name
from jax.sharding import Mesh

from mupax import terminal
from mupax.presets import Preset
from mupax.train.config import checks
from mupax.train.config.preset import preset_of
from mupax.train.config.run import Config, FaultsConfig, parse_rules
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
"""The folder of compiled programs, or none; `--compilation-cache` sets it."""
LIMIT = 2 * 2**30
"""Bytes of all compiled programs of a folder, unless `jax_compilation_cache_max_size` says otherwise."""
_options: Any = jax.config
_DIGEST_BYTES = 16
_CPU = Path("/proc/cpuinfo")
_FEATURES = re.compile(
    r"^(?:vendor_id|cpu family|model|model name|flags|Features|CPU \w+|cpu|isa|features)\s*:.*$",
    re.MULTILINE,
)
"""Lines about what a CPU is and can do: x86, Arm, POWER, RISC-V, IBM Z. Its frequency is not among them."""


class Store:
    """Where JAX looks compiled programs up (`jax._src.compilation_cache_interface`).

    Args:
        folder: of this machine's programs, which exists.
        limit: most bytes of all programs beside it.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self._path, self._limit, self._bytes = folder, limit, -1
        self._full = False

    def get(self, key: str) -> bytes | None:
        """The program of that key; None where there is none, or no whole one."""
        path = self._file(key)
        try:
            content = path.read_bytes()
        except OSError:
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # used last
        program = content[_DIGEST_BYTES:]
        return program if xxhash.xxh3_128_digest(program) == content[:_DIGEST_BYTES] else None

    def put(self, key: str, program: bytes) -> None:
        """Keep a program. The first that cannot be written is told in a line, and no other is tried.

        Args:
            key: of the program.
            program: compiled, as JAX has it.
        """
        if self._full or len(program) > self._limit:
            return
        path = self._file(key)
        part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
        try:
            self._make_room(len(program) + _DIGEST_BYTES)
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
        """Delete what was used longest ago, of other versions too; files are listed at first and when they may be too many."""
        if self._bytes < 0 or self._bytes + size > self._limit:
            files = []
            for path in self._path.parent.glob("programs-*/*-cache*"):
                with contextlib.suppress(OSError):  # deleted by another process
                    files.append((path.stat().st_mtime, path.stat().st_size, path))
            self._bytes = sum(length for _, length, _ in files)
            for _, length, path in sorted(files):
                if self._bytes + size <= self._limit:
                    break
                with contextlib.suppress(OSError):
                    path.unlink()
                self._bytes -= length
        self._bytes += size


def use(
    root: Callable[[], Path],
    processes: Processes | None = None,
    devices: Sequence[Any] | None = None,
) -> None:
    """Have JAX keep compiled programs from here on, unless the user has chosen otherwise; called again it changes nothing.

    JAX_COMPILATION_CACHE_DIR and JAX_ENABLE_COMPILATION_CACHE=false hold where neither `--compilation-cache` nor its variable is
    given.

    Args:
        root: gives the folder for everything that can be made again.
        processes: of the run. Process 0 alone writes, so several keep programs only in a folder that all of them see: where one
            found a program and another compiled it, compilers that share their work (GPU) would wait for each other.
        devices: to compile for, of this machine unless given. Programs for others cannot be read back, and none is kept any more.
    """
    if devices is not None and devices[0] not in jax.devices():
        _options.update("jax_enable_compilation_cache", False)
    folder = _folder(root)
    if processes is not None and processes.count > 1 and not _shared(folder, processes):
        folder = None
        if not _options.jax_compilation_cache_dir:
            _options.update("jax_enable_compilation_cache", False)
    if folder is None or _options.jax_compilation_cache_dir == str(folder):
        return
    most = _options.jax_compilation_cache_max_size
    _jax_cache.reset_cache()
    _jax_cache.get_file_cache = lambda path: (Store(Path(path), LIMIT if most < 0 else most), path)
    _options.update("jax_compilation_cache_dir", str(folder))
    if (
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ
    ):  # 1 s: most of a start is in smaller ones
        _options.update("jax_persistent_cache_min_compile_time_secs", 0)


def _folder(root: Callable[[], Path]) -> Path | None:
    """The folder for this machine's programs, made; None where none are kept, or where the user says."""
    choice = os.environ.get(VARIABLE)
    if choice == "none":
        _options.update("jax_enable_compilation_cache", False)
    if not _options.jax_enable_compilation_cache or (
        _options.jax_compilation_cache_dir and not choice
    ):
        return None
    folder = None
    try:
        folder = (Path(choice).expanduser().absolute() if choice else root()) / f"programs-{key()}"
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
    where, why = f" in {folder}" if folder else "", getattr(error, "strerror", None) or error
    terminal.note(
        f"caution: compiled programs are not kept{where}: {why}; name another folder, or none, by --compilation-cache"
    )


def _shared(folder: Path | None, processes: Processes) -> bool:
    """Whether all processes see the folder of process 0. All of them ask."""
    mark = folder / f"shared-{secrets.token_hex(4)}" if folder else None
    if processes.leader and mark is not None:
        with contextlib.suppress(OSError):
            mark.touch()
    name = processes.broadcast("compilation cache", lambda: mark and mark.name)
    visible = bool(folder and name) and any(
        _exists(folder / name, wait) for wait in (0, 0.2, 1)
    )  # a network's file
    absent = [
        i for i, sees in enumerate(processes.gather("compilation cache", visible) or []) if not sees
    ]
    verdict = processes.broadcast("compilation cache shared", lambda: not absent)
    if processes.leader and mark is not None:
        with contextlib.suppress(OSError):
            mark.unlink()
        if not verdict:
            _caution(folder, RuntimeError(f"process {absent[0]} does not see it"))
    return verdict


def _exists(path: Path, wait: float) -> bool:
    time.sleep(wait)
    return path.exists()


@functools.cache
def key() -> str:
    """16 hexadecimal digits that stand for what a compiled program is good for, and for whom."""
    versions = [version(name) for name in ("jax", "jaxlib")]
    parts = [*versions, sys.platform, platform.machine(), _cpu(), str(os.getuid())]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _cpu() -> str:
    """Model and features of this machine's CPUs."""
    with contextlib.suppress(OSError):
        return "\n".join(sorted(set(_FEATURES.findall(_CPU.read_text(errors="replace")))))
    with contextlib.suppress(OSError, subprocess.SubprocessError):  # macOS
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=10, check=True
        ).stdout
    return platform.processor()


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
    stds: ParamValues
    inputs: StepInputs
    """On the host."""

    @property
    def mesh(self) -> Mesh:
        """The devices along named axes."""
        return self.layout.mesh

    def initial_state(self) -> TrainState:
        """A fresh state on the mesh."""
        return self.initializer.state(self.config.seed, self.stds)

    def with_config(self, config: Config) -> Program:
        """Return this program with the numbers of a config that differs in nothing else.

        Raises:
            PresetError: as `assemble`.
        """
        preset = preset_of(config)
        stds, inputs = (
            init_stds(preset, self.definition),
            _inputs(config, preset, self.definition, self.trained),
        )
        return dataclasses.replace(self, config=config, preset=preset, stds=stds, inputs=inputs)

    @property
    def state_bytes(self) -> int:
        """Bytes of the training state on one device, and of the frozen reference of a centred output."""
        reference = self.abstract.params if self.config.model.centered else {}
        leaves = jax.tree.leaves((self.abstract, reference))
        return sum(
            math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
            for leaf in leaves
        )

    @property
    def trained(self) -> frozenset[str]:
        """Names of the parameters that are not frozen."""
        return frozenset(self.inputs.factors.lr)

    @property
    def frozen(self) -> int:
        """How many numbers the frozen parameters have."""
        return sum(
            leaf.size for name, leaf in self.abstract.params.items() if name not in self.trained
        )

    def step_inputs(self) -> StepInputs:
        """`inputs` on the mesh, with the initial parameters where the model's output is centred."""
        inputs = jax.device_put(self.inputs, self.layout.replicated)
        if not self.config.model.centered:
            return inputs
        return inputs._replace(reference=self.initializer.params(self.config.seed, self.stds))

    def abstract_inputs(self) -> StepInputs:
        return (
            self.inputs._replace(reference=self.abstract.params)
            if self.config.model.centered
            else self.inputs
        )

    def trace_train(self) -> jax.stages.Traced:
        """The training step, (state, inputs, batch) -> (state, metrics), not compiled yet."""
        config, inputs = self.config, self.abstract_inputs()
        batch = self.abstract_train_batch()
        accumulation = config.accumulation_steps
        return trace_train_step(
            self.definition,
            self.tx,
            self.abstract,
            self.layout,
            inputs,
            batch,
            accumulation,
            free=self.free,
        )

    def compile_train(self) -> jax.stages.Compiled:
        """The training step: (state, inputs, batch) -> (state, metrics), for a state as `placed` gives it."""
        return self.trace_train().lower().compile(compiler_options=self.compiler_options())

    def compile_eval(self, train: jax.stages.Compiled | None = None) -> jax.stages.Compiled:
        """The evaluation step: (params, inputs, batch) -> `LossSums`, for parameters that lie as the training step has them."""
        formats = _formats(train) if train is not None and self.free else None
        batch = abstract_batch(self.config.model, self.config.eval_batch_size, self.config.data)
        return compile_eval_step(
            self.definition, self.abstract, self.layout, self.abstract_inputs(), batch, formats
        )

    def compile_logits(self) -> jax.stages.Compiled:
        """(params, inputs, batch) -> logits of an evaluation batch, for parameters in their default layouts."""
        batch = abstract_batch(self.config.model, self.config.eval_batch_size, self.config.data)
        return compile_logits(
            self.definition, self.abstract, self.layout, self.abstract_inputs(), batch
        )

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

        return self.mesh.devices.flat[0].platform == "tpu" and not any(
            map(short, jax.tree.leaves(self.abstract))
        )

    def placed(self, state: TrainState, step: jax.stages.Compiled) -> TrainState:
        """The state in the layouts that the compiled training step takes.

        Args:
            state: on the mesh in default layouts; used up where the compiler has chosen others (`free`).
            step: from `compile_train`.
        """
        return jax.device_put(state, _formats(step), donate=True) if self.free else state

    def train_feed(self) -> BatchSharding:
        """This process' way of training batches to the mesh."""
        return BatchSharding(self.abstract_train_batch(), self.layout)

    def abstract_train_batch(self) -> dict[str, Any]:
        """Shapes and dtypes of a training batch; labels that are distributions over classes no evaluation has."""
        model, data = self.config.model, self.config.data
        batch = abstract_batch(model, data.batch_size, data)
        if data.transforms.soft:
            shape = data.batch_size, model.sizes()[model.output_axis]
            batch["labels"] = jax.ShapeDtypeStruct(shape, np.float32)
        return batch

    def eval_feed(self) -> BatchSharding:
        """This process' way of evaluation batches to the mesh."""
        return BatchSharding(
            abstract_batch(self.config.model, self.config.eval_batch_size, self.config.data),
            self.layout,
        )


def _formats(step: jax.stages.Compiled) -> Any:
    """How a training step takes the state's arrays: layout and sharding of each."""
    return step.input_formats[0][0]


def assemble(
    config: Config, devices: Sequence[Any] | None = None, *, swept: bool = False
) -> Program:
    """The program of a config on the devices there are; every error of input comes from here, before anything is allocated.

    Args:
        config: of the run.
        devices: all there are unless given.
        swept: whether it is one of many points, which the mesh axis `sweep` may split.

    Raises:
        ConfigError, PresetError, MeshError: what does not fit, and what to write instead.
    """
    use(cache.root, devices=devices)
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
    abstract = abstract_state(
        model, tx, layout, averaged=config.ema.decay is not None, trained=trained
    )
    initializer = Initializer(model, tx, abstract, trained)
    return Program(
        config, model, preset, layout, tx, abstract, initializer, init_stds(preset, model), inputs
    )


def _drop(config: Config) -> Drop | None:
    """What training leaves out of the model's stack; None where it asks for nothing."""
    model = config.model
    if not isinstance(model, ViTConfig) or not model.drop_path:
        return None
    from mupax.zoo.layers.drop_path import Drop

    return Drop(np.uint32(config.seed), np.array(model.drop_rates, np.float32))


def _stores_bfloat16(model: Definition) -> bool:
    return any(leaf.dtype == jnp.bfloat16 for leaf in model.abstract.values())


def _inputs(
    config: Config, preset: Preset, model: Definition, trained: Collection[str]
) -> StepInputs:
    scaled = config.scaled_optimizer
    inputs = StepInputs(
        resolve(preset, model, scaled.name, scaled.decay).moving(trained),
        hyperparams(scaled, config.steps),
        ema_decay=None if config.ema.decay is None else np.float32(config.ema.decay),
        limits=_limits(config.faults),
        drop=_drop(config),
        z_loss=np.float32(config.z_loss) if config.z_loss else None,
        rounding_seed=np.uint32(config.seed) if _stores_bfloat16(model) else None,
    )
    check_run(preset, model, inputs.factors, scaled)
    if scaled.layer_decay != 1:
        inputs = inputs._replace(factors=layer_decayed(inputs.factors, model, scaled.layer_decay))
    return inputs


def _limits(config: FaultsConfig) -> Limits:
    """What counts as a spike in a run, on the host: nothing does where it names no deviations."""
    deviations = np.inf if config.spike_deviations is None else config.spike_deviations
    return Limits(np.float32(deviations), np.bool_(config.skip_spikes))
