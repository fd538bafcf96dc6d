"""What a model family is: a frozen config that says all the rest of the project asks of a model. Imports no JAX.

A parameter is declared once, in `ModelConfig.parameters()`: modules, counts, FLOPs, shardings, presets' tables and the names in
files of others are made from it. A family is one file with its config and module, named in `mupax.zoo.configs.FAMILIES` or by its class alone.

Its parameters and FLOPs are counted from its declaration alone, nothing built.

Counted are the matrix products, 2 FLOPs per multiply-add: norms, softmax, activations and embedding look-ups are left out, as is
whatever remat computes again. A causal position attends to half of the context on average and is counted so, whatever the
implementation computes. PaLM's MFU (Chowdhery et al. 2022, 2204.02311, appendix B) counts attention in full, 12 L H Q T a
token, causal or not: by it the same step has a higher MFU.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from mupax.config_fields import Affects, Listed
from mupax.errors import MupaxError
from mupax.plugins import importable_name
from mupax.presets.roles import ENCODER, EXPERTS, OWN, FactorSpec, ParamSpec, Role, Stack

KINDS = {
    Role.PATCH_EMBEDDING: "read-in",
    Role.QUERY: "attention projections",
    Role.KEY: "attention projections",
    Role.VALUE: "attention projections",
    Role.ATTENTION_OUT: "attention projections",
    Role.MLP_IN: "mlp",
    Role.MLP_OUT: "mlp",
    Role.ROUTER: "router",
    Role.EXPERT_IN: "experts",
    Role.EXPERT_OUT: "experts",
    Role.LORA_A: "adapters",
    Role.LORA_B: "adapters",
    Role.HIDDEN: "hidden",
    Role.READOUT: "readout",
}

AttentionName = Literal["auto", "xla", "cudnn", "splash", "ring"]
CrossEntropy = Literal["auto", "plain", "chunked", "vocab"]
Remat = Literal["none", "dots", "attention", "block", "offload"]
Task = Literal["tokens", "images"]


_LARGEST_DIVIDED = 2**40


class ConfigError(MupaxError):
    """A model config that cannot be built. The text says what to write instead."""


def nearest_divisor(number: int, most: int) -> int:
    """Return the largest divisor of a number that is at most another number.

    Args:
        number: from 1.
        most: from 1.
    """
    if number >= _LARGEST_DIVIDED:  # as only a mistake is
        return 1
    low = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return max(
        divisor for divisor in (*low, *(number // divisor for divisor in low)) if divisor <= most
    )


class ArraySpec(NamedTuple):
    """Shape and type of one example's array in a batch, without the batch dimension."""

    shape: tuple[int, ...]
    dtype: Literal["int32", "float32"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComputeConfig:
    """How a model runs: same function, different speed, memory and rounding."""

    layers: Annotated[Literal["auto", "scan", "unrolled"], Affects("rounding", "unrolled")] = "auto"
    """One compiled block looped over depth (compile time constant in depth), or every block compiled (faster on CPU)."""
    remat: Annotated[Remat, Listed("rounding", "block")] = "none"
    """What the backward pass recomputes: nothing, all but matrix products, all but the outputs of attention's kernel, or whole blocks, whose
    inputs offload keeps in the host's memory."""
    attention: Annotated[AttentionName, Listed("rounding", test="zoo/layers/test_kernels.py")] = (
        "auto"
    )
    """auto takes a flash kernel where there is one that can: splash on TPU, cudnn on GPU; where devices split positions, a ring on TPU."""
    attention_block: Annotated[
        int | None, Affects("rounding", test="zoo/layers/test_kernels.py")
    ] = None
    """Positions on a side of a splash kernel's block, a multiple of 128; what suits the chip unless given."""
    projections: Annotated[Literal["auto", "separate", "fused"], Affects("rounding", "fused")] = (
        "auto"
    )
    """Queries, keys and values, and an MLP's gate and up, by a product each or by one; they stay parameters of their own."""
    cross_entropy: Annotated[CrossEntropy, Affects("rounding", "chunked")] = "auto"
    """All logits at once, those of a few tokens at a time, or of a part of the vocabulary; auto takes parts where logits would be large."""
    param_dtype: Annotated[Literal["float32", "bfloat16"], Affects("rounding", "bfloat16")] = (
        "float32"
    )
    """Storage of parameters and optimizer state. Updates are computed in float32; bfloat16 is rounded stochastically."""
    dtype: Annotated[Literal["float32", "bfloat16"], Listed("rounding", "bfloat16")] = "float32"
    """Matrix products and activations; norms, softmax and the loss stay in float32."""
    product_dtype: Annotated[
        Literal["int8", "float8"] | None, Affects("rounding", test="test_extras.py")
    ] = None
    """Products of blocks with their weights, forward and back, in this type (extra `quantized`); in dtype unless given."""

    def __post_init__(self) -> None:
        if self.attention_block is not None and (
            self.attention_block < 128 or self.attention_block % 128
        ):
            near = max(1, round(self.attention_block / 128)) * 128
            raise ConfigError(
                f"model.compute.attention_block is {self.attention_block}, no multiple of 128; write {near}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(abc.ABC):
    """A model as data, whatever its family. A subclass takes its task from `TokenModel` or `ImageModel`."""

    family: ClassVar[str]
    """Name in `mupax.zoo.configs.FAMILIES`; module:Class where it has none."""
    task: ClassVar[Task]
    """What it reads: the data that it fits has this kind."""
    output_axis: ClassVar[str]
    """The logical axis of the logits."""
    causal: ClassVar[bool] = False
    """Whether a position sees only those before it."""
    generates: ClassVar[bool] = False
    """Whether its module continues a text (`mupax.zoo.decoder.model.Decoder.cached`)."""
    denoises: ClassVar[bool] = False
    """Whether it reads one text and writes another: text with noise (`data.noise`), and what was there."""

    centered: Annotated[bool, Affects("model", True)] = False
    """Train f - f at initialization (Bordelon et al. 2024), not f."""
    compute: ComputeConfig = ComputeConfig()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "family" not in cls.__dict__:
            # A script's own class is found again by the script's name, not as `__main__`.
            module = importable_name(cls.__module__) or cls.__module__
            cls.family = f"{module}:{cls.__qualname__}"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if type(value) is int and value < 1:
                raise ConfigError(
                    f"model.{field.name} is {value}; write a whole number of at least 1"
                )

    @abc.abstractmethod
    def parameters(self) -> dict[str, ParamSpec]:
        """Every parameter by its name, which is its path in the module: this is its one declaration."""

    @abc.abstractmethod
    def module(self, rngs: Any) -> Any:
        """The NNX module, each parameter made from its declaration; import JAX in here, or beside the class.

        Args:
            rngs: `nnx.Rngs` that numbers are drawn from; None: parameters are shapes alone.
        """

    @abc.abstractmethod
    def base_sizes(self) -> dict[str, int]:
        """Sizes that a parameterization takes to infinity, by logical axis name."""

    def finite_sizes(self) -> dict[str, int]:
        """Sizes that a parameterization leaves as they are, beside those of what is read and written."""
        return {}

    @abc.abstractmethod
    def sizes(self) -> dict[str, int]:
        """Every logical axis of this model and its size."""

    @abc.abstractmethod
    def example(self) -> dict[str, ArraySpec]:
        """What one example of a batch holds: `inputs`, `targets` and the targets' `weights`."""

    @property
    @abc.abstractmethod
    def input_text(self) -> str:
        """What the model reads, in a few words."""

    def factors(self) -> dict[str, FactorSpec]:
        """Every number that the forward pass multiplies by, by its path in the module."""
        return {}

    def applications(self, spec: ParamSpec) -> float:
        """How often one unit (a token, an image) goes through a matrix: once per position of the residual stream."""
        return self.sizes()["position"] // self.units

    def attention_flops(self) -> float:
        """FLOPs per unit of the products that no matrix takes part in."""
        return 0.0

    def splitting_hint(self, ways: int) -> tuple[str, str]:
        """What the positions are made of, and what to write where they do not split so many ways."""
        return "", f"--model.seq-len with a multiple of {ways}"

    @property
    def unit(self) -> str:
        """What rates and FLOPs count: token or image."""
        return self.task.removesuffix("s")

    @property
    def units(self) -> int:
        """Units of one example, which are its targets."""
        return math.prod(self.example()["targets"].shape)

    @property
    def position_grid(self) -> int:
        """Side of the square that learned positions lie on, after those of class tokens; 0 where they are a line."""
        return 0

    @property
    def absorbs_logit_scale(self) -> bool:
        """Whether some parameter can hold what attention logits are taken times."""
        return True

    @property
    def tied_readout(self) -> ParamSpec | None:
        """Declaration of a readout that shares the embedding's table; None where it has its own."""
        return next(
            (factor.spec for factor in self.factors().values() if factor.kind == "readout"), None
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenModel(ModelConfig):
    """Reads tokens [B, T] and predicts the next one at every position: logits [B, T, vocab]."""

    task: ClassVar[Task] = "tokens"
    output_axis: ClassVar[str] = "vocab"

    vocab_size: Annotated[int, Listed("model", 257)]
    seq_len: Annotated[int, Listed("model", 12)]
    """Longest context, and the number of learned positions."""

    def sizes(self) -> dict[str, int]:
        return {
            **self.base_sizes(),
            **self.finite_sizes(),
            "vocab": self.vocab_size,
            "position": self.seq_len,
        }

    def example(self) -> dict[str, ArraySpec]:
        tokens = ArraySpec((self.seq_len,), "int32")
        return {"inputs": tokens, "targets": tokens, "weights": tokens._replace(dtype="float32")}

    @property
    def input_text(self) -> str:
        return f"{self.seq_len} of {self.vocab_size} tokens"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageModel(ModelConfig):
    """Reads images [B, height, width, channels] in patches and classifies them: logits [B, classes]."""

    task: ClassVar[Task] = "images"
    output_axis: ClassVar[str] = "classes"

    image_size: Annotated[int, Listed("model", 12)]
    """Height and width of the square input, in pixels."""
    patch_size: Annotated[int, Listed("model", 2)]
    channels: Annotated[int, Affects("model", 3)] = 3
    num_classes: Annotated[int, Affects("model", 9)] = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.image_size % self.patch_size:
            near = nearest_divisor(self.image_size, self.patch_size)
            raise ConfigError(
                f"model.image_size {self.image_size} is not divisible by model.patch_size {self.patch_size}; write patch_size {near}"
            )

    @property
    def num_patches(self) -> int:
        return self.position_grid**2

    @property
    def seq_len(self) -> int:
        return self.num_patches

    @property
    def position_grid(self) -> int:
        return self.image_size // self.patch_size

    def sizes(self) -> dict[str, int]:
        patch = self.patch_size**2 * self.channels
        ends = {"patch": patch, "position": self.seq_len, "classes": self.num_classes}
        return {**self.base_sizes(), **self.finite_sizes(), **ends}

    def example(self) -> dict[str, ArraySpec]:
        pixels = ArraySpec((self.image_size, self.image_size, self.channels), "float32")
        return {
            "inputs": pixels,
            "targets": ArraySpec((), "int32"),
            "weights": ArraySpec((), "float32"),
        }

    def applications(self, spec: ParamSpec) -> float:
        """The read-in once per patch, the readout once, the stack once per position."""
        return {Role.PATCH_EMBEDDING: self.num_patches, Role.READOUT: 1}.get(
            spec.role, self.seq_len
        )

    def splitting_hint(self, ways: int) -> tuple[str, str]:
        return f" ({self.num_patches} patches)", "another --model.patch-size"

    @property
    def input_text(self) -> str:
        return f"{self.image_size}x{self.image_size}x{self.channels}, patch {self.patch_size}"


class Blocks(NamedTuple):
    """A residual stack at its sizes."""

    stack: Stack
    depth: int
    length: int
    """Positions of its stream."""
    memory: int
    """Positions of an encoder's output that every block reads; 0 without one."""
    specs: tuple[ParamSpec, ...]
    """Parameters of one block."""


def stacks(model: ModelConfig) -> tuple[Blocks, ...]:
    """The residual stacks of a model, its own last; of one without factors a stack of the usual branches."""
    sizes, blocks = model.sizes(), []
    for stack in dict.fromkeys(
        [of.stack for of in model.factors().values() if of.kind == "branch"] or [OWN]
    ):
        encodes = stack == ENCODER
        specs = [
            of
            for of in model.parameters().values()
            if of.in_block and (of.part == "encoder") == encodes
        ]
        length, memory = (
            sizes.get("source" if encodes else "position", 0),
            "cross" in stack.branches,
        )
        blocks.append(
            Blocks(
                stack,
                sizes.get(stack.axis, 0),
                length,
                sizes.get("source", 0) if memory else 0,
                tuple(specs),
            )
        )
    return tuple(blocks)


def params(model: ModelConfig) -> int:
    """Trainable numbers of the built model."""
    sizes = model.sizes()
    return sum(math.prod(sizes[axis] for axis in spec.axes) for spec in model.parameters().values())


def forward_terms(model: ModelConfig) -> dict[str, float]:
    """FLOPs of one forward pass by kind of matrix product, per token (decoder, at full context) or per image."""
    sizes, terms = model.sizes(), dict.fromkeys(KINDS.values(), 0.0)
    for spec in [*model.parameters().values(), model.tied_readout]:
        if spec and spec.fan_in:
            share = (
                sizes["active"] / sizes["experts"] if spec.role in EXPERTS else 1
            )  # that a token goes through
            weights = math.prod(sizes[axis] for axis in spec.axes) * share
            terms[KINDS[spec.role]] += 2 * weights * model.applications(spec)
    return {
        kind: flops
        for kind, flops in {**terms, "attention": model.attention_flops()}.items()
        if flops
    }


def forward_flops(model: ModelConfig) -> float:
    """FLOPs of one forward pass of the network, per token (decoder, at full context) or per image."""
    return float(sum(forward_terms(model).values()))


def train_flops(model: ModelConfig) -> float:
    """FLOPs of one training step per token or image.

    The forward pass, a backward pass of twice that, and for a centred model the frozen initial network's forward pass.
    """
    return (4 if model.centered else 3) * forward_flops(model)
