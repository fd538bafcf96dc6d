"""The constants of `mup`'s family (`infinite_limits`): numbers and names that its presets take, and the ranges they are in."""

from __future__ import annotations

import dataclasses

from mupax.presets.roles import PresetError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constants:
    """What the presets of the family take; `choices` says of some what each value is.

    Attributes:
        alpha_l: branches scale as L^-alpha_l, in [1/2, 1]; None is no depth rule.
        alpha_a: attention logits scale as N^-alpha_a, in [1/2, 1].
        gamma0: amount of feature learning (gamma0 -> 0 is lazy); divides the readout.
        beta0: constant on every branch, the effective depth.
        c_a: constant on attention logits.
        decay_width: lr*wd of block matrices goes as D^decay_width.
        readout_width: the readout's initial std goes as D^readout_width.
        readout_bias_width: rates of the readout's bias go as D^readout_bias_width.
        embedding_width: Adam's rate of the token embedding goes as D^embedding_width.
        key_start: keys start from numbers of their "own" or as the "query" matrix.
        mlp_out: initial std of MLP out, "fan-in" or "mean-field", for F/D that grows.
        experts: rules of experts and their router, "mean-field", "mssp" or "dense".
        experts_eps: Adam's eps in models with experts, as the "gradients" or by the "table" of 2601.20205.
        muon_scale: Muon's step at the base, "spectral" or "rms".
    """

    alpha_l: float | None = 0.5
    alpha_a: float = 1.0
    gamma0: float = 1.0
    beta0: float = 1.0
    c_a: float = 1.0
    decay_width: float = 0.0
    readout_width: float = -1.0
    readout_bias_width: float = 0.0
    embedding_width: float = 0.0
    key_start: str = "own"
    mlp_out: str = "fan-in"
    experts: str = "mean-field"
    experts_eps: str = "gradients"
    muon_scale: str = "spectral"

    def check(self, name: str) -> None:
        """Raises PresetError for an exponent outside [1/2, 1], constants not positive or that explode; `name` is the preset's."""
        for label, value in (("alpha_a", self.alpha_a), ("alpha_l", self.alpha_l)):
            if value is not None and not 0.5 <= value <= 1.0:
                raise PresetError(
                    f"{name}: {label}={value:g} is outside [0.5, 1], where the limit exists; write a value from 0.5 to 1"
                )
        for label, value in (("gamma0", self.gamma0), ("beta0", self.beta0), ("c_a", self.c_a)):
            if not value > 0:
                raise PresetError(f"{name}: {label}={value:g} must be positive; write a number above 0")
        if self.key_start == "query" and self.alpha_a != 1:
            raise PresetError(
                f"{name}: with key_start=query logits start as N^(1-alpha_a), which grows at alpha_a={self.alpha_a:g}; write alpha_a 1"
            )
