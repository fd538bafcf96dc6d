"""Presets and Muon's step agree on the matrices that Muon steps."""

from __future__ import annotations

import pytest

from mupax import presets
from mupax.presets.roles import EXPERT_MATRICES, MATRICES
from mupax.train.core.muon import hidden_matrices

pytestmark = pytest.mark.core


@pytest.mark.parametrize("name", ["mup", "mup-half", "depth-mup", "completep", "spectral"])
def test_rates_of_muon_are_those_of_the_matrices_that_muon_steps(name: str) -> None:
    """Adam's rows are those of all other parameters, a router among them."""
    specs = {**MATRICES, **EXPERT_MATRICES}
    preset = presets.get(name)
    with_muon = {
        parameter for parameter, spec in specs.items() if preset.row(spec).muon is not None
    }
    assert with_muon == hidden_matrices(specs).keys()
    assert "block.experts.router" not in with_muon
