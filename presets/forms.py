"""Forms: where a preset's multipliers sit. Changing the form changes numbers, never training.

| form               | multiplier of a matrix or embedding | of the readout | source                                   |
|--------------------|-------------------------------------|----------------|------------------------------------------|
| plain              | 1                                   | 1              | Tensor Programs V, Table 3               |
| readout-multiplier | 1                                   | its whole scale| Tensor Programs V, Table 8               |
| mean-field         | its whole scale, std 1              | the same       | Bordelon et al. 2024, section 2.1        |
| table-9            | what makes every SGD rate the same  | the same       | Tensor Programs V, Table 9               |

The patch embedding keeps its D_in^-1/2 in the first two (D_in is finite). Gains and biases move in table-9 only.
In the mean-field form queries and keys have std N^(1-alpha_a), as in the paper (`Rule.mean_field`).
"""

from __future__ import annotations

from typing import Literal, get_args

from mupax.presets.power import ONE, Power
from mupax.presets.roles import VECTORS, ParamSpec, PresetError, Role
from mupax.presets.rule import Rule

Form = Literal["plain", "readout-multiplier", "mean-field", "table-9"]
FORMS: tuple[Form, ...] = get_args(Form)


def theta(rule: Rule, spec: ParamSpec, form: Form) -> Power:
    """How much larger the multiplier of `rule` is in `form`: the theta of `Rule.moved`.

    Args:
        rule: the untied row, in whatever form its author wrote it.
        spec: the parameter.
        form: where the multiplier shall be.
    """
    if form == "table-9":
        return rule.sgd**0.5
    if spec.role in VECTORS:
        return ONE
    whole = rule.init_std
    match form:
        case "mean-field":
            return whole * rule.mean_field
        case "readout-multiplier" if spec.role is Role.READOUT:
            return whole
        case _ if spec.role is Role.PATCH_EMBEDDING:
            return ONE
    return ONE / rule.multiplier


def check(form: str) -> None:
    """Whether a form has this name.

    Raises:
        PresetError: none has; the text lists them.
    """
    if form not in FORMS:
        raise PresetError(f"no form is named {form!r}; write {', '.join(repr(name) for name in FORMS)}")
