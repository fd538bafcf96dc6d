"""Configs of encoder-decoders: sizes, parameters, factors, FLOPs and the named models.

This file imports no JAX. The decoder is the stack of `TransformerConfig` with a third branch in
every block, `cross`, which attends to the encoder output. Names of the encoder's parameters begin
with `encoder.`. Layouts: BART-large and R2C2 as Dinan, Yaida and Zhang trained them (2304.02034,
section II.2), T5 (1910.10683) and T5 v1.1 (flan-t5).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from mupax.config_fields import Affects
from mupax.presets.roles import (
    CROSSED,
    ENCODER,
    MATRICES,
    FactorSpec,
    ParamSpec,
    Role,
    of_cross,
    of_encoder,
)
from mupax.zoo.families import ArraySpec, ConfigError, TokenModel
from mupax.zoo.transformer import TransformerConfig

_RELATIVE = {"model.positions": "relative"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderDecoderConfig(TokenModel, TransformerConfig):
    """Config of a pre-norm encoder-decoder. `depth` counts the blocks of the decoder.

    The model maps tokens [B, S] of the encoder and [B, T] of the decoder to logits
    [B, T, vocab].
    """

    family: ClassVar[str] = "encoder-decoder"
    causal: ClassVar[bool] = True
    denoises: ClassVar[bool] = True

    encoder_depth: Annotated[int | None, Affects("model", 3)] = None
    """Number of encoder blocks. By default as many as in the decoder."""
    target_len: Annotated[int | None, Affects("model", 12)] = None
    """Longest output, in decoder positions T. By default seq_len, the longest input S."""
    positions: Annotated[Literal["learned", "rotary", "relative"], Affects("model", "rotary")] = (
        "learned"
    )
    """relative adds a bias by distance to attention logits, from one table per stack (T5)."""
    rope_theta: Annotated[float, Affects("model", 100.0, given={"model.positions": "rotary"})] = (
        10_000.0
    )
    """Base wavelength of rotary positions."""
    distance_buckets: Annotated[int, Affects("model", 16, given=_RELATIVE)] = 32
    """Buckets of distances in a table of relative positions. The encoder uses half of them in each
    direction. Half of a direction's buckets hold one distance each."""
    longest_distance: Annotated[int, Affects("model", 17, given=_RELATIVE)] = 128
    """Distance from which all relative positions share a bucket. Shorter ones that have no bucket
    of their own share buckets on a logarithmic scale."""
    shared: Annotated[bool, Affects("model", False)] = True
    """Use one token embedding for encoder and decoder."""
    tied: Annotated[bool, Affects("model", False)] = True
    """Read out with the decoder's token embedding."""
    embedding_norm: Annotated[bool, Affects("model", False)] = True
    """Normalize the embeddings of encoder and decoder before their first blocks, as BART does."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lora.rank is not None:
            raise ConfigError(
                "model.lora is for ViTs and decoders, and the model is an encoder-decoder; leave "
                "model.lora.rank out"
            )
        if self.experts is not None:
            raise ConfigError(
                "model.experts is for ViTs and decoders, and the model is an encoder-decoder; "
                "leave it out"
            )
        if self.positions == "rotary" and self.heads_dim % 2:
            raise ConfigError(
                f"rotary positions need an even head dimension, not {self.heads_dim}; "
                f"write head_dim {self.heads_dim + 1}"
            )
        if self.positions == "relative":
            self._check_distances()

    def _check_distances(self) -> None:
        """Raise ConfigError if the buckets of relative positions are impossible.

        `distance_buckets` must be a multiple of 4, and `longest_distance` above half of it.
        """
        count = self.distance_buckets
        if count < 4 or count % 4:
            near = max(1, round(count / 4)) * 4
            raise ConfigError(
                f"model.distance_buckets is {count}, no multiple of 4; "
                f"write distance_buckets {near}"
            )
        # The decoder has one direction: half of all buckets hold one distance each.
        exact_count = count // 2
        if self.longest_distance <= exact_count:
            raise ConfigError(
                f"model.longest_distance {self.longest_distance} is not above {exact_count}, the "
                f"number of distances with a bucket each; write longest_distance {4 * count}"
            )

    @property
    def encoder_blocks(self) -> int:
        """Number of encoder blocks."""
        return self.encoder_depth if self.encoder_depth is not None else self.depth

    @property
    def targets(self) -> int:
        """Number of decoder positions T."""
        return self.target_len if self.target_len is not None else self.seq_len

    @property
    def rotary_theta(self) -> float | None:
        """Base wavelength of rotary positions, such as 10000. `None` for other positions."""
        return self.rope_theta if self.positions == "rotary" else None

    def base_sizes(self) -> dict[str, int]:
        return {**super().base_sizes(), "memory": self.width, "encoder_layers": self.encoder_blocks}

    def sizes(self) -> dict[str, int]:
        sizes = {**super().sizes(), "position": self.targets, "source": self.seq_len}
        if self.positions == "relative":
            sizes["distance"] = self.distance_buckets
        return sizes

    def example(self) -> dict[str, ArraySpec]:
        inputs = ArraySpec((self.seq_len,), "int32")
        targets = ArraySpec((self.targets,), "int32")
        return {
            "inputs": inputs,
            "input_mask": inputs,
            "decoder_inputs": targets,
            "targets": targets,
            "weights": targets._replace(dtype="float32"),
        }

    @property
    def input_text(self) -> str:
        return f"{self.seq_len} to {self.targets} of {self.vocab_size} tokens"

    def parameters(self) -> dict[str, ParamSpec]:
        embeddings = {"token": MATRICES["token"]}
        if self.positions == "learned":
            embeddings["position"] = ParamSpec(role=Role.POSITION, axes=("position", "embed"))

        stack = self.stack()
        if self.embedding_norm:
            final_norm = {n: spec for n, spec in stack.items() if n.startswith("norm.")}
            for name, spec in final_norm.items():
                stack[f"embedding_{name}"] = spec
        if self.positions == "relative":
            stack["relative_bias"] = ParamSpec(
                role=Role.RELATIVE_BIAS, axes=("distance", "heads"), in_block=True
            )

        encoder = {}
        for name, spec in {**embeddings, **stack}.items():
            encoder[f"encoder.{name}"] = of_encoder(spec)
        if self.shared:
            del encoder["encoder.token"]

        readout = {} if self.tied else {"readout": MATRICES["readout"]}
        return {**embeddings, **encoder, **stack, **self._cross_attention(stack), **readout}

    def _cross_attention(self, stack: Mapping[str, ParamSpec]) -> dict[str, ParamSpec]:
        """Return the declarations of cross-attention, made from those of self-attention.

        The key bias is left out without `qk_norm`, because its gradient would be zero.

        Args:
            stack: Declarations of the decoder's stack, by name.
        """
        cross = {}
        for name, spec in stack.items():
            if not name.startswith("block.attention"):
                continue
            # Without positions or norms of keys, softmax removes what a key bias adds to the
            # logits: the gradient of a key bias would be zero.
            if name == "block.attention.key_bias" and not self.qk_norm:
                continue
            cross[name.replace("attention", "cross", 1)] = of_cross(spec)
        return cross

    def factors(self) -> dict[str, FactorSpec]:
        own_factors = super().factors()
        factors = {}
        for name, factor in own_factors.items():
            shape = (self.encoder_blocks, *factor.shape[1:])
            factors[f"encoder.{name}"] = dataclasses.replace(factor, shape=shape, stack=ENCODER)

        for name, factor in own_factors.items():
            shape = (self.depth,)
            # Factors with a second axis have one number per branch, and the decoder has three.
            if len(factor.shape) > 1:
                shape = (self.depth, len(CROSSED.branches))
            factors[name] = dataclasses.replace(factor, shape=shape, stack=CROSSED)
        factors["block.cross.logit_scale"] = factors["block.attention.logit_scale"]

        if self.tied:
            tied = ParamSpec(
                role=Role.READOUT, axes=("vocab", "embed"), fan_in=("embed",), tied=True
            )
            factors["tied_readout"] = FactorSpec(
                kind="readout", shape=(), value=self.width**-0.5, spec=tied
            )
        return factors

    def applications(self, spec: ParamSpec) -> float:
        """Return how often a matrix is applied per target token, for counts of FLOPs.

        This is the number of encoder positions divided by the number of decoder positions for
        matrices of the encoder and for those that read its output. It is 1 for all others.
        """
        if spec.part == "encoder" or "memory" in spec.axes:
            return self.seq_len / self.targets
        return 1

    def attention_flops(self) -> float:
        """Return the FLOPs per target of attention logits and of the sums over values.

        Counted are attention within the encoder, causal attention within the decoder, and the
        decoder's attention to the encoder output.
        """
        encoder = self.encoder_blocks * self.seq_len * self.seq_len / self.targets
        # A causal position sees half of the context on average.
        decoder = self.depth * (self.targets / 2 + self.seq_len)
        dims_per_pair = self.heads_dim + (self.value_dim or self.heads_dim)
        return 2 * self.num_heads * dims_per_pair * (encoder + decoder)

    def module(self, rngs: Any) -> Any:
        # Imported here, because this module imports JAX and configs must load without it.
        from mupax.zoo.encoder_decoder.model import EncoderDecoder

        return EncoderDecoder(self, rngs)


def _bart(width: int, depth: int, num_heads: int) -> EncoderDecoderConfig:
    """Return the config of a BART as Dinan, Yaida and Zhang trained it: no biases, no gains."""
    return EncoderDecoderConfig(
        width=width,
        depth=depth,
        num_heads=num_heads,
        vocab_size=50265,
        seq_len=514,
        activation="gelu_exact",
        bias=False,
        norm_gain=False,
    )


def _t5(
    width: int, depth: int, num_heads: int, mlp_dim: int, *, v1_1: bool = False
) -> EncoderDecoderConfig:
    """Return the config of a T5.

    Args:
        v1_1: `True` for T5 v1.1, which has a gated MLP and a readout of its own. `False` for the
            first version, with ReLU and a tied readout.
    """
    return EncoderDecoderConfig(
        width=width,
        depth=depth,
        num_heads=num_heads,
        head_dim=64,
        vocab_size=32128,
        seq_len=512,
        target_len=114,
        mlp_ratio=mlp_dim / width,
        activation="geglu" if v1_1 else "relu",
        tied=not v1_1,
        positions="relative",
        norm="rmsnorm",
        norm_eps=1e-6,
        bias=False,
        embedding_norm=False,
    )


_TINY = EncoderDecoderConfig(
    width=128,
    depth=2,
    num_heads=4,
    vocab_size=264,
    seq_len=64,
    positions="rotary",
    norm="rmsnorm",
    activation="gelu",
    bias=False,
)

NAMED = {
    # ed-tiny is the model of the default encoder-decoder run (span corruption on bytes). ed-proxy
    # is the base model of its preset.
    "ed-proxy": dataclasses.replace(_TINY, width=64, num_heads=2),
    "ed-tiny": _TINY,
    # Dinan, Yaida and Zhang 2023 (2304.02034), table I: pre-norm, without biases and gains.
    "bart-large": _bart(1024, 12, 16),
    "r2c2": _bart(2048, 22, 32),
    # Raffel et al. 2019 (1910.10683), and flan-t5 (Chung et al. 2022) in the layout of T5 v1.1.
    "t5-small": _t5(512, 6, 8, 2048),
    "t5-base": _t5(768, 12, 12, 3072),
    "flan-t5-small": _t5(512, 8, 6, 1024, v1_1=True),
    "flan-t5-base": _t5(768, 12, 12, 2048, v1_1=True),
}
