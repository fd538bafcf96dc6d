"""Constants of presets: how they are read, and the values on which sources disagree.

`mupax presets constants PRESET` prints them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
from collections.abc import Mapping
from typing import Any, Literal

from mupax.presets.constants import read
from mupax.presets.papers import PRESETS
from mupax.presets.preset import Preset
from mupax.presets.roles import PresetError

Status = Literal["verified", "reported", "derived"]
"""How well the value of a constant is known.

* verified: read in the source's own text or code.
* reported: read in an account of the source.
* derived: worked out by mupax.
"""


@dataclasses.dataclass(frozen=True)
class Choice:
    """One value of a preset's constant on which sources disagree, with its source.

    Attributes:
        constant: Name of the constant.
        value: Value of the constant, or in `SOURCES` the text of a range.
        presets: Names of the presets that take the constant.
        rule: What the value does to the table.
        source: Paper or other source of the value.
        status: How well the value is known.
    """

    constant: str
    value: float | str
    presets: tuple[str, ...]
    rule: str
    source: str
    status: Status


_FAMILY = ("mup", "mup-half", "depth-mup")

CHOICES = (
    Choice(
        constant="readout_width",
        value=-1.0,
        presets=_FAMILY,
        rule="readout std D^-1: the output vanishes at the start and never explodes",
        source="Tensor Programs V, Tables 3 and 8 (2203.03466)",
        status="verified",
    ),
    Choice(
        constant="readout_width",
        value=-0.5,
        presets=_FAMILY,
        rule=(
            "readout std D^-1/2 with the rates of -1: the output starts at order one, its change "
            "in the first step grows as D^1/2; SGD rates of all else D^-1/2 lower, eps D^1/2 "
            "higher"
        ),
        source="sp-layerwise's readout (Everett et al. 2407.05872); SGD and eps derived",
        status="derived",
    ),
    Choice(
        constant="readout_bias_width",
        value=0.0,
        presets=_FAMILY,
        rule="rates of the readout's bias do not scale",
        source="Tensor Programs V (2203.03466)",
        status="verified",
    ),
    Choice(
        constant="readout_bias_width",
        value=-1.0,
        presets=_FAMILY,
        rule=(
            "rates of the readout's bias D^-1: the bias is inside the readout's multiplier, and "
            "stands still in the limit"
        ),
        source="the language model of Bordelon et al. 2405.15712, its code",
        status="verified",
    ),
    Choice(
        constant="embedding_width",
        value=0.0,
        presets=_FAMILY,
        rule="Adam's rate of the token embedding does not scale",
        source="Tensor Programs V (2203.03466), CompleteP (2505.01618)",
        status="verified",
    ),
    Choice(
        constant="embedding_width",
        value=-0.5,
        presets=_FAMILY,
        rule=(
            "Adam's rate of the token embedding D^-1/2, for vocabularies much larger than the width"
        ),
        source="Hayou and Liu 2506.15025 (abstract); u-mup's and ntk's row too",
        status="reported",
    ),
    Choice(
        constant="embedding_width",
        value=0.0,
        presets=("sp",),
        rule="one learning rate",
        source="common practice",
        status="verified",
    ),
    Choice(
        constant="embedding_width",
        value=1.0,
        presets=("sp",),
        rule="rates of embeddings D: a control that has of mup only the embedding's share",
        source="Kalra and Barkeshli 2605.21486 (abstract)",
        status="reported",
    ),
    Choice(
        constant="decay_width",
        value=0.0,
        presets=_FAMILY,
        rule="lr*wd of block matrices does not scale",
        source="Wang and Aitchison 2405.13698, CompleteP 2505.01618, Kosson et al. 2510.19093",
        status="reported",
    ),
    Choice(
        constant="decay_width",
        value=-0.5,
        presets=_FAMILY,
        rule="lr*wd of block matrices D^-1/2",
        source="Fan et al. 2510.15262 (abstract)",
        status="reported",
    ),
    Choice(
        constant="decay_width",
        value=-1.0,
        presets=_FAMILY,
        rule="lr*wd of block matrices D^-1 (independent decay 1/width)",
        source="Qiu et al. 2512.05620 (abstract)",
        status="reported",
    ),
    Choice(
        constant="key_start",
        value="own",
        presets=_FAMILY,
        rule="keys and queries start apart",
        source="common practice",
        status="verified",
    ),
    Choice(
        constant="key_start",
        value="query",
        presets=("mup", "depth-mup"),
        rule=(
            "keys start as the queries' matrix: logits are of order one at the start though they "
            "are taken by 1/N, so that N can grow alone; heads start alike, each position sees "
            "itself most"
        ),
        source="the feature speed formula's desiderata (2311.18718) for head_dim",
        status="derived",
    ),
    Choice(
        constant="mlp_out",
        value="fan-in",
        presets=_FAMILY,
        rule="MLP out std F^-1/2",
        source="Tensor Programs V (2203.03466)",
        status="verified",
    ),
    Choice(
        constant="mlp_out",
        value="mean-field",
        presets=_FAMILY,
        rule=(
            "where F/D grows: MLP out std (F/D)^-1/2 below fan-in, MLP in SGD rate F/D and eps "
            "(D/F)^1/2 more; every hidden entry moves, and what the MLP adds at the start vanishes"
        ),
        source="as experts of Jiang et al. 2601.20205 (a co-author's notes)",
        status="derived",
    ),
    Choice(
        constant="experts",
        value="mean-field",
        presets=_FAMILY,
        rule=(
            "router std D^-1; expert out std (m/D)^-1 D^-1/2, Adam m^-1; expert in D^-1/2, Adam "
            "D^-1"
        ),
        source=(
            "Jiang et al. 2601.20205, Table 1 (a co-author's derivation; SGD, Muon and eps derived)"
        ),
        status="reported",
    ),
    Choice(
        constant="experts",
        value="mssp",
        presets=_FAMILY,
        rule="the same, but expert out std (E/m)^1/2, for E that grows with D at fixed m",
        source="Vankadara, Haas et al. 2605.14200, regime II (an account of it)",
        status="reported",
    ),
    Choice(
        constant="experts",
        value="dense",
        presets=_FAMILY,
        rule="an expert as a dense MLP and the router as a hidden matrix, an E nowhere: a control",
        source="Tensor Programs V (2203.03466), applied to experts",
        status="derived",
    ),
    Choice(
        constant="experts_eps",
        value="gradients",
        presets=_FAMILY,
        rule=(
            "eps of router, experts, gains and biases follows the size of their gradients: router "
            "E^-1, expert in E^-1 m^-1, expert out E^-1 D^-1, gains and biases D^-1, each "
            "L^-alpha_l in blocks"
        ),
        source="mupax, and measured by `mupax check`",
        status="derived",
    ),
    Choice(
        constant="experts_eps",
        value="table",
        presets=_FAMILY,
        rule=(
            "for models with experts: router D^-1 L^-alpha_l, expert in m^-1 L^-alpha_l, expert "
            "out D m^-2 L^-alpha_l, gains of norms 1, biases in blocks L^-alpha_l"
        ),
        source=(
            "Jiang et al. 2601.20205, Table 2 (read through two implementations of it; L^-1 there)"
        ),
        status="reported",
    ),
    Choice(
        constant="muon_scale",
        value="spectral",
        presets=_FAMILY,
        rule="a step of spectral norm lr (out/in)^1/2 over the base's",
        source="derived from spectral",
        status="derived",
    ),
    Choice(
        constant="muon_scale",
        value="rms",
        presets=_FAMILY,
        rule=(
            "the same, times 0.2 max(in, out)^1/2 of the base: entries of a step are as large as "
            "Adam's, so that one rate serves both; a hidden rate of D^-1/2 over Moonlight's own"
        ),
        source="Moonlight 2502.16982; D^-1/2 from 2603.00541, Table 1",
        status="reported",
    ),
    Choice(
        constant="muon_scale",
        value="measured",
        presets=_FAMILY,
        rule=(
            "as spectral, and each step is divided by its spectral norm, measured by power "
            "iteration: 5 iterations a step in the first 100 steps, then 1"
        ),
        source="spectral-X of Qiu et al. 2512.05620 (abstract); its factor is muon_shape=absolute",
        status="reported",
    ),
    Choice(
        constant="muon_blocks",
        value="matrix",
        presets=_FAMILY,
        rule="each matrix is orthogonalized whole",
        source="Jordan et al. 2024 (modded-nanogpt)",
        status="verified",
    ),
    Choice(
        constant="muon_blocks",
        value="heads",
        presets=_FAMILY,
        rule=(
            "query, key, value and attention out are orthogonalized head by head, rate H^-1/2: all "
            "heads use one best input or output direction, and their steps add up coherently"
        ),
        source="Zhang et al. 2605.08933 (abstract) for the heads; H^-1/2 derived",
        status="derived",
    ),
    Choice(
        constant="muon_blocks",
        value="heads-unscaled",
        presets=_FAMILY,
        rule="the same without H^-1/2: a control, whose steps grow as H^1/2",
        source="MuonSplit in Zhang et al. 2605.08933 (abstract)",
        status="reported",
    ),
    Choice(
        constant="muon_blocks",
        value="tiles",
        presets=_FAMILY,
        rule=(
            "tiles of the base's size are orthogonalized apart, rate 1/in as Adam's: in times out "
            "tiles add up coherently"
        ),
        source="mupax",
        status="derived",
    ),
    Choice(
        constant="muon_shape",
        value="base",
        presets=_FAMILY,
        rule="the factor (out/in)^1/2 of Muon's rate is over the base's, where it is 1",
        source="derived from spectral",
        status="derived",
    ),
    Choice(
        constant="muon_shape",
        value="absolute",
        presets=_FAMILY,
        rule=(
            "(out/in)^1/2 itself: at F/D = 2.5 MLP in has 1.58 and MLP out 0.63, and keys and "
            "values narrower than the queries, and experts, have theirs"
        ),
        source="Yang, Simon and Bernstein 2310.17813; for Muon Qiu et al. 2512.05620 (abstract)",
        status="reported",
    ),
    Choice(
        constant="eps_scope",
        value="blocks",
        presets=("completep",),
        rule="eps D^-1 L^-alpha_l in blocks alone",
        source="CompleteP, its table (2505.01618)",
        status="verified",
    ),
    Choice(
        constant="eps_scope",
        value="everywhere",
        presets=("completep",),
        rule="eps D^-1 L^-alpha_l of every parameter",
        source="CompleteP, its code",
        status="verified",
    ),
    Choice(
        constant="eps_scope",
        value="completed",
        presets=("completep",),
        rule=(
            "as blocks; embeddings and readout D^-1; QK-norm gains that heads share L^-alpha_l "
            "without a width, which is the gradient's size where heads grow and N^1 too large "
            "where they widen"
        ),
        source="Complete(d)P, Table 1 (2512.22382), read in an implementation of it",
        status="reported",
    ),
    Choice(
        constant="kv_norm",
        value="operator",
        presets=("spectral",),
        rule="key and value std has min(1, (out/in)^1/2): falls as more queries share a key",
        source="Yang, Simon and Bernstein 2310.17813",
        status="verified",
    ),
    Choice(
        constant="kv_norm",
        value="expected",
        presets=("spectral",),
        rule=(
            "key and value std in^-1/2, by the norm of a random input's image, which repeating a "
            "key does not change; rates out/in, 1/in: those of mup, which reached them by SGD's "
            "gradient sums"
        ),
        source="GQA-muP 2605.15290 (abstract, reviews; its table could not be read)",
        status="derived",
    ),
)
"""Values of constants on which sources disagree, in the order in which they are printed."""

_THEORY = ("ntk", "hybrid", "maximal-update")
_LIMITS = "Bordelon et al. 2405.15712, section 2.1"
_EFFECTIVE = "Dinan, Yaida and Zhang 2304.02034"
_UNIT = "Blake et al. 2407.17465"

SOURCES = (
    Choice(
        constant="alpha_l",
        value="0.5 to 1",
        presets=("depth-mup",),
        rule="every residual branch L^-alpha_l; 1/2 keeps a Brownian term at the start",
        source=_LIMITS,
        status="verified",
    ),
    Choice(
        constant="alpha_l",
        value="0.5 to 1",
        presets=("completep",),
        rule="every residual branch L^-alpha_l; 1 is CompleteP",
        source="CompleteP, its table (2505.01618)",
        status="verified",
    ),
    Choice(
        constant="alpha_a",
        value="0.5 to 1",
        presets=("mup", "depth-mup"),
        rule="attention logits N^-alpha_a, and rates of queries and keys with them",
        source=_LIMITS,
        status="verified",
    ),
    Choice(
        constant="alpha_a",
        value="1",
        presets=("completep",),
        rule="attention logits N^-1",
        source="CompleteP, its code",
        status="verified",
    ),
    Choice(
        constant="alpha_a",
        value="0.5 to 1",
        presets=("completep",),
        rule="attention logits N^-alpha_a, and rates of queries and keys with them",
        source=_LIMITS,
        status="verified",
    ),
    Choice(
        constant="gamma0",
        value="above 0",
        presets=_FAMILY,
        rule="amount of feature learning: the readout by 1/gamma0, SGD rates by gamma0^2",
        source=f"{_LIMITS} and appendix E.1; Adam's eps by 1/gamma0 derived",
        status="verified",
    ),
    Choice(
        constant="beta0",
        value="above 0",
        presets=(*_FAMILY, "completep"),
        rule="factor on every residual branch: the effective depth",
        source=_LIMITS,
        status="verified",
    ),
    Choice(
        constant="c_a",
        value="above 0",
        presets=(*_FAMILY, "completep"),
        rule="factor on attention logits; with 1 they are those of sp at the base",
        source="mupax",
        status="derived",
    ),
    Choice(
        constant="decay",
        value="table",
        presets=("completep",),
        rule="coupled weight decay of block matrices goes as fan-in at every alpha_l; None is table",
        source="CompleteP, its table (2505.01618)",
        status="verified",
    ),
    Choice(
        constant="decay",
        value="rate",
        presets=("completep",),
        rule="coupled weight decay goes as 1/lr, so that lr*wd does not scale",
        source="mupax",
        status="derived",
    ),
    Choice(
        constant="s",
        value="0 to 1",
        presets=_THEORY,
        rule="from neural tangent (0) over hybrid (1/2) to maximal update (1)",
        source=_EFFECTIVE,
        status="verified",
    ),
    Choice(
        constant="alpha_a",
        value="0.5",
        presets=_THEORY,
        rule="attention logits N^-1/2",
        source=_EFFECTIVE,
        status="verified",
    ),
    Choice(
        constant="alpha_a",
        value="up to 1",
        presets=_THEORY,
        rule="attention logits N^-alpha_a; 1 makes s = 1 mup in plain form",
        source="mupax",
        status="derived",
    ),
    Choice(
        constant="init",
        value="paper",
        presets=_THEORY,
        rule="initial variances C / fan-in with a C for each role",
        source=_EFFECTIVE,
        status="verified",
    ),
    Choice(
        constant="init",
        value="fan-in",
        presets=_THEORY,
        rule="initial variances 1 / fan-in",
        source="common practice",
        status="verified",
    ),
    Choice(
        constant="alpha_res",
        value="above 0",
        presets=("u-mup",),
        rule="size of the residual branches against the embedding, in the tau rule",
        source=_UNIT,
        status="reported",
    ),
    Choice(
        constant="alpha_ratio",
        value="above 0",
        presets=("u-mup",),
        rule="size of attention branches over MLP branches, in the tau rule",
        source=_UNIT,
        status="reported",
    ),
    Choice(
        constant="embedding_exponent",
        value="-0.5",
        presets=("u-mup",),
        rule="rates of embeddings D^-1/2",
        source=_UNIT,
        status="reported",
    ),
    Choice(
        constant="embedding_exponent",
        value="0",
        presets=("u-mup",),
        rule="rates of embeddings do not scale",
        source="Tensor Programs V (2203.03466), CompleteP (2505.01618)",
        status="verified",
    ),
)
"""Sources of all other constants. They take a range, or their preset checks their values itself."""


def described(preset: str, constant: str) -> list[Choice]:
    """Return the values and ranges of a preset's constant, each with its rule and source."""
    matching = of(preset, constant)
    for entry in SOURCES:
        if preset in entry.presets and constant == entry.constant:
            matching.append(entry)
    return matching


