"""What a run is: frozen configs, nested by owner. Imports no JAX, so `--help` and a wrong flag answer at once.

Every config checks itself when it is made, so a `Config` that exists can be run as far as the configs can know.
`train/config/record.py` carries one to disk and back.

Where a run runs is said here too: the mesh of its devices, which of its axes split what, and how processes find each other.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, get_args

from tyro import conf

from mupax.config_fields import Affects, Listed
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
"""Axes of every mesh, in the order of its array: what communicates least comes first."""

Rules = Mapping[str, tuple[str, ...]]
"""Logical axis to the mesh axes that split it, the first one outermost. An axis not named is whole on every device."""

DEFAULT: Rules = {
    "batch": ("data", "fsdp", "experts"),
    "sequence": ("sequence",),
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
"""The table that holds where a run says nothing else (`mesh.rules`)."""

MAY_STAY_WHOLE = frozenset({"vocab", "classes", "kv_heads"})
"""Logical axes kept whole where the mesh axis does not divide them: rarely round, and not worth refusing a run."""

_TARGETS = tuple(axis for axis in MESH_AXES if axis != "sweep")
_LOGICAL = (
    "batch",
    "sequence",
    *(axis for axis in PARAMETER_AXES if axis not in ("layers", "encoder_layers")),
)

ResumeChange = Literal["schedule", "data"]


def parse_rules(words: Sequence[str]) -> Rules:
    """The default table with rules of the form LOGICAL=MESH[,MESH...] or LOGICAL=none put over it.

    Args:
        words: such as ["mlp=fsdp", "vocab=none", "batch=data,fsdp"].

    Raises:
        ConfigError: a rule of another form, an axis that does not exist, or one that is named twice.
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
                f"mesh.rules names {logical} twice; write one rule with a comma, such as batch=data,fsdp"
            )
        rules[logical] = () if right == "none" else tuple(right.split(","))
        for name in rules[logical]:
            _check_name(name, _TARGETS, "mesh axis", f"mesh.rules has {word!r}")
        if len(set(rules[logical])) != len(rules[logical]):
            raise ConfigError(
                f"mesh.rules has {word!r}, which names a mesh axis twice; write it once"
            )
    return {**DEFAULT, **rules}


