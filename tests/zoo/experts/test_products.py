"""Products of rows in groups: what each platform computes them by is the same product, with the same gradients."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mupax.zoo.experts import layer

SIZES = (3, 0, 70, 27)
"""An expert without rows, and one with more than a block; 100 rows with some of no group."""


def _dense(x: jax.Array, w: jax.Array, sizes: Any) -> jax.Array:
    of_R = jnp.repeat(jnp.arange(len(SIZES)), jnp.asarray(sizes[:4]), total_repeat_length=len(x))
    return jnp.einsum("ri,rio->ro", x, w[of_R])


@pytest.mark.parametrize("more", [0, 20])
@pytest.mark.parametrize("way", ["megablox", "blocks"])
def test_every_way_is_the_product_with_each_rows_own_matrix(way: str, more: int) -> None:
    random = np.random.default_rng(0)
    rows = sum(SIZES)
    x, w, g = (
        random.normal(size=shape).astype("f4")
        for shape in ((rows + more, 24), (4, 24, 40), (rows, 40))
    )
    sizes = jnp.array((*SIZES, more) if more else SIZES, jnp.int32)
    ways = {
        "megablox": functools.partial(layer._megablox, interpret=True),
        "blocks": lambda x, w, sizes: layer._in_blocks(x, w, sizes[:4]),
    }

    def pulled(of: Any) -> Any:
        y, back = jax.vjp(lambda x, w: of(x, w, sizes)[:rows], x, w)
        return y, *back(jnp.asarray(g))

    for ours, theirs in zip(
        jax.jit(functools.partial(pulled, ways[way]))(), pulled(_dense), strict=True
    ):
        assert np.isfinite(ours).all()
        np.testing.assert_allclose(ours[: len(theirs)], theirs, rtol=1e-4, atol=1e-4)
