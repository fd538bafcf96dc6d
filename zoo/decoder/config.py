"""Config of decoder language models: sizes, parameters, factors and attention. Imports no JAX."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Any, ClassVar, Literal

from mupax.config_fields import Affects
from mupax.presets.roles import MATRICES, FactorSpec, ParamSpec, Role
from mupax.zoo.families import ConfigError, TokenModel
from mupax.zoo.transformer import AttentionSpec, RopeScaling, TransformerConfig

# Settings that other fields need to have an effect (`Affects.given`). For example, rope_theta is
# read only if positions are rotary.
_ROTARY = {"model.positions": "rotary"}
_WINDOWED = {**_ROTARY, "model.window": 5}
_LLAMA3 = {**_ROTARY, "model.rope_scaling": "llama3", "model.rope_original_len": 16}


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
    """Scaling of the rotary frequencies for a context longer than in the first training. linear:
    divide all of them. llama3: divide those with few turns in the original context (Llama 3.1)."""
    rope_factor: Annotated[float, Affects("model", 4.0, given=_LLAMA3)] = 8.0
    """Divisor of the scaled frequencies."""
    rope_low_freq_factor: Annotated[float, Affects("model", 2.0, given=_LLAMA3)] = 1.0
    """llama3: a frequency with fewer turns in the original context is divided by rope_factor."""
    rope_high_freq_factor: Annotated[float, Affects("model", 8.0, given=_LLAMA3)] = 4.0
    """llama3: a frequency with more turns in the original context is kept. Frequencies in between
    are interpolated."""
    rope_original_len: Annotated[int, Affects("model", 12, given=_LLAMA3)] = 8192
    """llama3: length of the original context, in positions."""
    rotary_fraction: Annotated[float, Affects("model", 0.5, given=_ROTARY)] = 1.0
    """Share of each head's entries that rotary positions turn, beginning with the first entry."""
    parallel: Annotated[bool, Affects("model", True)] = False
    """Apply a block's MLP to the same residual stream as its attention, instead of after attention
    (GPT-J, GPT-NeoX)."""
    window: Annotated[int | None, Affects("model", 5)] = None
    """Number of positions that a query attends to, its own and the ones before (sliding window).
    No limit by default."""
    full_every: Annotated[int | None, Affects("model", 2, given={"model.window": 5})] = None
    """Interval of blocks without a window: block full_every, 2 * full_every and so on. By default
    every block has the window."""
    window_theta: Annotated[float | None, Affects("model", 7.0, given=_WINDOWED)] = None
    """Base wavelength of rotary positions in blocks with a window, whose frequencies are then not
    scaled. rope_theta by default."""
    post_norm: Annotated[bool, Affects("model", True)] = False
    """Also normalize the output of each branch, with a gain (Gemma 2)."""
    attention_softcap: Annotated[float | None, Affects("model", 2.0)] = None
    """Soft cap of attention logits x: cap * tanh(x / cap). Off by default."""
    logit_softcap: Annotated[float | None, Affects("model", 2.0)] = None
    """Soft cap of the model's logits x: cap * tanh(x / cap). Off by default."""
    tied: Annotated[bool, Affects("model", True)] = False
    """Use the token embedding as the readout."""
    readout_bias: Annotated[bool, Affects("model", True)] = False
    """Trainable bias of the logits."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_rotary_size()
        self._check_window()
        for name in ("attention_softcap", "logit_softcap"):
            cap = getattr(self, name)
            if cap is not None and not 0 < cap < math.inf:
                raise ConfigError(f"model.{name} is {cap}; write a number above 0, such as 50")
        if self.rotary_fraction != 1 and self.positions != "rotary":
            raise ConfigError(
                f"model.rotary_fraction is {self.rotary_fraction}, and only rotary positions read "
                "it; write model.positions rotary, or leave model.rotary_fraction out"
            )
        if self.rope_scaling == "none":
            self._refuse_scaling_fields()
        else:
            self._check_rope_scaling()

    def _check_rotary_size(self) -> None:
        """Raise ConfigError if rotary positions cannot rotate the entries of a head in pairs.

        The head dimension must be even. `rotary_fraction` must be at most 1 and above 0, and make
        an even number of entries.
        """
        if self.positions == "rotary" and self.heads_dim % 2:
            raise ConfigError(
                f"rotary positions need an even head dimension, not {self.heads_dim}; write "
                f"head_dim {self.heads_dim + 1}"
            )
        if self.rotary_fraction == 1:
            return
        is_share = 0 < self.rotary_fraction < 1
        if not is_share or self.rotary_size == 0 or self.rotary_size % 2:
            raise ConfigError(
                f"model.rotary_fraction {self.rotary_fraction} of {self.heads_dim} is "
                f"{self.rotary_size} entries of a head; write a share of at most 1 that makes an "
                "even number"
            )

    def _check_window(self) -> None:
        """Raise ConfigError if `full_every` or `window_theta` is wrong or set without `window`."""
        if self.full_every is not None and (self.window is None or self.full_every < 2):
            raise ConfigError(
                f"model.full_every is {self.full_every} with model.window {self.window}; every "
                "full_every-th block has no window, so write a window and at least 2"
            )
        if self.window_theta is None:
            return
        if self.window is None or self.positions != "rotary" or self.window_theta <= 0:
            raise ConfigError(
                f"model.window_theta is {self.window_theta}; write a number above 0, and "
                "model.window and model.positions rotary too, or leave it out"
            )

    def _refuse_scaling_fields(self) -> None:
        """Raise ConfigError if a field that only `rope_scaling` reads is not at its default."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        names = (
            "rope_factor",
            "rope_low_freq_factor",
            "rope_high_freq_factor",
            "rope_original_len",
        )
        for name in names:
            value = getattr(self, name)
            if value != defaults[name]:
                raise ConfigError(
                    f"model.{name} is {value}, and only scaled frequencies read it; write "
                    f"model.rope_scaling llama3 or linear, or leave model.{name} out"
                )

    def _check_rope_scaling(self) -> None:
        """Raise ConfigError unless the fields of `rope_scaling` are in range.

        Positions must be rotary, the factor at least 1, and the low limit below the high one.
        """
        if self.positions != "rotary":
            raise ConfigError(
                f"model.rope_scaling is {self.rope_scaling}, and only rotary positions read it; "
                "write model.positions rotary, or leave model.rope_scaling out"
            )
        if not 1 <= self.rope_factor < math.inf:
            raise ConfigError(
                f"model.rope_factor is {self.rope_factor}; write a number of at least 1"
            )
        if not 0 < self.rope_low_freq_factor < self.rope_high_freq_factor < math.inf:
            raise ConfigError(
                f"model.rope_low_freq_factor {self.rope_low_freq_factor} is not between 0 and "
                f"model.rope_high_freq_factor {self.rope_high_freq_factor}; write 1 and 4, as "
                "Llama 3.1 has"
            )

    @property
    def rotary_theta(self) -> float | None:
        return self.rope_theta if self.positions == "rotary" else None

    def rotary_of(self, attention: AttentionSpec) -> tuple[float | None, RopeScaling | None]:
        if self.window_theta is None or attention.window is None:
            return super().rotary_of(attention)
        return self.window_theta, None

    @property
    def rotary_size(self) -> int:
        if self.rotary_fraction == 1:
            return self.heads_dim
        return int(self.rotary_fraction * self.heads_dim)

    @property
    def parallel_branches(self) -> bool:
        return self.parallel

    @property
    def rotary_scaling(self) -> RopeScaling | None:
        if self.rope_scaling == "none":
            return None
        return RopeScaling(
            kind=self.rope_scaling,
            factor=self.rope_factor,
            low=self.rope_low_freq_factor,
            high=self.rope_high_freq_factor,
            original=self.rope_original_len,
        )

    @property
    def sight(self) -> AttentionSpec:
        return AttentionSpec(self.causal, self.window, self.attention_softcap)

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        if self.full_every is None:
            return (self.sight,)
        # As in Gemma 2 and 3, a period ends with its block of full attention.
        windowed = [self.sight] * (self.full_every - 1)
        return (*windowed, self.sight._replace(window=None))

    @property
    def branch_gains(self) -> float | None:
        return 1.0 if self.post_norm else None

    @property
    def post_norms(self) -> bool:
        return self.post_norm

    def parameters(self) -> dict[str, ParamSpec]:
        specs = {"token": MATRICES["token"]}
        if self.positions == "learned":
            specs["position"] = ParamSpec(role=Role.POSITION, axes=("position", "embed"))
        specs.update(self.stack())
        # A tied readout is no parameter: it is a factor on the token embedding (`factors`).
        if not self.tied:
            specs["readout"] = MATRICES["readout"]
        if self.readout_bias:
            specs["readout_bias"] = MATRICES["readout"].bias
        return specs

    def factors(self) -> dict[str, FactorSpec]:
        factors = super().factors()
        if self.tied:
            readout = ParamSpec(
                role=Role.READOUT, axes=("vocab", "embed"), fan_in=("embed",), tied=True
            )
            factors["tied_readout"] = FactorSpec(
                kind="readout", shape=(), value=self.width**-0.5, spec=readout
            )
        return factors

    def module(self, rngs: Any) -> Any:
        # Imported here, because this module imports JAX and configs must load without it.
        from mupax.zoo.decoder.model import Decoder

        return Decoder(self, rngs)
