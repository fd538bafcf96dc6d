"""Encoder-decoders as data: sizes, parameters, factors, FLOPs, and the named ones. Imports no JAX.

The decoder's stack is the model's own, with a third branch in every block, `cross`: attention to what the encoder wrote. All of
the encoder has `encoder.` before its name. Layouts: BART-large and R2C2 as Dinan, Yaida and Zhang trained them (2304.02034,
section II.2), T5 (1910.10683), T5 v1.1 (flan-t5).
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, ClassVar, Literal

from mupax.config_fields import Affects
from mupax.presets.matrices import MATRICES, of_cross, of_encoder
from mupax.presets.roles import CROSSED, ENCODER, FactorSpec, ParamSpec, Role
from mupax.zoo.families import ArraySpec, ConfigError, TokenModel
from mupax.zoo.transformer import TransformerConfig

_RELATIVE = {"model.positions": "relative"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderDecoderConfig(TokenModel, TransformerConfig):
    """Tokens [B, S] for the encoder and [B, T] for the decoder to logits [B, T, vocab]. Pre-norm; `depth` is the decoder's."""

    family: ClassVar[str] = "encoder-decoder"
    causal: ClassVar[bool] = True
    denoises: ClassVar[bool] = True

    encoder_depth: Annotated[int | None, Affects("model", 3)] = None
    """Blocks of the encoder; depth unless given."""
    target_len: Annotated[int | None, Affects("model", 12)] = None
    """Longest output, decoder positions T; seq_len, which is the longest input S, unless given."""
    positions: Annotated[Literal["learned", "rotary", "relative"], Affects("model", "rotary")] = (
        "learned"
    )
    """relative: a bias of attention logits by distance, one table for all blocks of a stack (T5)."""
    rope_theta: Annotated[float, Affects("model", 100.0, given={"model.positions": "rotary"})] = (
        10_000.0
    )
    """Base wavelength of rotary positions."""
    distance_buckets: Annotated[int, Affects("model", 16, given=_RELATIVE)] = 32
    """Rows of a relative table: half of an encoder's are for keys that follow; half of those are a distance each."""
    longest_distance: Annotated[int, Affects("model", 17, given=_RELATIVE)] = 128
    """Distance from which all relative positions share a row; the rows below it are logarithmic."""
    shared: Annotated[bool, Affects("model", False)] = True
    """One token embedding for encoder and decoder."""
    tied: Annotated[bool, Affects("model", False)] = True
    """Read out with the decoder's token embedding."""
    embedding_norm: Annotated[bool, Affects("model", False)] = True
    """Norms after both embeddings, as in BART."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lora.rank is not None:
            raise ConfigError(
                "model.lora is of ViTs and decoders, and not of an encoder-decoder; leave it out"
            )
        if self.experts is not None:
            raise ConfigError(
                "model.experts is of ViTs and decoders; an encoder-decoder's blocks have an MLP, leave it out"
            )
        if self.positions == "rotary" and self.heads_dim % 2:
            raise ConfigError(
                f"rotary positions need an even head dimension, not {self.heads_dim}; write head_dim {self.heads_dim + 1}"
            )
        if self.positions == "relative" and (
            self.distance_buckets < 4 or self.distance_buckets % 4
        ):
            near = max(1, round(self.distance_buckets / 4)) * 4
            raise ConfigError(
                f"model.distance_buckets is {self.distance_buckets}, no multiple of 4; write distance_buckets {near}"
            )
        if self.positions == "relative" and self.longest_distance <= self.distance_buckets // 2:
            raise ConfigError(
                f"model.longest_distance {self.longest_distance} is no more than the distances of one row each; "
                f"write longest_distance {4 * self.distance_buckets}"
            )

    @property
    def encoder_blocks(self) -> int:
        return self.encoder_depth if self.encoder_depth is not None else self.depth

    @property
    def targets(self) -> int:
        """Decoder positions T."""
        return self.target_len if self.target_len is not None else self.seq_len

    @property
    def rotary_theta(self) -> float | None:
        return self.rope_theta if self.positions == "rotary" else None

    def base_sizes(self) -> dict[str, int]:
        return {**super().base_sizes(), "memory": self.width, "encoder_layers": self.encoder_blocks}

    def sizes(self) -> dict[str, int]:
        distance = {"distance": self.distance_buckets} if self.positions == "relative" else {}
        return {**super().sizes(), "position": self.targets, "source": self.seq_len, **distance}

    def example(self) -> dict[str, ArraySpec]:
        inputs, targets = ArraySpec((self.seq_len,), "int32"), ArraySpec((self.targets,), "int32")
        decoder = {
            "decoder_inputs": targets,
            "targets": targets,
            "weights": targets._replace(dtype="float32"),
        }
        return {"inputs": inputs, "input_mask": inputs, **decoder}

    @property
    def input_text(self) -> str:
        return f"{self.seq_len} to {self.targets} of {self.vocab_size} tokens"

    def parameters(self) -> dict[str, ParamSpec]:
        specs = self.stack()
        if self.embedding_norm:
            specs |= {
                f"embedding_{name}": spec
                for name, spec in specs.items()
                if name.startswith("norm.")
            }
        if self.positions == "relative":
            specs["relative_bias"] = ParamSpec(
                role=Role.RELATIVE_BIAS, axes=("distance", "heads"), in_block=True
            )
        ends = {"token": MATRICES["token"]}
        if self.positions == "learned":
            ends["position"] = ParamSpec(role=Role.POSITION, axes=("position", "embed"))
        attention = {
            name: spec for name, spec in specs.items() if name.startswith("block.attention")
        }
        if not self.qk_norm:
            attention.pop(
                "block.attention.key_bias", None
            )  # no positions turn it: its gradient would be zero
        cross = {
            name.replace("attention", "cross", 1): of_cross(spec)
            for name, spec in attention.items()
        }
        encoder = {f"encoder.{name}": of_encoder(spec) for name, spec in {**ends, **specs}.items()}
        if self.shared:
            del encoder["encoder.token"]
        return {
            **ends,
            **encoder,
            **specs,
            **cross,
            **({} if self.tied else {"readout": MATRICES["readout"]}),
        }

    def factors(self) -> dict[str, FactorSpec]:
        tied = ParamSpec(role=Role.READOUT, axes=("vocab", "embed"), fan_in=("embed",), tied=True)
        factor = FactorSpec(kind="readout", shape=(), value=self.width**-0.5, spec=tied)
        encoder, own = ENCODER, super().factors()
        factors = {
            f"encoder.{name}": dataclasses.replace(
                of, shape=(self.encoder_blocks, *of.shape[1:]), stack=encoder
            )
            for name, of in own.items()
        }
        for name, of in own.items():
            branches = (len(CROSSED.branches),) if len(of.shape) > 1 else ()
            factors[name] = dataclasses.replace(of, shape=(self.depth, *branches), stack=CROSSED)
        factors["block.cross.logit_scale"] = factors["block.attention.logit_scale"]
        return {**factors, **({"tied_readout": factor} if self.tied else {})}

    def applications(self, spec: ParamSpec) -> float:
        """Per target: the encoder, and what reads its output, once per input."""
        return self.seq_len / self.targets if spec.part == "encoder" or "memory" in spec.axes else 1

    def attention_flops(self) -> float:
        """Per target: of the encoder's positions among themselves, of the decoder's, and of these with the encoder's."""
        encoder = self.encoder_blocks * self.seq_len * self.seq_len / self.targets
        each = self.heads_dim + (self.value_dim or self.heads_dim)
        return (
            2 * self.num_heads * each * (encoder + self.depth * (self.targets / 2 + self.seq_len))
        )

    def module(self, rngs: Any) -> Any:
        from mupax.zoo.encoder_decoder.model import EncoderDecoder

        return EncoderDecoder(self, rngs)


