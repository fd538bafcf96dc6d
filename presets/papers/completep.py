"""CompleteP: `completep`, infinite limits at alpha_a = alpha_l = 1 with its own decay and eps.

Source: Dey et al. 2025 (2505.01618), which writes m_N for D. al is alpha_l.

| role                                  | mult. | std     | AdamW lr       | AdamW eps  | wd |
|---------------------------------------|-------|---------|----------------|------------|----|
| embeddings                            | 1     | 1       | 1              | 1          | 1  |
| query, key, value, attention out, MLP | 1     | in^-1/2 | in^-1 L^(al-1) | D^-1 L^-al | in |
| gains and biases in a block           | 1     | 1; 0    | L^(al-1)       | D^-1 L^-al | 0  |
| final norm                            | 1     | 1; 0    | 1              | 1          | 0  |
| readout                               | D^-1  | 1       | 1              | 1          | 1  |

wd is coupled weight decay. Attention logits have the factor N^-1 (its code), branches L^-al. SGD,
Muon and Lion, and experts and their router, follow the infinite-limits rule.

Where its sources disagree, a constant chooses:

* `eps_scope`: "blocks" is its table above. "everywhere" is its code, D^-1 L^-al on every parameter.
  "completed" is Complete(d)P (2512.22382): the table with D^-1 on embeddings and readout, and L^-al
  on QK-norm gains that heads share.
* `decay`: "table" has wd = in at every alpha_l, so that lr*wd drifts as L^(al-1) below alpha_l = 1.
  "rate" keeps lr*wd fixed. Without this constant the table holds, but a run whose lr*wd would drift
  is refused until one of the two is named (`mupax.train.core.guards`).

A QK-norm gain that heads share sums their gradients: its eps is D/N times that of other gains for
"blocks" and "everywhere", which no source has (derived). Measured, its gradient over eps goes as
heads^0.95 without this factor and as heads^-0.10 with it.
"""

from __future__ import annotations

import dataclasses

from mupax.presets.papers.infinite_limits import Constants, D, L, N, heads_summed, infinite_limits
from mupax.presets.preset import Preset
from mupax.presets.roles import EMBEDDINGS, ROUTED, VECTORS, ParamSpec, PresetError, Role
from mupax.presets.rule import ONE, Power, Rule, changed, product

# Sorted, because the order of a frozenset may differ between processes.
_TABLES = (*(role.value for role in sorted(EMBEDDINGS, key=str)), "readout")
_OUTSIDE = ("patch_embedding.bias", "norm_gain", "norm_gain.bias")
_QK_GAINS = ("block.query.norm_gain", "block.key.norm_gain")
_CONCEDED = {
    "blocks": dict.fromkeys((*_TABLES, *_OUTSIDE), D**-1),
    "everywhere": dict.fromkeys((*_TABLES, *_OUTSIDE, "readout.bias"), D * L),
    "completed": dict.fromkeys(_OUTSIDE, D**-1) | dict.fromkeys(_QK_GAINS, N**-1),
}
"""Power law by which the ratio of gradient to eps may change, by value of `eps_scope` and group.

The ratio changes where the eps of the source does not follow the gradient.
"""


def completep(
    *,
    alpha_l: float = 1.0,
    alpha_a: float = 1.0,
    eps_scope: str = "blocks",
    decay: str | None = None,
    beta0: float = 1.0,
    c_a: float = 1.0,
) -> Preset:
    """CompleteP: muP with branches 1/L; every block learns at every depth; own decay and eps.

    Args:
        alpha_l: As in `mupax.presets.papers.infinite_limits.Constants`.
        alpha_a: As in `mupax.presets.papers.infinite_limits.Constants`.
        eps_scope: Groups whose eps shrinks with width and depth, a choice of `CHOICES`.
        decay: Weight decay of block matrices. "table" is the source's own, "rate" keeps lr*wd
            fixed. `None` is "table".
        beta0: As in `mupax.presets.papers.infinite_limits.Constants`.
        c_a: As in `mupax.presets.papers.infinite_limits.Constants`.
    """
    if decay not in (None, "table", "rate"):
        raise PresetError(f"completep: decay={decay} is not a choice; write table or rate")
    family_constants = Constants(alpha_a=alpha_a, alpha_l=alpha_l, beta0=beta0, c_a=c_a)
    family = infinite_limits("completep", family_constants)

    def rule(spec: ParamSpec) -> Rule:
        row = family.rule(spec)
        row = dataclasses.replace(row, eps=_eps(spec, row.eps, alpha_l, eps_scope))
        if decay != "rate" and row.muon is not None:
            # Coupled weight decay that grows as fan_in subtracts lr * fan_in * w at every step.
            row = dataclasses.replace(row, decay=row.adam * product(spec.fan_in))
        return row

    powers = changed(alpha_a=(alpha_a, 1.0), alpha_l=(alpha_l, 1.0))
    own_constants = changed(
        eps_scope=(eps_scope, "blocks"), decay=(decay, None), beta0=(beta0, 1.0), c_a=(c_a, 1.0)
    )
    warnings = ()
    if decay != "rate" and alpha_l < 1:
        drift = (
            f"lr*wd of block matrices goes as layers^{alpha_l - 1:g} (completep's own table); "
            f"decay=rate keeps it fixed"
        )
        warnings = (drift,)
    vanishing = dict(family.vanishing)
    for group, power in _CONCEDED[eps_scope].items():
        vanishing[f"eps/{group}"] = power
    return dataclasses.replace(
        family,
        rule=rule,
        choices=powers | own_constants,
        warnings=warnings,
        vanishing=vanishing,
        uneven=False,
    )


def _eps(spec: ParamSpec, family_eps: Power, alpha_l: float, scope: str) -> Power:
    """Return the power law of Adam's eps for a parameter under CompleteP.

    Experts, routers and their gains and biases keep `family_eps`. For all others `scope` decides.

    Args:
        family_eps: Power law of the parameter's eps in `infinite_limits`.
        alpha_l: Branches scale as L^-alpha_l, in [1/2, 1].
        scope: Constant `eps_scope`: "blocks", "everywhere" or "completed".
    """
    if spec.role in ROUTED or spec.of in ROUTED:
        # No source of this preset has experts.
        return family_eps
    summed = heads_summed(spec)
    in_block = D**-1 * L**-alpha_l * summed
    if scope != "completed":
        return in_block if spec.in_block or scope == "everywhere" else ONE
    if spec.in_block:
        is_shared_gain = spec.role is Role.NORM_GAIN and summed != ONE
        return L**-alpha_l if is_shared_gain else in_block
    return ONE if spec.role in VECTORS else family_eps
