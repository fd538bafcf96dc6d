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
* `eps_scope`: "blocks" is its table above; "everywhere" its code, D^-1 L^-al on every parameter; "completed" Complete(d)P
  (2512.22382): the table with D^-1 on embeddings and readout, and L^-al on QK-norm gains that heads share.
* A QK-norm gain that heads share adds up their gradients: its eps is D/N times the others' in the first two, which no source has
  (derived; measured, its gradient over eps goes as heads^0.95 without it and heads^-0.10 with it).
* `decay`: "table" has wd = in at every alpha_l, so that lr*wd drifts as L^(al-1) below alpha_l = 1; "rate" keeps lr*wd fixed.
  Without it the table holds, but a run whose lr*wd would drift is refused until one of the two is named (`mupax.train.core.guards`).
SGD, Muon and Lion, and experts and their router, follow the infinite-limits rule.
"""

from __future__ import annotations

import dataclasses

from mupax.presets.papers.infinite_limits import Constants, D, L, N, heads_summed, infinite_limits
from mupax.presets.preset import Preset
from mupax.presets.roles import EMBEDDINGS, ROUTED, VECTORS, ParamSpec, PresetError, Role
from mupax.presets.rule import ONE, Power, Rule, changed, product

_TABLES = (*(role.value for role in sorted(EMBEDDINGS, key=str)), "readout")
_OUTSIDE = ("patch_embedding.bias", "norm_gain", "norm_gain.bias")
_UNSCALED = {
    "blocks": dict.fromkeys((*_TABLES, *_OUTSIDE), D**-1),
    "everywhere": dict.fromkeys((*_TABLES, *_OUTSIDE, "readout.bias"), D * L),
    "completed": dict.fromkeys(_OUTSIDE, D**-1)
    | dict.fromkeys(("block.query.norm_gain", "block.key.norm_gain"), N**-1),
}
"""Scope of eps to the groups whose gradient over eps it lets change, and the farthest to where."""


def completep(
    *,
    alpha_l: float = 1.0,
    alpha_a: float = 1.0,
    eps_scope: str = "blocks",
    decay: str | None = None,
    beta0: float = 1.0,
    c_a: float = 1.0,
) -> Preset:
    """CompleteP: muP with branches 1/L and every block learning at every depth; its own weight decay and eps.

    Args:
        alpha_l, alpha_a, beta0, c_a: as in `mupax.presets.papers.infinite_limits`.
        eps_scope: which groups' eps shrinks with width and depth, a choice of `CHOICES`.
        decay: of block matrices: `table` is the source's own, `rate` keeps lr*wd fixed; None is `table`.
    """
    if decay not in (None, "table", "rate"):
        raise PresetError(f"completep: decay={decay} is not a choice; write table or rate")
    family = infinite_limits(
        "completep", Constants(alpha_a=alpha_a, alpha_l=alpha_l, beta0=beta0, c_a=c_a)
    )

    def rule(spec: ParamSpec) -> Rule:
        row = family.rule(spec)
        row = dataclasses.replace(row, eps=_eps(spec, row.eps, alpha_l, eps_scope))
        if decay != "rate" and row.muon is not None:
            row = dataclasses.replace(row, decay=row.adam * product(spec.fan_in))
        return row

    powers = changed(alpha_a=(alpha_a, 1.0), alpha_l=(alpha_l, 1.0))
    constants = powers | changed(
        eps_scope=(eps_scope, "blocks"), decay=(decay, None), beta0=(beta0, 1.0), c_a=(c_a, 1.0)
    )
    drifts = decay != "rate" and alpha_l < 1
    drift = f"lr*wd of block matrices goes as layers^{alpha_l - 1:g} (completep's own table); decay=rate keeps it fixed"
    vanishing = {
        **family.vanishing,
        **{f"eps/{group}": power for group, power in _UNSCALED[eps_scope].items()},
    }
    warnings = (drift,) if drifts else ()
    return dataclasses.replace(
        family, rule=rule, choices=constants, warnings=warnings, vanishing=vanishing, uneven=False
    )


def _eps(spec: ParamSpec, of_family: Power, alpha_l: float, scope: str) -> Power:
    if ROUTED & {spec.role, spec.of}:  # no source of this preset has them
        return of_family
    in_block, summed = D**-1 * L**-alpha_l, heads_summed(spec)
    if scope == "completed":
        if spec.in_block:
            return (
                L**-alpha_l if spec.role is Role.NORM_GAIN and summed != ONE else in_block * summed
            )
        return ONE if spec.role in VECTORS else of_family
    return in_block * summed if spec.in_block or scope == "everywhere" else ONE
