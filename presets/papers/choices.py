"""What sources disagree on, as data: each value of a named constant, its rule, who has it, and how well that is known.

`mupax presets constants PRESET` prints it. Of a constant that is listed no other value is taken, but of `decay_width`, which
may be any number.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from mupax.presets.roles import PresetError

Status = Literal["verified", "reported", "derived"]
"""verified: read in the source's own text or code; reported: read in an account of it; derived: worked out here."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """One value of a constant, for the presets that take it."""

    constant: str
    value: float | str
    presets: tuple[str, ...]
    rule: str
    source: str
    status: Status


_FAMILY = ("mup", "mup-half", "depth-mup")

CHOICES = (
    Choice("readout_width", -1.0, _FAMILY, "readout std D^-1: the output vanishes at the start and never explodes",
           "Tensor Programs V, Tables 3 and 8 (2203.03466)", "verified"),
    Choice("readout_width", -0.5, _FAMILY, "readout std D^-1/2 with the rates of -1: the output starts at order one, its change in the "
           "first step grows as D^1/2; SGD rates of all else D^-1/2 lower, eps D^1/2 higher",
           "sp-layerwise's readout (Everett et al. 2407.05872); SGD and eps derived", "derived"),
    Choice("readout_bias_width", 0.0, _FAMILY, "rates of the readout's bias do not scale", "Tensor Programs V (2203.03466)", "verified"),
    Choice("readout_bias_width", -1.0, _FAMILY, "rates of the readout's bias D^-1: the bias is inside the readout's multiplier, and stands "
           "still in the limit", "the language model of Bordelon et al. 2405.15712, its code", "verified"),
    Choice("embedding_width", 0.0, _FAMILY, "Adam's rate of the token embedding does not scale",
           "Tensor Programs V (2203.03466), CompleteP (2505.01618)", "verified"),
    Choice("embedding_width", -0.5, _FAMILY, "Adam's rate of the token embedding D^-1/2, for vocabularies much larger than the width",
           "Hayou and Liu 2506.15025 (abstract); u-mup's and ntk's row too", "reported"),
    Choice("embedding_width", 0.0, ("sp",), "one learning rate", "common practice", "verified"),
    Choice("embedding_width", 1.0, ("sp",), "rates of embeddings D: a control that has of mup only the embedding's share",
           "Kalra and Barkeshli 2605.21486 (abstract)", "reported"),
    Choice("decay_width", 0.0, _FAMILY, "lr*wd of block matrices does not scale",
           "Wang and Aitchison 2405.13698, CompleteP 2505.01618, Kosson et al. 2510.19093", "reported"),
    Choice("decay_width", -0.5, _FAMILY, "lr*wd of block matrices D^-1/2", "Fan et al. 2510.15262 (abstract)", "reported"),
    Choice("decay_width", -1.0, _FAMILY, "lr*wd of block matrices D^-1 (independent decay 1/width)",
           "Qiu et al. 2512.05620 (abstract)", "reported"),
    Choice("key_start", "own", _FAMILY, "keys and queries start apart", "common practice", "verified"),
    Choice("key_start", "query", ("mup", "depth-mup"), "keys start as the queries' matrix: logits are of order one at the start though "
           "they are taken by 1/N, so that N can grow alone; heads start alike, each position sees itself most",
           "the feature speed formula's desiderata (2311.18718) for head_dim", "derived"),
    Choice("mlp_out", "fan-in", _FAMILY, "MLP out std F^-1/2", "Tensor Programs V (2203.03466)", "verified"),
    Choice("mlp_out", "mean-field", _FAMILY, "where F/D grows: MLP out std (F/D)^-1/2 below fan-in, MLP in SGD rate F/D and eps "
           "(D/F)^1/2 more; every hidden entry moves, and what the MLP adds at the start vanishes",
           "as experts of Jiang et al. 2601.20205 (a co-author's notes)", "derived"),
    Choice("experts", "mean-field", _FAMILY, "router std D^-1; expert out std (m/D)^-1 D^-1/2, Adam m^-1; expert in D^-1/2, Adam D^-1",
           "Jiang et al. 2601.20205, Table 1 (a co-author's derivation; SGD, Muon and eps derived)", "reported"),
    Choice("experts", "mssp", _FAMILY, "the same, but expert out std (E/m)^1/2, for E that grows with D at fixed m",
           "Vankadara, Haas et al. 2605.14200, regime II (an account of it)", "reported"),
    Choice("experts", "dense", _FAMILY, "an expert as a dense MLP and the router as a hidden matrix, an E nowhere: a control",
           "Tensor Programs V (2203.03466), applied to experts", "derived"),
    Choice("experts_eps", "gradients", _FAMILY, "eps of router, experts, gains and biases follows the size of their gradients: router "
           "E^-1, expert in E^-1 m^-1, expert out E^-1 D^-1, gains and biases D^-1, each L^-alpha_l in blocks", "derived, and measured "
           "by `mupax check`", "derived"),
    Choice("experts_eps", "table", _FAMILY, "for models with experts: router D^-1 L^-alpha_l, expert in m^-1 L^-alpha_l, expert out "
           "D m^-2 L^-alpha_l, gains of norms 1, biases in blocks L^-alpha_l", "Jiang et al. 2601.20205, Table 2 (read through two "
           "implementations of it; L^-1 there)", "reported"),
    Choice("muon_scale", "spectral", _FAMILY, "a step of spectral norm lr (out/in)^1/2 over the base's", "derived from spectral", "derived"),
    Choice("muon_scale", "rms", _FAMILY, "the same, times 0.2 max(in, out)^1/2 of the base: entries of a step are as large as Adam's, "
           "so that one rate serves both; a hidden rate of D^-1/2 over Moonlight's own",
           "Moonlight 2502.16982; D^-1/2 from 2603.00541, Table 1", "reported"),
    Choice("eps_scope", "blocks", ("completep",), "eps D^-1 L^-alpha_l in blocks alone", "CompleteP, its table (2505.01618)", "verified"),
    Choice("eps_scope", "everywhere", ("completep",), "eps D^-1 L^-alpha_l of every parameter", "CompleteP, its code", "verified"),
    Choice("eps_scope", "completed", ("completep",), "as blocks; embeddings and readout D^-1; QK-norm gains that heads share "
           "L^-alpha_l without a width, which is the gradient's size where heads grow and N^1 too large where they widen",
           "Complete(d)P, Table 1 (2512.22382), read in an implementation of it", "reported"),
    Choice("kv_norm", "operator", ("spectral",), "key and value std has min(1, (out/in)^1/2): falls as more queries share a key",
           "Yang, Simon and Bernstein 2310.17813", "verified"),
    Choice("kv_norm", "expected", ("spectral",), "key and value std in^-1/2, by the norm of a random input's image, which repeating a "
           "key does not change; rates out/in, 1/in: those of mup, which reached them by SGD's gradient sums",
           "GQA-muP 2605.15290 (abstract, reviews; its table could not be read)", "derived"),
)  # fmt: skip


def of(preset: str, constant: str) -> list[Choice]:
    """The values of a preset's constant; none where it may have any.

    Args:
        preset: its name.
        constant: its name.
    """
    return [
        choice for choice in CHOICES if preset in choice.presets and constant == choice.constant
    ]


def listed(preset: str, **constants: float | str) -> None:
    """Raises PresetError where a constant has a value that its table does not list."""
    for constant, value in constants.items():
        values = [choice.value for choice in of(preset, constant)]
        if values and value not in values and constant != "decay_width":
            texts = [each if isinstance(each, str) else f"{each:g}" for each in values]
            some = f"{', '.join(texts[:-1])} or {texts[-1]}"
            shown = value if isinstance(value, str) else f"{value:g}"
            raise PresetError(f"{preset}: {constant}={shown} is not a choice; write {some}")