def parse_slices(words: Sequence[str]) -> dict[str, int]:
    """Mesh axis to the number of slices along it, from words of the form AXIS=N.

    Raises:
        ConfigError: a word of another form, an axis that does not exist, or one that is named twice.
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


def _check_name(name: str, names: Collection[str], kind: str, what: str) -> None:
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"write one of {', '.join(names)}"
        raise ConfigError(f"{what}, but no {kind} is named {name!r}; {hint}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Devices per named mesh axis. -1 at most once: whatever is left."""

    data: Annotated[int, Listed("layout", 2, given={"mesh.data": 1, "mesh.fsdp": -1})] = -1
    """Batch split, parameters replicated."""
    fsdp: Annotated[int, Listed("layout", 2)] = 1
    """Batch split, parameters and optimizer state split too."""
    experts: Annotated[int, Affects("layout", test="train/parallel/test_mesh_experts.py")] = 1
    """Experts split, and batch and other parameters as by fsdp; tokens are sent to their experts and back (expert parallel)."""
    sequence: Annotated[int, Listed("layout", 2)] = 1
    """Positions split (context parallel)."""
    tensor: Annotated[int, Listed("layout", 2)] = 1
    """Heads, MLP and vocabulary split."""
    sweep: Annotated[int, Affects("layout", test="train/run/test_loop_errors.py")] = 1
    """Points of a sweep side by side (`mupax sweep`); 1 in a run of its own."""
    rules: Annotated[
        tuple[str, ...],
        conf.arg(metavar="LOGICAL=MESH ..."),
        Affects("layout", ("mlp=none",), given={"mesh.tensor": 2}),
    ] = ()
    """Changes of the table from logical to mesh axes: mlp=fsdp, vocab=none, batch=data,fsdp."""
    slices: Annotated[
        tuple[str, ...],
        conf.arg(metavar="AXIS=N ..."),
        Affects("layout", test="train/parallel/test_mesh_islands.py"),
    ] = ()
    """Slices or hosts along each axis that crosses the slow network: data=2 fsdp=4. As many as fit over data, then fsdp."""
    gradient_dtype: Annotated[
        Literal["bfloat16"] | None,
        Affects("rounding", "bfloat16", given={"mesh.data": 1, "mesh.fsdp": -1}),
    ] = None
    """What fsdp's sums of gradients are sent in, and then added in float32; unless given both are of the products' type."""

    def __post_init__(self) -> None:
        parse_rules(self.rules)
        parse_slices(self.slices)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """How the processes of a run find each other. By hand; a TPU pod, SLURM and MPI say it in the environment."""

    coordinator: Annotated[
        str | None, conf.arg(metavar="HOST:PORT"), Affects("processes", "localhost:2")
    ] = None
    """Where process 0 answers the others (or JAX_COORDINATOR_ADDRESS)."""
    processes: Annotated[int | None, Affects("processes", 3)] = None
    """How many there are (or JAX_NUM_PROCESSES); 1 joins nobody, whatever the environment says."""
    process: Annotated[int | None, Affects("processes", 0)] = None
    """Number of this one, from 0 (or JAX_PROCESS_ID)."""
    timeout_seconds: Annotated[int, Affects("processes", 77)] = 300
    """How long to wait for the others at the start."""
    heartbeat_seconds: Annotated[int, Affects("processes", 66)] = 30
    """How long a process may be silent before the run ends."""

    def __post_init__(self) -> None:
        at_least("distributed.", self, 1, "processes", "timeout_seconds", "heartbeat_seconds")
        at_least("distributed.", self, 0, "process")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A complete run."""

    recipe: Annotated[conf.Suppress[conf.Fixed[str]], Affects("origin", "mine")]
    """Name of the recipe this run started from."""
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
    """Optimizer steps."""
    seed: Annotated[int, Listed("start", 1)] = 0
    """Seeds initialization, and data order and augmentation where data.seed does not."""
    freeze: Annotated[
        tuple[str, ...], conf.arg(metavar="PATTERN ..."), Affects("model", ("bias",))
    ] = ()
    """Parameters that stay as they are, by role (bias, token_embedding) or name (block.query, 'block.mlp.*')."""
    train_only: Annotated[
        tuple[str, ...], conf.arg(metavar="PATTERN ..."), Listed("model", ("bias",))
    ] = ()
    """Parameters that are trained, all others being frozen."""
    accumulation_steps: Annotated[int, Listed("rounding", 2, given={"data.batch_size": 16})] = 1
    """Microbatches per optimizer step; the batch is split, the loss stays the mean over its tokens."""
    z_loss: Annotated[float, Affects("step", 0.1)] = 0.0
    """Weight of the mean squared log-partition, logsumexp(logits)^2, which training adds to the loss; 1e-4 in PaLM."""
    workdir: Annotated[str | None, Listed("session", "there")] = None
    """Folder of checkpoints, metrics and pictures; runs/RECIPE unless given."""
    resume: Annotated[bool, Listed("session", test="train/checkpoints/test_checkpointer.py")] = (
        False
    )
    """Continue from the newest checkpoint in workdir; start the run where there is none."""
    resume_change: Annotated[
        tuple[ResumeChange, ...],
        conf.arg(metavar="schedule|data ..."),
        Listed("session", test="train/run/saves/test_resume.py"),
    ] = ()
    """What may change on resume though training then jumps: schedule (the learning rate), data (other files than before)."""
    resume_from: Annotated[
        int | Literal["best"] | None,
        conf.arg(metavar="STEP|best"),
        Listed("session", test="train/run/saves/test_best_checkpoint.py"),
    ] = None
    """With resume, the checkpoint to go on from; what came after it is set aside in workdir/branches. The newest unless given."""
    resume_exact: Annotated[bool, Affects("session", test="train/run/saves/test_resume.py")] = False
    """With resume, refuse to go on where the environment has changed so that bits can differ: options, versions, devices, mesh."""
    xla_flags: Annotated[
        Literal["auto", "none", "scatter"],
        Affects("compiler", test="train/parallel/test_hardware_flags.py"),
    ] = "auto"
    """Compiler flags of train/parallel/hardware.py for the devices at hand, or none; those in XLA_FLAGS and LIBTPU_INIT_ARGS stay.
    scatter, on TPU: also gradients by reduce-scatter along each dimension of the torus, half of the bytes of all-reduce."""
    vmem_kib: Annotated[
        int | None, Affects("compiler", test="train/parallel/test_hardware_flags.py")
    ] = None
    """On TPU: most KiB of a core's own memory that one operation may take; 32768 on v5e and v5p and 98304 on v6e, else the compiler's."""

    def __post_init__(self) -> None:
        if wrong := [name for name in self.resume_change if name not in get_args(ResumeChange)]:
            raise ConfigError(
                f"--resume-change {wrong[0]}: write {' or '.join(get_args(ResumeChange))}"
            )
        if self.resume_change and not self.resume:
            raise ConfigError(
                f"--resume-change {' '.join(self.resume_change)} is for a run that goes on; add --resume"
            )
        if self.resume_from is not None and not self.resume:
            raise ConfigError(
                f"--resume-from {self.resume_from} is for a run that goes on; add --resume"
            )
        if self.resume_exact and not self.resume:
            raise ConfigError("--resume-exact is for a run that goes on; add --resume")
        if self.resume_from != "best":
            at_least("", self, 1, "resume_from")
        at_least("", self, 1, "steps", "accumulation_steps")
        at_least("", self, 0, "seed")
        at_least("", self, 1024, "vmem_kib")
        if not 0 <= self.z_loss < math.inf:
            raise ConfigError(f"z_loss is {self.z_loss}; write a number of 0 or more, such as 1e-4")
        check_place("workdir", self.workdir)
        batch, parts = self.data.batch_size, self.accumulation_steps
        if batch % parts:
            near = nearest_divisor(batch, parts)
            raise ConfigError(
                f"data.batch_size {batch} is not divisible by accumulation_steps {parts}; write accumulation_steps {near}"
            )
        profiled = self.log.profile_steps
        if profiled and profiled[-1] > self.steps:
            raise ConfigError(
                f"log.profile {self.log.profile} ends after the last step, which is {self.steps}; "
                f"write a STOP of at most {self.steps + 1}"
            )
        opt = self.optimizer
        wsd = opt.schedule == "wsd" and self.preset.joint == "none"  # a joint rule scales both
        if wsd and opt.decay_steps and opt.warmup_steps + opt.decay_steps > self.steps:
            raise ConfigError(
                f"optimizer.warmup_steps {opt.warmup_steps} and optimizer.decay_steps {opt.decay_steps} are more than "
                f"the {self.steps} steps of the run; write decay_steps {max(1, self.steps - opt.warmup_steps)} or fewer"
            )
        task = self.data.task
        if task not in (None, self.model.task):
            named = [name for name, model in CONFIGS.items() if model.task == task]
            raise ConfigError(
                f"the data {self.data.name} is {task} and the model, a {self.model.family}, reads {self.model.task}; "
                f"write another data.name, or one of these models: {', '.join(named)}"
            )
        for name, place in self.data.evaluation_sets.items():
            if source(place).task not in (None, self.model.task):
                raise ConfigError(
                    f"data.evaluate {name}={place} is {source(place).task} and the model, a {self.model.family}, reads {self.model.task}; "
                    "leave it out"
                )
        self._check_metrics()
        if self.log.images is not None:
            if self.model.task != "images":
                raise ConfigError(
                    f"log.images shows images, and the model, a {self.model.family}, reads {self.model.task}; leave it out: log.samples "
                    "writes a sample of its text, to TensorBoard too"
                )
            if self.log.images > min(
                self.eval_batch_size, self.data.eval_examples or self.eval_batch_size
            ):
                most = min(self.eval_batch_size, self.data.eval_examples or self.eval_batch_size)
                raise ConfigError(
                    f"log.images is {self.log.images}, of one evaluation batch; write at most {most}"
                )
        if (
            isinstance(self.model, TransformerConfig)
            and self.model.lora.rank
            and not (self.train_only or self.freeze)
        ):
            raise ConfigError(
                f"model.lora.rank {self.model.lora.rank} adds adapters to matrices that stay as they are, and nothing is frozen; add "
                "--train-only lora_a lora_b, or write `mupax finetune ... --lora.rank`, which does"
            )
        if self.data.transforms != TransformsConfig() and self.model.task != "images":
            raise ConfigError(
                f"data.transforms is of images, and the model, a {self.model.family}, reads {self.model.task}; leave it out"
            )
        if self.optimizer.layer_decay != 1 and ENCODER.axis in self.model.sizes():
            raise ConfigError(
                f"optimizer.layer_decay counts the layers of one stack, and an {self.model.family} has two; leave it out"
            )
        how = self.model.compute.cross_entropy
        if self.data.transforms.soft and how not in ("auto", "plain"):
            raise ConfigError(
                f"model.compute.cross_entropy {how} takes one class a label, and mixup, cutmix and label_smoothing make "
                "distributions; write auto or plain"
            )
        if self.model.denoises and self.data.noise is None:
            raise ConfigError(
                f"the model, an {self.model.family}, reads text with noise; add --data.noise infilling or sentinels"
            )
        if self.data.noise is not None and not self.model.denoises:
            raise ConfigError(
                f"data.noise {self.data.noise} is for an encoder-decoder, and the model is a {self.model.family}; leave it out"
            )
        if self.data.document_mask and not self.model.generates:
            raise ConfigError(
                f"data.document_mask is for a decoder, and the model is a {self.model.family}; leave it out"
            )
        if self.data.reset_positions and getattr(self.model, "positions", "learned") != "learned":
            raise ConfigError(
                "data.reset_positions is of learned positions, and the model's are rotary, which tell distances alone: they are the "
                "same in a document that begins at any of them; leave it out"
            )

    def _check_metrics(self) -> None:
        """Refuse a table of metrics that is wrong, and a best checkpoint or a stop by what no evaluation measures."""
        check_table()
        metrics = metrics_of(self.data.evaluation_sets)
        for flag, count, metric in (
            ("checkpoint.keep_best", self.checkpoint.keep_best, self.checkpoint.best_metric),
            ("stop.patience", self.stop.patience, self.stop.metric),
        ):
            if count is None:
                continue
            if self.log.eval_every_steps is None:
                raise ConfigError(
                    f"{flag} {count} goes by evaluations, and the run has one at its end alone; add --log.eval-every-steps N"
                )
            if metric not in metrics:
                near = difflib.get_close_matches(metric, metrics, n=1, cutoff=0)[0]
                raise ConfigError(
                    f"no evaluation of this run measures {metric}, which {flag} would go by; did you mean {near}? "
                    f"There are {', '.join(metrics)}"
                )

    @property
    def scaled_optimizer(self) -> OptimizerConfig:
        """The optimizer that trains: `optimizer` as the preset's joint rule has it at this batch and these tokens."""
        if self.preset.joint == "none":
            return self.optimizer
        from mupax.train.config import joint

        return joint.scaled(self)

    @property
    def data_seed(self) -> int:
        """What seeds data order and augmentation."""
        return self.seed if self.data.seed is None else self.data.seed

    @property
    def eval_batch_size(self) -> int:
        """Examples of an evaluation batch, over all devices."""
        return self.data.eval_batch_size or self.data.batch_size

    def evaluates_after(self, step: int) -> bool:
        """Whether an evaluation is due after so many steps."""
        every = self.log.eval_every_steps
        return step > 0 and (step == self.steps or (every is not None and step % every == 0))

    def save_need(self, step: int) -> SaveNeed:
        """Return whether a checkpoint is due after a step, and whether the run waits for the checkpoint before."""
        if step == self.steps:
            return SaveNeed.REQUIRED
        need = self.checkpoint.save_need(step, evaluates=self.evaluates_after(step))
        if need is SaveNeed.OPTIONAL and self.faults.bad_numbers == "rollback":
            # The step that a rollback goes back to must not depend on how fast the disk is.
            return SaveNeed.REQUIRED
        return need

    def resolved(self) -> Config:
        """The same run with the defaults that depend on other fields written out."""
        return dataclasses.replace(
            self,
            workdir=self.workdir or str(Path("runs") / self.recipe),
            data=dataclasses.replace(self.data, eval_batch_size=self.eval_batch_size),
        )


def check_extras(config: Config, *, reads_data: bool = True) -> None:
    """Refuse a config that needs an extra which is not installed, before anything is prepared, written or compiled.

    Args:
        config: complete config.
        reads_data: whether the command reads data; a dry run does not.

    Raises:
        MupaxError: the text says which extra to install.
    """
    users = {name: f"--log.{name}" for name in config.log.trackers}
    texts = [word.partition("=")[2] for word in (*config.data.mix, *config.data.evaluate)]
    for name in (config.data.name, *texts):
        if reads_data and name.startswith("hf:"):
            users["hf"] = f"data.name {name}"
    product_dtype = config.model.compute.product_dtype
    if product_dtype is not None:
        users["quantized"] = f"model.compute.product_dtype {product_dtype}"
    if users:
        from mupax import extras

        for extra, user in users.items():
            extras.require(extra, user)