def _bart(width: int, depth: int, num_heads: int) -> EncoderDecoderConfig:
    return EncoderDecoderConfig(
        width=width, depth=depth, num_heads=num_heads, vocab_size=50265, seq_len=514, activation="gelu_exact",
        bias=False, norm_gain=False,
    )  # fmt: skip


def _t5(
    width: int, depth: int, num_heads: int, mlp: int, *, v1_1: bool = False
) -> EncoderDecoderConfig:
    return EncoderDecoderConfig(
        width=width, depth=depth, num_heads=num_heads, head_dim=64, vocab_size=32128, seq_len=512, target_len=114,
        mlp_ratio=mlp / width, activation="geglu" if v1_1 else "relu", tied=not v1_1, positions="relative",
        norm="rmsnorm", norm_eps=1e-6, bias=False, embedding_norm=False,
    )  # fmt: skip


_TINY = EncoderDecoderConfig(
    width=128, depth=2, num_heads=4, vocab_size=264, seq_len=64, positions="rotary", norm="rmsnorm",
    activation="gelu", bias=False,
)  # fmt: skip

NAMED = {
    # Bytes, infilled: the default run, and the small model its preset is relative to.
    "ed-proxy": dataclasses.replace(_TINY, width=64, num_heads=2),
    "ed-tiny": _TINY,
    # Dinan, Yaida and Zhang 2023, table I; all pre-norm, without biases and gains.
    "bart-large": _bart(1024, 12, 16),
    "r2c2": _bart(2048, 22, 32),
    # Raffel et al. 2019, and the layout of T5 v1.1 as flan-t5 has it (Chung et al. 2022).
    "t5-small": _t5(512, 6, 8, 2048),
    "t5-base": _t5(768, 12, 12, 3072),
    "flan-t5-small": _t5(512, 8, 6, 1024, v1_1=True),
    "flan-t5-base": _t5(768, 12, 12, 2048, v1_1=True),
}
