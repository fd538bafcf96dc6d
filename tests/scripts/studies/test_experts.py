"""Experts beside a dense model: the page's table is what the rows say, and a token of either costs the same."""

from __future__ import annotations

import pytest

from mupax.zoo import families
from scripts.studies import experts


def test_the_page_is_made_of_the_rows() -> None:
    assert experts.section(experts.by_arm(experts.rows())) in experts.PAGE.read_text(), (
        "write it again: python -m scripts.studies.experts --render"
    )


def test_both_cost_a_token_the_same_but_for_the_router() -> None:
    dense, routed = (experts.model(arm) for arm in experts.ARMS)
    router = 2 * routed.sizes()["layers"] * routed.sizes()["embed"] * routed.sizes()["experts"]
    assert families.forward_flops(routed) == pytest.approx(families.forward_flops(dense) + router)
