"""Decoder language models as data: sizes, parameters, factors, what their layers see. Imports no JAX."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Any, ClassVar, Literal

from mupax.config_fields import Affects
from mupax.presets.matrices import MATRICES
from mupax.presets.roles import FactorSpec, ParamSpec, Role
from mupax.zoo.families import ConfigError, TokenModel
from mupax.zoo.transformer import AttentionSpec, RopeScaling, TransformerConfig

_ROTARY = {"model.positions": "rotary"}
_WINDOWED = {**_ROTARY, "model.window": 5}
_LLAMA3 = {**_ROTARY, "model.rope_scaling": "llama3", "model.rope_original_len": 16}
"""Fields that those of rotary positions need."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig(TokenModel, TransformerConfig):
    """Causal decoder language model: tokens [B, T] to logits [B, T, vocab]."""

    family: ClassVar[str] = "decoder"
    causal: ClassVar[bool] = True
    generates: ClassVar[bool] = True

    positions: Annotated[Literal["learned", "rotary"], Affects("model", "rotary")] = "learned"
    rope_theta: Annotated[float, Affects("model", 100.0, given=_ROTARY)] = 10_000.0
    """Base wavelength of rotary positions."""
    rope_scaling: Annotated[
        Literal["none", "linear", "llama3"], Affects("model", "linear", given=_ROTARY)
    ] = "none"
    """Frequencies for a context longer than the one first trained on: all divided, or (Llama 3.1) those of few turns within it."""
    rope_factor: Annotated[float, Affects("model", 4.0, given=_LLAMA3)] = 8.0
    """What scaled frequencies are divided by."""
    rope_low_freq_factor: Annotated[float, Affects("model", 2.0, given=_LLAMA3)] = 1.0
    """llama3: turns within the first context below which a frequency is divided."""
    rope_high_freq_factor: Annotated[float, Affects("model", 8.0, given=_LLAMA3)] = 4.0
    """llama3: turns within the first context above which it is left alone."""
    rope_original_len: Annotated[int, Affects("model", 12, given=_LLAMA3)] = 8192
    """llama3: the first context, in positions."""
    rotary_fraction: Annotated[float, Affects("model", 0.5, given=_ROTARY)] = 1.0
    """Share of each head that rotary positions turn, its first entries."""
    parallel: Annotated[bool, Affects("model", True)] = False
    """A block's MLP reads the stream as its attention does, not after it (GPT-J, GPT-NeoX)."""
    window: Annotated[int | None, Affects("model", 5)] = None
    """Positions that a query sees, its own and those before it (sliding window); all before it unless given."""
    full_every: Annotated[int | None, Affects("model", 2, given={"model.window": 5})] = None
    """Every so-many-th block has no window; each has it unless given."""
    window_theta: Annotated[float | None, Affects("model", 7.0, given=_WINDOWED)] = None
    """Base wavelength of rotary positions in blocks with a window, whose frequencies are not scaled; as in the others unless given."""
    post_norm: Annotated[bool, Affects("model", True)] = False
    """Normalize what each branch writes, too, with a gain (Gemma 2)."""
    attention_softcap: Annotated[float | None, Affects("model", 2.0)] = None
    """Attention logits x are cap * tanh(x / cap); as they are unless given."""
    logit_softcap: Annotated[float | None, Affects("model", 2.0)] = None
    """The same of the model's logits."""
    tied: Annotated[bool, Affects("model", True)] = False
    """Read out with the token embedding."""
    readout_bias: Annotated[bool, Affects("model", True)] = False
    """Trainable bias of the logits."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.positions == "rotary" and self.heads_dim % 2:
            raise ConfigError(
                f"rotary positions need an even head dimension, not {self.heads_dim}; write head_dim {self.heads_dim + 1}"
            )
        if self.rotary_fraction != 1 and not (
            0 < self.rotary_fraction < 1 and self.rotary_size and self.rotary_size % 2 == 0
        ):
            raise ConfigError(
                f"model.rotary_fraction {self.rotary_fraction} of {self.heads_dim} is {self.rotary_size} entries of a head; write a share "
                "of at most 1 that makes an even number"
            )
        if self.full_every is not None and (self.window is None or self.full_every < 2):
            raise ConfigError(
                f"model.full_every is {self.full_every} with window {self.window}; it says which blocks have no window: write window "
                "too, and at least 2"
            )
        if self.window_theta is not None and (
            self.window is None or self.positions != "rotary" or self.window_theta <= 0
        ):
            raise ConfigError(
                f"model.window_theta is {self.window_theta}; it is a wavelength above 0 of rotary positions, in blocks with a window: "
                "write window and positions rotary too"
            )
        for name in ("attention_softcap", "logit_softcap"):
            if (cap := getattr(self, name)) is not None and not 0 < cap < math.inf:
                raise ConfigError(f"model.{name} is {cap}; write a number above 0, such as 50")
        if self.rotary_fraction != 1 and self.positions != "rotary":
            raise ConfigError(
                "model.rotary_fraction is of rotary positions; write positions rotary"
            )
        if self.rope_scaling == "none":
            plain = {of.name: of.default for of in dataclasses.fields(self)}
            for name in (
                "rope_factor",
                "rope_low_freq_factor",
                "rope_high_freq_factor",
                "rope_original_len",
            ):
                if (value := getattr(self, name)) != plain[name]:
                    raise ConfigError(
                        f"model.{name} {value} is of scaled frequencies; write rope_scaling llama3 or linear"
                    )
            return
        if self.positions != "rotary":
            raise ConfigError(
                f"model.rope_scaling {self.rope_scaling} is of rotary positions; write positions rotary"
            )
        if not 1 <= self.rope_factor < math.inf:
            raise ConfigError(
                f"model.rope_factor is {self.rope_factor}; write a number of at least 1"
            )
        if not 0 < self.rope_low_freq_factor < self.rope_high_freq_factor < math.inf:
            raise ConfigError(
                f"model.rope_low_freq_factor {self.rope_low_freq_factor} is not between 0 and model.rope_high_freq_factor "
                f"{self.rope_high_freq_factor}; write 1 and 4, as Llama 3.1 has"
            )

    @property
    def rotary_theta(self) -> float | None:
        return self.rope_theta if self.positions == "rotary" else None

    def rotary_of(self, sight: AttentionSpec) -> tuple[float | None, RopeScaling | None]:
        if self.window_theta is None or sight.window is None:
            return super().rotary_of(sight)
        return self.window_theta, None

    @property
    def rotary_size(self) -> int:
        return (
            int(self.rotary_fraction * self.heads_dim)
            if self.rotary_fraction != 1
            else self.heads_dim
        )

    @property
    def parallel_branches(self) -> bool:
        return self.parallel

    @property
    def rotary_scaling(self) -> RopeScaling | None:
        if self.rope_scaling == "none":
            return None
        turns = self.rope_low_freq_factor, self.rope_high_freq_factor
        return RopeScaling(self.rope_scaling, self.rope_factor, *turns, self.rope_original_len)

    @property
    def sight(self) -> AttentionSpec:
        return AttentionSpec(self.causal, self.window, self.attention_softcap)

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        if self.full_every is None:
            return (self.sight,)
        return (*[self.sight] * (self.full_every - 1), self.sight._replace(window=None))

    @property
    def branch_gains(self) -> float | None:
        return 1.0 if self.post_norm else None

    @property
    def post_norms(self) -> bool:
        return self.post_norm

    def parameters(self) -> dict[str, ParamSpec]:
        learned = {"position": ParamSpec(role=Role.POSITION, axes=("position", "embed"))}
        return {
            "token": MATRICES["token"],
            **(learned if self.positions == "learned" else {}),
            **self.stack(),
            **({} if self.tied else {"readout": MATRICES["readout"]}),
            **({"readout_bias": MATRICES["readout"].bias} if self.readout_bias else {}),
        }

    def factors(self) -> dict[str, FactorSpec]:
        tied = ParamSpec(role=Role.READOUT, axes=("vocab", "embed"), fan_in=("embed",), tied=True)
        factor = FactorSpec(kind="readout", shape=(), value=self.width**-0.5, spec=tied)
        return {**super().factors(), **({"tied_readout": factor} if self.tied else {})}

    def module(self, rngs: Any) -> Any:
        from mupax.zoo.decoder.model import Decoder

        return Decoder(self, rngs)
