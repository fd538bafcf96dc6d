"""Spectral condition: `spectral`, norms of a matrix and of its update that are fixed by its shape.

Source: Yang, Simon, Bernstein 2023 (2310.17813). r is n_out/n_in.

| role                          | init std                | SGD lr | Adam lr | Muon lr |
|-------------------------------|-------------------------|--------|---------|---------|
| block matrix                  | n_in^-1/2 min(1, r^1/2) | r      | 1/n_in  | r^1/2   |
| embedding, gain (n_in finite) | 1                       | D      | 1       | as Adam |
| readout (n_out finite)        | D^-1                    | D^-1   | D^-1    | as Adam |

Values are relative to the base. Learning rates of Muon are derived. Attention logits have the
factor N^-1, branches 1, and there is no depth rule. Adam's eps follows the gradients as in `mup`,
plain form. Gains, biases and the patch embedding have the rows of `mup`. For square matrices every
row is that of `mup`. `kv_norm` = "expected" leaves the minimum out for key and value, as GQA-muP
(2605.15290) has the norm (`choices`).
"""

from __future__ import annotations

import dataclasses

from mupax.presets.papers.infinite_limits import N, row_of
from mupax.presets.preset import Preset
from mupax.presets.roles import ParamSpec, Role
from mupax.presets.rule import Rule, at_most_one, changed, product, theta


def spectral(*, kv_norm: str = "operator") -> Preset:
    """Spectral condition: init and lr of each matrix from n_out/n_in; mup for square matrices.

    Args:
        kv_norm: Norm of key and value, "operator" or "expected". Any other text counts as
            "operator"; `mupax.presets.papers.choices.make` refuses it.
    """

    def rule(spec: ParamSpec) -> Rule:
        row = row_of(spec, 1.0, None)
        if spec.role is Role.READOUT:
            return row if spec.tied else row.moved(theta(row, spec, "plain"))
        if row.muon is None:
            # Only block matrices have a Muon rate. All other parameters keep their row.
            return row
        n_in = product(spec.fan_in)
        n_out = product(spec.fan_out)
        # A random matrix has the norm std (n_in^1/2 + n_out^1/2). For the norm (n_out/n_in)^1/2,
        # std is n_in^-1/2 min(1, (n_out/n_in)^1/2) up to a constant. GQA-muP takes the expected
        # norm of the output for a random input, which repeating a key does not change.
        init_std = n_in**-0.5
        is_key_or_value = spec.role in (Role.KEY, Role.VALUE)
        if kv_norm != "expected" or not is_key_or_value:
            init_std = n_in**-0.5 * at_most_one((n_out / n_in) ** 0.5)
        muon_lr = (n_out / n_in) ** 0.5
        if spec.role is Role.ROUTER:
            # A router's outputs are scores of experts, and Muon leaves it to Adam.
            muon_lr = None
        return dataclasses.replace(
            row,
            init_std=init_std,
            sgd=n_out / n_in,
            adam=n_in**-1,
            muon=muon_lr,
        )

    return Preset(
        name="spectral",
        rule=rule,
        logits=N**-1,
        no_rule={"lion": "the paper has no rule for sign updates"},
        choices=changed(kv_norm=(kv_norm, "operator")),
        vanishing={"attention": N**-0.5},
    )
