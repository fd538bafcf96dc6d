"""CompleteP: `completep` (Dey et al. 2025, 2505.01618), the infinite-limits rule at alpha_a = alpha_l = 1 with its own decay and eps.

| role                                          | mult. | std     | AdamW lr          | AdamW eps    | coupled wd |
|-----------------------------------------------|-------|---------|-------------------|--------------|------------|
| embeddings                                    | 1     | 1       | 1                 | 1            | 1          |
| query, key, value, attention out, MLP in, out | 1     | in^-1/2 | in^-1 L^(al-1)    | D^-1 L^-al   | in         |
| gains and biases in a block                   | 1     | 1; 0    | L^(al-1)          | D^-1 L^-al   | 0          |
| final norm                                    | 1     | 1; 0    | 1                 | 1            | 0          |
| readout                                       | D^-1  | 1       | 1                 | 1            | 1          |

attention logits * N^-1 (its code), branches * L^-al. (CompleteP writes m_N for our m_D.)
Where its sources disagree, a constant chooses:
* `eps_scope`: "blocks" is its table above; "everywhere" its code, D^-1 L^-al on every parameter.
* `decay`: "table" has wd = in at every alpha_l, so that lr*wd drifts as L^(al-1) below alpha_l = 1; "rate" keeps lr*wd fixed.
  Without it the table holds, but a run whose lr*wd would drift is refused until one of the two is named (`mupax.train.core.guards`).
SGD, Muon and Lion follow the infinite-limits rule.
"""

from __future__ import annotations

import dataclasses

from mupax.presets.papers.infinite_limits import D, L, infinite_limits
from mupax.presets.power import ONE, product
from mupax.presets.preset import Preset, changed
from mupax.presets.roles import ParamSpec, PresetError
from mupax.presets.rule import Rule


def completep(
    *,
    alpha_l: float = 1.0,
    alpha_a: float = 1.0,
    eps_scope: str = "blocks",
    decay: str | None = None,
    beta0: float = 1.0,
) -> Preset:
    """CompleteP: muP with branches 1/L and every block learning at every depth; its own weight decay and eps."""
    words = {"eps_scope": (eps_scope, ("blocks", "everywhere")), "decay": (decay or "table", ("table", "rate"))}
    for label, (value, choices) in words.items():
        if value not in choices:
            raise PresetError(f"completep: {label}={value} is not a choice; write {' or '.join(choices)}")
    family = infinite_limits("completep", alpha_a=alpha_a, alpha_l=alpha_l, beta0=beta0)

    def rule(spec: ParamSpec) -> Rule:
        row = family.rule(spec)
        scaled = spec.in_block or eps_scope == "everywhere"
        row = dataclasses.replace(row, eps=D**-1 * L**-alpha_l if scaled else ONE)
        if decay != "rate" and row.muon is not None:
            row = dataclasses.replace(row, decay=row.adam * product(spec.fan_in))
        return row

    powers = changed(alpha_a=(alpha_a, 1.0), alpha_l=(alpha_l, 1.0))
    given = powers | changed(eps_scope=(eps_scope, "blocks"), decay=(decay, None), beta0=(beta0, 1.0))
    drifts = decay != "rate" and alpha_l < 1
    drift = f"lr*wd of block matrices goes as layers^{alpha_l - 1:g} (completep's own table); decay=rate keeps it fixed"
    return dataclasses.replace(family, rule=rule, given=given, warnings=(drift,) if drifts else ())
