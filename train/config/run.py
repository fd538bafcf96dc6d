"""Config of a run: frozen dataclasses, nested by owner, each of which checks itself.

A `Config` that exists can be run as far as the configs alone can know. `train/config/record.py`
writes one to disk and reads one back. This file also has the mesh of devices, the table of which
logical axis is split over which mesh axes, and how processes find each other. It imports no JAX, so
`--help` and a wrong flag answer at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, get_args

from tyro import conf

from mupax.config_fields import Affects, Listed, integer_problem
from mupax.presets.roles import AXES as PARAMETER_AXES
from mupax.presets.roles import ENCODER
from mupax.train.config.checks import at_least, check_place
from mupax.train.config.data import DataConfig, TransformsConfig, source
from mupax.train.config.metrics import check_table
from mupax.train.config.preset import PresetConfig
from mupax.train.config.sections import (
    CheckpointConfig,
    EmaConfig,
    FaultsConfig,
    InitConfig,
    LogConfig,
    OptimizerConfig,
    SaveNeed,
    StopConfig,
    metrics_of,
)
from mupax.zoo.configs import CONFIGS, ConfigError, ModelConfig
from mupax.zoo.families import nearest_divisor
from mupax.zoo.transformer import TransformerConfig

MESH_AXES = ("data", "fsdp", "experts", "sequence", "tensor", "sweep")
"""Axes of every mesh in the order of its device array, the one that communicates least first."""

Rules = Mapping[str, tuple[str, ...]]
"""Logical axis to the mesh axes that split it, the outermost first. An axis that is not in the
table is replicated."""

DEFAULT: Rules = {
    "batch": ("data", "fsdp", "experts"),
    "sequence": ("sequence",),
    # Devices that split the experts split all other parameters, too, as fsdp does.
    "embed": ("fsdp", "experts"),
    "memory": ("fsdp", "experts"),
    "representation": ("fsdp", "experts"),
    "experts": ("experts",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "expert_dim": ("tensor",),
    "vocab": ("tensor",),
    "classes": ("tensor",),
}
"""Mesh axes that split each logical axis, for a run whose `mesh.rules` are empty."""

MAY_STAY_WHOLE = frozenset({"vocab", "classes", "kv_heads"})
"""Logical axes that are replicated if the mesh axis does not divide them. Their sizes are rarely
round, and a run should not be refused for it."""

# The axis `sweep` separates the points of a sweep, which train in parallel. No array of one point
# is split over it, so no rule may name it.
_TARGETS = tuple(axis for axis in MESH_AXES if axis != "sweep")
_LOGICAL = (
    "batch",
    "sequence",
    *(axis for axis in PARAMETER_AXES if axis not in ("layers", "encoder_layers")),
)

ResumeChange = Literal["schedule", "data"]


def parse_rules(words: Sequence[str]) -> Rules:
    """Return the mesh axes of each logical axis: the table `DEFAULT` with some rows replaced.

    Args:
        words: LOGICAL=MESH[,MESH...] or LOGICAL=none, such as ["mlp=fsdp", "vocab=none"].

    Raises:
        ConfigError: A rule of another form, an axis that does not exist, or an axis named twice.
    """
    rules: dict[str, tuple[str, ...]] = {}
    for word in words:
        logical, equals, right = word.partition("=")
        if not equals:
            raise ConfigError(
                f"mesh.rules has {word!r}; write LOGICAL=MESH, such as mlp=tensor or vocab=none"
            )
        _check_name(logical, _LOGICAL, "logical axis", f"mesh.rules has {word!r}")
        if logical in rules:
            raise ConfigError(
                f"mesh.rules names {logical} twice; write one rule with a comma, "
                "such as batch=data,fsdp"
            )

        mesh_axes = () if right == "none" else tuple(right.split(","))
        for name in mesh_axes:
            _check_name(name, _TARGETS, "mesh axis", f"mesh.rules has {word!r}")
        if len(set(mesh_axes)) != len(mesh_axes):
            raise ConfigError(
                f"mesh.rules has {word!r}, which names a mesh axis twice; write it once"
            )
        rules[logical] = mesh_axes
    return {**DEFAULT, **rules}


def parse_slices(words: Sequence[str]) -> dict[str, int]:
    """Return the number of slices along each mesh axis that the words name.

    Args:
        words: AXIS=N, such as ["data=2", "fsdp=4"].

    Raises:
        ConfigError: A word of another form, an axis that does not exist, or an axis named twice.
    """
    slices: dict[str, int] = {}
    for word in words:
        axis, _, number = word.partition("=")
        if not (number.isdecimal() and int(number)):
            raise ConfigError(
                f"mesh.slices has {word!r}; write AXIS=N with a number of slices, such as data=2"
            )
        _check_name(axis, _TARGETS, "mesh axis", f"mesh.slices has {word!r}")
        if axis in slices:
            raise ConfigError(f"mesh.slices names {axis} twice; write it once")
        slices[axis] = int(number)
    return slices


def _check_name(name: str, choices: Collection[str], kind: str, context: str) -> None:
    """Raise ConfigError if `name` is not among the choices. The message begins with `context`.

    Args:
        kind: Noun for the message, such as "mesh axis".
    """
    if name in choices:
        return
    near = difflib.get_close_matches(name, choices, n=1)
    hint = f"did you mean {near[0]}?" if near else f"write one of {', '.join(choices)}"
    raise ConfigError(f"{context}, but no {kind} is named {name!r}; {hint}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Number of devices along each mesh axis. One axis may be -1, for all devices that are left."""

    data: Annotated[int, Listed("layout", 2, given={"mesh.data": 1, "mesh.fsdp": -1})] = -1
    """Number of devices that split the batch and replicate the parameters (data parallel)."""
    fsdp: Annotated[int, Listed("layout", 2)] = 1
    """Number of devices that split the batch, the parameters and the optimizer state (FSDP)."""
    experts: Annotated[int, Affects("layout", test="train/parallel/test_mesh_experts.py")] = 1
    """Number of devices that split the experts; tokens are sent to their experts and back (expert
    parallel). They split the batch and all other parameters as fsdp does."""
    sequence: Annotated[int, Listed("layout", 2)] = 1
    """Number of devices that split the positions (context parallel)."""
    tensor: Annotated[int, Listed("layout", 2)] = 1
    """Number of devices that split heads, MLP and vocabulary (tensor parallel)."""
    sweep: Annotated[int, Affects("layout", test="train/run/test_loop_errors.py")] = 1
    """Number of points of a `mupax sweep` that train side by side. 1 in any other run."""
    rules: Annotated[
        tuple[str, ...],
        conf.arg(metavar="LOGICAL=MESH ..."),
        Affects("layout", ("mlp=none",), given={"mesh.tensor": 2}),
    ] = ()
    """Changes to the table of the mesh axes that split each logical axis: mlp=fsdp, vocab=none,
    batch=data,fsdp."""
    slices: Annotated[
        tuple[str, ...],
        conf.arg(metavar="AXIS=N ..."),
        Affects("layout", test="train/parallel/test_mesh_islands.py"),
    ] = ()
    """Slices or hosts along each axis that crosses the slow network, such as data=2 fsdp=4.
    Unless given: as many as fit along data, the rest along fsdp."""
    gradient_dtype: Annotated[
        Literal["bfloat16"] | None,
        Affects("rounding", "bfloat16", given={"mesh.data": 1, "mesh.fsdp": -1}),
    ] = None
    """Type in which fsdp sends gradients to be summed; the sum is then made in float32. None:
    gradients are sent and summed in the type of the products."""

    def __post_init__(self) -> None:
        parse_rules(self.rules)
        parse_slices(self.slices)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """Settings by which the processes of a run find each other.

    A TPU pod, SLURM and MPI have them in the environment. Elsewhere they are written by hand.
    """

    coordinator: Annotated[
        str | None, conf.arg(metavar="HOST:PORT"), Affects("processes", "localhost:2")
    ] = None
    """Address at which process 0 answers the other processes (or JAX_COORDINATOR_ADDRESS)."""
    processes: Annotated[int | None, Affects("processes", 3)] = None
    """Number of processes (or JAX_NUM_PROCESSES). 1 joins no other process, whatever the
    environment says."""
    process: Annotated[int | None, Affects("processes", 0)] = None
    """Number of this process, from 0 (or JAX_PROCESS_ID)."""
    timeout_seconds: Annotated[int, Affects("processes", 77)] = 300
    """Seconds to wait for the other processes at the start."""
    heartbeat_seconds: Annotated[int, Affects("processes", 66)] = 30
    """Seconds that a process may be silent before the run ends."""

    def __post_init__(self) -> None:
        at_least("distributed.", self, 1, "processes", "timeout_seconds", "heartbeat_seconds")
        at_least("distributed.", self, 0, "process")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Config of a complete run."""

    recipe: Annotated[conf.Suppress[conf.Fixed[str]], Affects("origin", "mine")]
    """Name of the recipe that this run started from."""
    model: ModelConfig
    data: DataConfig
    preset: PresetConfig = PresetConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    ema: EmaConfig = EmaConfig()
    init: conf.OmitArgPrefixes[InitConfig] = InitConfig()
    mesh: MeshConfig = MeshConfig()
    distributed: DistributedConfig = DistributedConfig()
    checkpoint: CheckpointConfig = dataclasses.field(default=CheckpointConfig())
    stop: StopConfig = StopConfig()
    faults: FaultsConfig = FaultsConfig()
    log: LogConfig = LogConfig()
    steps: Annotated[int, Listed("step", 9)]
    """Number of optimizer steps."""
    seed: Annotated[int, Listed("start", 1)] = 0
    """Seed of the initialization. Also of data order and augmentation, unless data.seed is
    given."""
    freeze: Annotated[
        tuple[str, ...], conf.arg(metavar="PATTERN ..."), Affects("model", ("bias",))
    ] = ()
    """Parameters that are not trained, by role (bias, token_embedding) or name (block.query,
    'block.mlp.*')."""
    train_only: Annotated[
        tuple[str, ...], conf.arg(metavar="PATTERN ..."), Listed("model", ("bias",))
    ] = ()
    """Parameters that are trained, by role or name. All others are frozen."""
    accumulation_steps: Annotated[int, Listed("rounding", 2, given={"data.batch_size": 16})] = 1
    """Microbatches per optimizer step. The batch is split into them; the loss stays the mean over
    all its tokens."""
    z_loss: Annotated[float, Affects("step", 0.1)] = 0.0
    """Weight of the z-loss, the mean of logsumexp(logits)^2, in the training loss; 1e-4 in PaLM."""
    workdir: Annotated[str | None, Listed("session", "there")] = None
    """Folder of checkpoints, metrics and pictures. None: runs/RECIPE."""
    resume: Annotated[bool, Listed("session", test="train/checkpoints/test_checkpointer.py")] = (
        False
    )
    """Continue from the newest checkpoint in workdir, or start the run if there is none."""
    resume_change: Annotated[
        tuple[ResumeChange, ...],
        conf.arg(metavar="schedule|data ..."),
        Listed("session", test="train/run/saves/test_resume.py"),
    ] = ()
    """With resume: allow a change after which training jumps. schedule: another learning rate
    schedule; data: other files than before."""
    resume_from: Annotated[
        int | Literal["best"] | None,
        conf.arg(metavar="STEP|best"),
        Listed("session", test="train/run/saves/test_best_checkpoint.py"),
    ] = None
    """With resume: step of the checkpoint to continue from, or best. Everything after it is moved
    to workdir/branches. None: the newest."""
    resume_exact: Annotated[bool, Affects("session", test="train/run/saves/test_resume.py")] = False
    """With resume: refuse to continue if the environment has changed so that bits can differ
    (options, versions, devices, mesh)."""
    xla_flags: Annotated[
        Literal["auto", "none", "scatter"],
        Affects("compiler", test="train/parallel/test_hardware_flags.py"),
    ] = "auto"
    """auto: the compiler flags of train/parallel/hardware.py for the devices at hand; none: no
    flags. Flags in XLA_FLAGS and LIBTPU_INIT_ARGS stay. scatter, on TPU: auto, and gradients are
    summed by reduce-scatter along each dimension of the torus, which sends half the bytes of
    all-reduce."""
    vmem_kib: Annotated[
        int | None, Affects("compiler", test="train/parallel/test_hardware_flags.py")
    ] = None
    """On TPU: KiB of a core's vector memory that one operation may use. None: 32768 on v5e and
    v5p, 98304 on v6e, elsewhere the compiler's."""

    def __post_init__(self) -> None:
        # The first check that fails decides the message, so their order is part of the interface.
        problem = integer_problem(self)
        if problem is not None:
            raise ConfigError(problem)
        self._check_resume()
        self._check_numbers()
        self._check_durations()
        self._check_tasks()
        self._check_metrics()
        self._check_images()
        self._check_model_options()
        self._check_noise_and_documents()

    def _check_resume(self) -> None:
        """Refuse options of a resumed run in a run that does not resume, or with wrong values."""
        choices = get_args(ResumeChange)
        wrong = [name for name in self.resume_change if name not in choices]
        if wrong:
            raise ConfigError(f"--resume-change {wrong[0]}: write {' or '.join(choices)}")
        if self.resume_change and not self.resume:
            changes = " ".join(self.resume_change)
            raise ConfigError(f"--resume-change {changes} is for a run that goes on; add --resume")
        if self.resume_from is not None and not self.resume:
            raise ConfigError(
                f"--resume-from {self.resume_from} is for a run that goes on; add --resume"
            )
        if self.resume_exact and not self.resume:
            raise ConfigError("--resume-exact is for a run that goes on; add --resume")
        # `at_least` compares numbers, and "best" is a text.
        if self.resume_from != "best":
            at_least("", self, 1, "resume_from")

    def _check_numbers(self) -> None:
        """Refuse a number out of its range, and a batch that its microbatches do not divide.

        A workdir in a bucket that mupax cannot write is refused, too.
        """
        at_least("", self, 1, "steps", "accumulation_steps")
        at_least("", self, 0, "seed")
        if self.seed >= 2**32:  # initialization takes 32 bits
            raise ConfigError(f"seed is {self.seed}; write a number below 2^32 = {2**32}")
        at_least("", self, 1024, "vmem_kib")
        # Comparing NaN by order gives False, so this form refuses NaN. `< 0` would accept it.
        if not 0 <= self.z_loss < math.inf:
            raise ConfigError(f"z_loss is {self.z_loss}; write a number of 0 or more, such as 1e-4")
        check_place("workdir", self.workdir)

        batch_size = self.data.batch_size
        if batch_size % self.accumulation_steps:
            near = nearest_divisor(batch_size, self.accumulation_steps)
            raise ConfigError(
                f"data.batch_size {batch_size} is not divisible by accumulation_steps "
                f"{self.accumulation_steps}; write accumulation_steps {near}"
            )

    def _check_durations(self) -> None:
        """Refuse profiled steps, warm-up and decay that do not fit into the run."""
        profiled = self.log.profile_steps
        if profiled and profiled[-1] > self.steps:
            raise ConfigError(
                f"log.profile {self.log.profile} ends after the last step, which is {self.steps}; "
                f"write a STOP of at most {self.steps + 1}"
            )

        opt = self.optimizer
        # A joint rule scales warm-up and decay later, so their sum is not known here.
        is_wsd = opt.schedule == "wsd" and self.preset.joint == "none"
        if is_wsd and opt.decay_steps and opt.warmup_steps + opt.decay_steps > self.steps:
            longest = max(1, self.steps - opt.warmup_steps)
            raise ConfigError(
                f"optimizer.warmup_steps {opt.warmup_steps} and optimizer.decay_steps "
                f"{opt.decay_steps} are more than the {self.steps} steps of the run; "
                f"write decay_steps {longest} or fewer"
            )

    def _check_tasks(self) -> None:
        """Refuse data, and further evaluation sets, that the model cannot read."""
        task = self.data.task
        model_task = self.model.task
        # `None` is a TFDS data set of unknown task, which is checked when it is opened.
        if task not in (None, model_task):
            names = [name for name, model in CONFIGS.items() if model.task == task]
            raise ConfigError(
                f"the data {self.data.name} is {task} and the model, a {self.model.family}, "
                f"reads {model_task}; "
                f"write another data.name, or one of these models: {', '.join(names)}"
            )
        for name, place in self.data.evaluation_sets.items():
            set_task = source(place).task
            if set_task not in (None, model_task):
                raise ConfigError(
                    f"data.evaluate {name}={place} is {set_task} and the model, "
                    f"a {self.model.family}, reads {model_task}; leave it out"
                )

    def _check_images(self) -> None:
        """Refuse `log.images` for a model of text, and more images than an evaluation batch has."""
        if self.log.images is None:
            return
        if self.model.task != "images":
            raise ConfigError(
                f"log.images shows images, and the model, a {self.model.family}, "
                f"reads {self.model.task}; leave it out: log.samples "
                "writes a sample of its text, to TensorBoard too"
            )
        # An evaluation of fewer examples than a batch has fewer images to show.
        limit = min(self.eval_batch_size, self.data.eval_examples or self.eval_batch_size)
        if self.log.images > limit:
            raise ConfigError(
                f"log.images is {self.log.images}, of one evaluation batch; write at most {limit}"
            )

    def _check_model_options(self) -> None:
        """Refuse options that do not fit the kind of model.

        They are adapters without anything frozen, QK-clip with `qk_norm` or with adapters on the
        attention, transforms for a model of text, layer decay for an encoder-decoder, and soft
        labels with another cross-entropy than auto or plain.
        """
        model = self.model
        transforms = self.data.transforms
        freezes = bool(self.train_only or self.freeze)
        # Adapters of a trained matrix could learn nothing that the matrix cannot.
        if isinstance(model, TransformerConfig) and model.lora.rank and not freezes:
            raise ConfigError(
                f"model.lora.rank {model.lora.rank} adds adapters to matrices that stay as they "
                "are, and nothing is frozen; add --train-only lora_a lora_b, or write "
                "`mupax finetune ... --lora.rank`, which does"
            )
        self._check_qk_clip()
        if transforms != TransformsConfig() and model.task != "images":
            raise ConfigError(
                f"data.transforms is for images, and the model, a {model.family}, "
                f"reads {model.task}; leave its fields out"
            )
        if self.optimizer.layer_decay != 1 and ENCODER.axis in model.sizes():
            raise ConfigError(
                f"optimizer.layer_decay counts the layers of one stack, and an {model.family} "
                "has two; leave it out"
            )
        implementation = model.compute.cross_entropy
        if transforms.soft and implementation not in ("auto", "plain"):
            raise ConfigError(
                f"model.compute.cross_entropy {implementation} takes one class a label, and mixup, "
                "cutmix and label_smoothing make distributions; write auto or plain"
            )

    def _check_qk_clip(self) -> None:
        """Refuse QK-clip for normalized queries and keys, and for adapters on the attention."""
        model = self.model
        if self.optimizer.qk_clip is None or not isinstance(model, TransformerConfig):
            return
        if model.qk_norm:
            raise ConfigError(
                "optimizer.qk_clip shrinks query and key matrices, and model.qk_norm normalizes "
                "their outputs, so no logit would change; leave one of them out"
            )
        if model.lora.rank and "attention" in model.lora.on:
            raise ConfigError(
                "optimizer.qk_clip shrinks query and key matrices, and model.lora adds adapters "
                "to them that it would leave; leave it out, or write lora.on mlp"
            )

    def _check_noise_and_documents(self) -> None:
        """Refuse noise and document masks that do not fit the model.

        Noise needs an encoder-decoder, which needs noise. A document mask needs a decoder, and
        positions that begin anew in each document must be learned.
        """
        model = self.model
        data = self.data
        if model.denoises and data.noise is None:
            raise ConfigError(
                f"the model, an {model.family}, reads text with noise; "
                "add --data.noise infilling or sentinels"
            )
        if data.noise is not None and not model.denoises:
            raise ConfigError(
                f"data.noise {data.noise} is for an encoder-decoder, "
                f"and the model is a {model.family}; leave it out"
            )
        if data.document_mask and not model.generates:
            raise ConfigError(
                f"data.document_mask is for a decoder, and the model is a {model.family}; "
                "leave it out"
            )
        if data.reset_positions and getattr(model, "positions", "learned") != "learned":
            raise ConfigError(
                "data.reset_positions needs learned positions, and the model's are rotary, which "
                "only depend on distances, so that resetting changes nothing; leave it out"
            )

    def _check_metrics(self) -> None:
        """Refuse a wrong table of metrics, and best checkpoints or early stopping without a metric.

        Both need `log.eval_every_steps`, and a metric that the run's evaluations measure.
        """
        check_table()
        metrics = metrics_of(self.data.evaluation_sets)
        readers = (
            ("checkpoint.keep_best", self.checkpoint.keep_best, self.checkpoint.best_metric),
            ("stop.patience", self.stop.patience, self.stop.metric),
        )
        for flag, count, metric in readers:
            if count is None:
                continue
            if self.log.eval_every_steps is None:
                raise ConfigError(
                    f"{flag} {count} goes by evaluations, and the run has one at its end alone; "
                    "add --log.eval-every-steps N"
                )
            if metric not in metrics:
                # With a cutoff of 0 even the worst match counts, so the list is not empty.
                near = difflib.get_close_matches(metric, metrics, n=1, cutoff=0)[0]
                raise ConfigError(
                    f"no evaluation of this run measures {metric}, which {flag} would go by; "
                    f"did you mean {near}? There are {', '.join(metrics)}"
                )

    @property
    def scaled_optimizer(self) -> OptimizerConfig:
        """Optimizer that trains: `optimizer`, scaled by the preset's joint rule if it has one.

        Raises:
            ConfigError, PresetError: The joint rule cannot be applied (`joint.scaled`).
        """
        if self.preset.joint == "none":
            return self.optimizer
        # Imported late, because most runs have no joint rule.
        from mupax.train.config import joint

        return joint.scaled(self)

    @property
    def measures_attention_logits(self) -> bool:
        """True if every training step measures the largest attention logit."""
        return self.log.attention_logits or self.optimizer.qk_clip is not None

    @property
    def data_seed(self) -> int:
        """Seed of data order and augmentation."""
        return self.seed if self.data.seed is None else self.data.seed

    @property
    def eval_batch_size(self) -> int:
        """Examples in an evaluation batch, over all devices."""
        return self.data.eval_batch_size or self.data.batch_size

    def evaluates_after(self, step: int) -> bool:
        """Return whether an evaluation is due after `step` optimizer steps.

        One is due every `log.eval_every_steps` steps and after the last step, and never at step 0.
        """
        if step <= 0:
            return False
        interval = self.log.eval_every_steps
        # The last step always counts: the summary of a run needs its final loss.
        return step == self.steps or (interval is not None and step % interval == 0)

    def save_need(self, step: int) -> SaveNeed:
        """Return whether a checkpoint is due after `step`, and whether it may be skipped.

        The last step requires one. With `faults.bad_numbers` "rollback", one that is due may not be
        skipped.
        """
        if step == self.steps:
            return SaveNeed.REQUIRED
        need = self.checkpoint.save_need(step, evaluates=self.evaluates_after(step))
        if need is SaveNeed.OPTIONAL and self.faults.bad_numbers == "rollback":
            # The step that a rollback goes back to must not depend on how fast the disk is.
            return SaveNeed.REQUIRED
        return need

    def resolved(self) -> Config:
        """Return the config with the defaults of `workdir` and `eval_batch_size` written out."""
        return dataclasses.replace(
            self,
            workdir=self.workdir or str(Path("runs") / self.recipe),
            data=dataclasses.replace(self.data, eval_batch_size=self.eval_batch_size),
        )


def check_extras(config: Config, *, reads_data: bool = True) -> None:
    """Refuse a config that needs an optional dependency (pip extra) which is not installed.

    Commands call this before any other work.

    Args:
        reads_data: `False` for a command that opens no data, such as a dry run.

    Raises:
        MupaxError: An extra is missing. The text names it.
    """
    # The keys are extras. The values are the settings that need them, for the message.
    users = {name: f"--log.{name}" for name in config.log.trackers}
    texts = []
    # Sources of mixtures and evaluation sets need the same packages as data.name.
    for word in (*config.data.mix, *config.data.evaluate):
        texts.append(word.partition("=")[2])
    for name in (config.data.name, *texts):
        if reads_data and name.startswith("hf:"):
            users["hf"] = f"data.name {name}"
    product_dtype = config.model.compute.product_dtype
    if product_dtype is not None:
        users["quantized"] = f"model.compute.product_dtype {product_dtype}"
    if users:
        # Imported late, because most runs need no extra.
        from mupax import extras

        for extra, user in users.items():
            extras.require(extra, user)
