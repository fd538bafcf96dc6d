"""Spectral condition: `spectral` (Yang, Simon, Bernstein 2023, 2310.17813), the norms of a matrix and of its update fixed by shape.

| role                                | init std                          | SGD lr     | Adam lr | Muon lr (derived)  |
|-------------------------------------|-----------------------------------|------------|---------|--------------------|
| every block matrix                  | n_in^-1/2 min(1, (n_out/n_in)^1/2)| n_out/n_in | 1/n_in  | (n_out/n_in)^1/2   |
| embeddings, gains (n_in finite)     | 1                                 | D          | 1       | as Adam            |
| readout (n_out finite)              | D^-1                              | D^-1       | D^-1    | as Adam            |

as value over value at base. Attention logits * N^-1, branches * 1, no depth rule. Adam's eps follows the gradients as in `mup`, plain form;
gains, biases and the patch embedding are `mup`'s rows. For square matrices every row is `mup`'s.
`kv_norm`: "expected" leaves the minimum out of key and value, as GQA-muP (2605.15290) has the norm (`choices`).
"""

from __future__ import annotations

import dataclasses

from mupax.presets.papers.infinite_limits import N, row_of
from mupax.presets.preset import Preset
from mupax.presets.roles import ParamSpec, Role
from mupax.presets.rule import ONE, Rule, at_most_one, changed, product, theta


def spectral(*, kv_norm: str = "operator") -> Preset:
    """Spectral condition: init and rate of each matrix from n_out/n_in; SGD, Adam and Muon; mup where matrices are square."""

    def rule(spec: ParamSpec) -> Rule:
        row = row_of(spec, 1.0, None)
        if spec.role is Role.READOUT:
            return row if spec.tied else row.moved(theta(row, spec, "plain"))
        if row.muon is None:
            return row
        n_in, n_out = product(spec.fan_in), product(spec.fan_out)
        shared = kv_norm == "expected" and spec.role in (Role.KEY, Role.VALUE)
        return dataclasses.replace(
            row,
            init_std=n_in**-0.5 * (ONE if shared else at_most_one((n_out / n_in) ** 0.5)),
            sgd=n_out / n_in,
            adam=n_in**-1,
            muon=(n_out / n_in) ** 0.5,
        )

    return Preset(
        name="spectral",
        rule=rule,
        logits=N**-1,
        no_rule={"lion": "the paper has no rule for sign updates"},
        choices=changed(kv_norm=(kv_norm, "operator")),
        vanishing={"attention": N**-0.5},
    )
