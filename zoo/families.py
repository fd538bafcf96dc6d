"""Base classes of model configs, and counts of parameters and FLOPs from a config. Imports no JAX.

A family is one file with a config and a module. The config declares each parameter once, in
`ModelConfig.parameters()`. Modules, counts, shardings, presets' tables and the names in other
projects' files all follow from that declaration.

FLOPs count matrix products only, 2 per multiply-add. Norms, softmax, activations, embedding
look-ups and whatever remat recomputes are left out. A causal position is counted with half of the
context, its average, whatever the implementation computes. PaLM's MFU (Chowdhery et al. 2022,
2204.02311, appendix B) counts attention in full, 12 L H Q T per token, causal or not, so that the
same step has a higher MFU there.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from mupax import MupaxError
from mupax.config_fields import Affects, Listed, integer_problem
from mupax.plugins import importable_name
from mupax.presets.roles import ENCODER, EXPERTS, OWN, FactorSpec, ParamSpec, Role, Stack

# Kind of matrix product by role of its parameter, for reports of FLOPs.
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

_MAX_FACTORED = 2**40
"""Smallest number that `nearest_divisor` does not try to factor."""


class ConfigError(MupaxError):
    """Error about a model config that cannot be built. The text says what to write instead."""


def nearest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor of `number` that is at most `limit`.

    Both are at least 1. The result is 1 for a number of 2^40 or more.
    """
    if number >= _MAX_FACTORED:
        # Only a mistyped size is that large, and trial division would take too long.
        return 1
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    large = [number // divisor for divisor in small]
    return max(divisor for divisor in small + large if divisor <= limit)


class ArraySpec(NamedTuple):
    """Shape and dtype of one example's array in a batch, without the batch dimension."""

    shape: tuple[int, ...]
    dtype: Literal["int32", "float32"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComputeConfig:
    """Settings of speed, memory and rounding, which leave the model's function as it is."""

    layers: Annotated[Literal["auto", "scan", "unrolled"], Affects("rounding", "unrolled")] = "auto"
    """scan: compile one block and loop over depth, so that compile time does not grow with depth.
    unrolled: compile every block, which runs faster on CPU. auto: unrolled on CPU for up to 16
    blocks, otherwise scan."""
    remat: Annotated[Remat, Listed("rounding", "block")] = "none"
    """Activations that the backward pass recomputes. none: nothing. dots: everything except matrix
    products. attention: everything except the outputs of the attention kernel. block: whole blocks.
    offload: whole blocks, with their inputs kept in the host's memory."""
    attention: Annotated[AttentionName, Listed("rounding", test="zoo/layers/test_kernels.py")] = (
        "auto"
    )
    """Attention implementation. auto takes a flash kernel if one fits: splash on TPU, cudnn on GPU,
    and on TPU a ring if devices split positions."""
    attention_block: Annotated[
        int | None, Affects("rounding", test="zoo/layers/test_kernels.py")
    ] = None
    """Side of a splash kernel's block in positions, a multiple of 128. By default it suits the
    chip."""
    projections: Annotated[Literal["auto", "separate", "fused"], Affects("rounding", "fused")] = (
        "auto"
    )
    """Compute queries, keys and values, and an MLP's gate and up, with one product each (separate)
    or with one product for all (fused). They are separate parameters in both cases. auto is
    separate."""
    cross_entropy: Annotated[CrossEntropy, Affects("rounding", "chunked")] = "auto"
    """Logits that the loss forms at a time. plain: all. chunked: those of a few tokens. vocab:
    those of a part of the vocabulary. auto takes parts if the logits would be large."""
    param_dtype: Annotated[Literal["float32", "bfloat16"], Affects("rounding", "bfloat16")] = (
        "float32"
    )
    """Storage type of parameters and optimizer state. Updates are computed in float32, and rounded
    stochastically to bfloat16."""
    dtype: Annotated[Literal["float32", "bfloat16"], Listed("rounding", "bfloat16")] = "float32"
    """Type of matrix products and activations. Norms, softmax and the loss stay in float32."""
    product_dtype: Annotated[
        Literal["int8", "float8"] | None, Affects("rounding", test="test_extras.py")
    ] = None
    """Type of the products of blocks with their weights, forward and backward. It needs the extra
    `quantized`. `dtype` by default."""

    def __post_init__(self) -> None:
        block = self.attention_block
        if block is not None and (block < 128 or block % 128):
            near = max(1, round(block / 128)) * 128
            raise ConfigError(
                f"model.compute.attention_block is {block}, no multiple of 128; write {near}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(abc.ABC):
    """Config of a model of any family. A family's config extends `TokenModel` or `ImageModel`."""

    family: ClassVar[str]
    """Name in `mupax.zoo.configs.FAMILIES`, or module:Class for a family that is not listed."""
    task: ClassVar[Task]
    """Kind of the model's inputs, and of the data that it can be trained on."""
    output_axis: ClassVar[str]
    """Logical axis of the logits."""
    causal: ClassVar[bool] = False
    """True if a position sees only itself and those before it."""
    generates: ClassVar[bool] = False
    """True if the module continues a text (`mupax.zoo.decoder.model.Decoder.cached`)."""
    denoises: ClassVar[bool] = False
    """True if the model reads a corrupted text (`data.noise`) and writes what was removed."""

    centered: Annotated[bool, Affects("model", True)] = False
    """Train f minus f at initialization (Bordelon et al. 2024) instead of f."""
    compute: ComputeConfig = ComputeConfig()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "family" not in cls.__dict__:
            # For a class in a script, use the module name of the script. `__main__` would be
            # another module in the next process.
            module = importable_name(cls.__module__) or cls.__module__
            cls.family = f"{module}:{cls.__qualname__}"

    def __post_init__(self) -> None:
        problem = integer_problem(self, "model.")
        if problem is not None:
            raise ConfigError(problem)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            # bool is a subclass of int. With isinstance, a flag that is False would be refused as
            # 0.
            if type(value) is int and value < 1:
                raise ConfigError(
                    f"model.{field.name} is {value}; write a whole number of at least 1"
                )

    @abc.abstractmethod
    def parameters(self) -> dict[str, ParamSpec]:
        """Return the declaration of every parameter, by its path in the module."""

    @abc.abstractmethod
    def module(self, rngs: Any) -> Any:
        """Build the NNX module, with every parameter made from its declaration.

        Configs of the zoo import JAX and their module's file only inside this method.

        Args:
            rngs: `nnx.Rngs` for initial values. `None` makes parameters that are shapes only.
        """

    @abc.abstractmethod
    def base_sizes(self) -> dict[str, int]:
        """Return the sizes that a parameterization scales with, such as width and depth.

        The keys are logical axes, such as "embed" and "layers".
        """

    def finite_sizes(self) -> dict[str, int]:
        """Return sizes that a parameterization treats as fixed, by logical axis. `{}` by default.

        The sizes of inputs and outputs, such as "vocab", are fixed too, but are not in the result.
        """
        return {}

    @abc.abstractmethod
    def sizes(self) -> dict[str, int]:
        """Return the size of every logical axis of this model."""

    @abc.abstractmethod
    def example(self) -> dict[str, ArraySpec]:
        """Return shape and dtype of each array of one example, without the batch dimension.

        The keys are `inputs`, `targets`, `weights` (weight of each target in the loss), and the
        names of further inputs if the model has any.
        """

    @property
    @abc.abstractmethod
    def input_text(self) -> str:
        """Description of the model's input in a few words, for lists of models."""

    def factors(self) -> dict[str, FactorSpec]:
        """Return the declarations of constant factors in the forward pass, by path in the module.

        A preset sets their values, such as the scale of attention logits. There are none by
        default.
        """
        return {}

    def applications(self, spec: ParamSpec) -> float:
        """Return how often one unit (token or image) goes through a matrix, for counts of FLOPs.

        By default this is the number of positions of the residual stream per unit, 1 for a token.
        """
        return self.sizes()["position"] // self.units

    def attention_flops(self) -> float:
        """Return the FLOPs per token or image of matrix products without a parameter.

        It is 0 by default. In transformers these are the two products of attention.
        """
        return 0.0

    def splitting_hint(self, num_shards: int) -> tuple[str, str]:
        """Return two parts of the error message for positions that devices cannot split evenly.

        The first part says in parentheses what the positions are, and may be empty. The second one
        says which flags to write instead.

        Args:
            num_shards: Number of parts into which devices split the positions.
        """
        return "", f"--model.seq-len with a multiple of {num_shards}"

    @property
    def unit(self) -> str:
        """Unit of throughput and FLOPs: token or image."""
        return self.task.removesuffix("s")

    @property
    def units(self) -> int:
        """Number of units in one example. Each has one target."""
        return math.prod(self.example()["targets"].shape)

    @property
    def position_grid(self) -> int:
        """Number of patches on a side of an image's square grid. 0 for a model of tokens."""
        return 0

    @property
    def absorbs_logit_scale(self) -> bool:
        """True if some parameter can absorb a factor on the attention logits. True by default."""
        return True

    @property
    def tied_readout(self) -> ParamSpec | None:
        """Declaration of a readout that shares the embedding's table. `None` without one."""
        for factor in self.factors().values():
            if factor.kind == "readout":
                return factor.spec
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenModel(ModelConfig):
    """Config of a model that predicts the next token: tokens [B, T] to logits [B, T, vocab]."""

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
        weights = ArraySpec((self.seq_len,), "float32")
        return {"inputs": tokens, "targets": tokens, "weights": weights}

    @property
    def input_text(self) -> str:
        return f"{self.seq_len} of {self.vocab_size} tokens"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageModel(ModelConfig):
    """Config of a classifier: images [B, height, width, channels] to logits [B, classes].

    The model reads an image in square patches.
    """

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
                f"model.image_size {self.image_size} is not divisible by model.patch_size "
                f"{self.patch_size}; write patch_size {near}"
            )

    @property
    def num_patches(self) -> int:
        return self.position_grid**2

    @property
    def seq_len(self) -> int:
        """Number of positions in the residual stream."""
        return self.num_patches

    @property
    def position_grid(self) -> int:
        return self.image_size // self.patch_size

    def sizes(self) -> dict[str, int]:
        return {
            **self.base_sizes(),
            **self.finite_sizes(),
            "patch": self.patch_size**2 * self.channels,
            "position": self.seq_len,
            "classes": self.num_classes,
        }

    def example(self) -> dict[str, ArraySpec]:
        pixels = ArraySpec((self.image_size, self.image_size, self.channels), "float32")
        return {
            "inputs": pixels,
            "targets": ArraySpec((), "int32"),
            "weights": ArraySpec((), "float32"),
        }

    def applications(self, spec: ParamSpec) -> float:
        """Return how often one image goes through a matrix.

        The patch embedding is applied once per patch, the readout once, and all others once per
        position.
        """
        if spec.role is Role.PATCH_EMBEDDING:
            return self.num_patches
        if spec.role is Role.READOUT:
            return 1
        return self.seq_len

    def splitting_hint(self, num_shards: int) -> tuple[str, str]:
        return f" ({self.num_patches} patches)", "another --model.patch-size"

    @property
    def input_text(self) -> str:
        return f"{self.image_size}x{self.image_size}x{self.channels}, patch {self.patch_size}"


class Blocks(NamedTuple):
    """Size and parameters of one residual stack, such as the encoder of an encoder-decoder."""

    stack: Stack
    depth: int
    length: int
    """Number of positions in the stack's residual stream."""
    memory: int
    """Number of positions in the encoder output that every block reads. 0 without an encoder."""
    specs: tuple[ParamSpec, ...]
    """Declarations of the parameters in the stack's blocks."""


def stacks(model: ModelConfig) -> tuple[Blocks, ...]:
    """Return the residual stacks of a model. The last one ends in the readout.

    The stacks are those for which `ModelConfig.factors` declares a "branch" factor. A model that
    declares none has one stack, whose blocks are attention and MLP.
    """
    sizes = model.sizes()
    # Every residual stack declares branch factors of its own, so these name the stacks.
    branch_stacks = [factor.stack for factor in model.factors().values() if factor.kind == "branch"]
    blocks = []
    # dict.fromkeys removes duplicates and keeps the order.
    for stack in dict.fromkeys(branch_stacks or [OWN]):
        is_encoder = stack == ENCODER
        specs = []
        for spec in model.parameters().values():
            if spec.in_block and (spec.part == "encoder") == is_encoder:
                specs.append(spec)
        length_axis = "source" if is_encoder else "position"
        memory = 0
        if "cross" in stack.branches:
            memory = sizes.get("source", 0)
        blocks.append(
            Blocks(
                stack=stack,
                depth=sizes.get(stack.axis, 0),
                length=sizes.get(length_axis, 0),
                memory=memory,
                specs=tuple(specs),
            )
        )
    return tuple(blocks)


def shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter that a model declares, by name.

    Raises:
        ConfigError: A parameter has an axis without a size.
    """
    sizes = model.sizes()
    result = {}
    for name, spec in model.parameters().items():
        missing = [axis for axis in spec.axes if axis not in sizes]
        if missing:
            raise ConfigError(
                f"{name}: the config of {model.family} declares the axis {missing[0]!r} and gives "
                f"it no size; add it to base_sizes(), to finite_sizes() if it stays fixed, or to "
                f"sizes() if it is one of the inputs or outputs"
            )
        result[name] = tuple(sizes[axis] for axis in spec.axes)
    return result


def params(model: ModelConfig) -> int:
    """Return the number of entries of all parameters of a model together."""
    return sum(math.prod(shape) for shape in shapes(model).values())


def forward_terms(model: ModelConfig) -> dict[str, float]:
    """Return the FLOPs of one forward pass by kind of matrix product.

    The keys are kinds of matrices (values of `KINDS`, such as "read-in"), and "attention" for the
    products of attention, which have no parameter. FLOPs are per token at full context, or per
    image. Kinds with 0 FLOPs are left out.
    """
    sizes = model.sizes()
    terms = dict.fromkeys(KINDS.values(), 0.0)
    for spec in [*model.parameters().values(), model.tied_readout]:
        if spec is None or not spec.fan_in:
            continue
        # A token goes through its active experts only.
        share: float = 1
        if spec.role in EXPERTS:
            share = sizes["active"] / sizes["experts"]
        weights = math.prod(sizes[axis] for axis in spec.axes) * share
        terms[KINDS[spec.role]] += 2 * weights * model.applications(spec)
    terms["attention"] = model.attention_flops()
    return {kind: flops for kind, flops in terms.items() if flops}


def forward_flops(model: ModelConfig) -> float:
    """Return the FLOPs of one forward pass, per token at full context, or per image."""
    return float(sum(forward_terms(model).values()))


def train_flops(model: ModelConfig) -> float:
    """Return the FLOPs of one training step, per token at full context, or per image.

    A backward pass has twice the FLOPs of a forward pass. A centered model also runs the forward
    pass of the frozen initial network.
    """
    forward_passes = 4 if model.centered else 3
    return forward_passes * forward_flops(model)