def of(preset: str, constant: str) -> list[Choice]:
    """Return the recorded values of a preset's constant, each with its rule and source.

    The list is empty for a constant that `CHOICES` does not list, which may have any value. A
    listed constant must have one of the recorded values, except `decay_width` (`listed`).
    """
    matching = []
    for choice in CHOICES:
        if preset in choice.presets and constant == choice.constant:
            matching.append(choice)
    return matching


def listed(preset: str, **constants: float | str) -> None:
    """Raise an error if a constant has a value that no source uses.

    The allowed values are those in `CHOICES`. `decay_width`, and constants that have no entry
    there, may have any value.

    Args:
        preset: Name in `mupax.presets.papers.PRESETS`.

    Raises:
        PresetError: A value is not a choice. The message names the choices.
    """
    for constant, value in constants.items():
        values = [choice.value for choice in of(preset, constant)]
        if values and value not in values and constant != "decay_width":
            texts = [_text(listed_value) for listed_value in values]
            alternatives = texts[-1]
            if len(texts) > 1:
                alternatives = f"{', '.join(texts[:-1])} or {alternatives}"
            raise PresetError(
                f"{preset}: {constant}={_text(value)} is not a choice; write {alternatives}"
            )


def _text(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def make(preset: str, constants: Mapping[str, Any]) -> Preset:
    """Make a preset in its absolute form, in which every base size is 1.

    Args:
        preset: Name in `mupax.presets.papers.PRESETS`.
        constants: Values by name. A number may be given as a text. Constants of parameter groups
            are named COLUMN.GROUP.

    Raises:
        PresetError: The preset has no such constant, or a value is not allowed.
    """
    parameters = inspect.signature(PRESETS[preset]).parameters
    named, groups = read(constants)
    checked: dict[str, float | str] = {}
    for name, value in named.items():
        if name not in parameters:
            raise PresetError(_unknown_constant(preset, name))
        # Annotations are texts here: "float", "str" or "str | None".
        if str(parameters[name].annotation).startswith("str"):
            checked[name] = str(value)
        else:
            checked[name] = _number(preset, name, value, parameters[name].default)
    listed(preset, **checked)
    absolute = PRESETS[preset](**checked)
    if not groups:
        return absolute
    return dataclasses.replace(absolute, constants=groups, choices={**absolute.choices, **groups})


def _unknown_constant(preset: str, name: str) -> str:
    """Return the error message for a constant that a preset does not have.

    The message lists the constants that the preset has, and the presets that have this constant.
    """
    owners = []
    for owner, function in PRESETS.items():
        if name in inspect.signature(function).parameters:
            owners.append(owner)
    hint = f"; {name} is a constant of {', '.join(owners)}" if owners else ""
    parameters = inspect.signature(PRESETS[preset]).parameters
    return f"{preset} takes {', '.join(parameters) or 'no constants'}, not {name}{hint}"


def _number(preset: str, name: str, value: Any, default: Any) -> float:
    """Convert the value of a constant to a finite number.

    Args:
        preset: Name of the preset, for the message.
        name: Name of the constant, for the message.
        default: Number that the message gives as an example.

    Raises:
        PresetError: The value is not a finite number.
    """
    # float(True) is 1.0, which nobody means.
    number = math.nan
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError, ValueError):
            number = float(value)
    if not math.isfinite(number):
        raise PresetError(
            f"{preset}: {name}={value} is not a finite number; "
            f"write one, such as {name}={default:g}"
        )
    return number
