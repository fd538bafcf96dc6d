"""Multi-head self-attention with grouped queries. B batch, T query and S key positions, H heads, K key heads, N head dimension."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from mupax.zoo import partition
from mupax.zoo.families import AttentionName
from mupax.zoo.layers.kernels import attend
from mupax.zoo.layers.linear import Norm, biased, project, rotary
from mupax.zoo.param import Init
from mupax.zoo.transformer import TransformerConfig

if TYPE_CHECKING:
    from mupax.zoo.layers.cache import Cache


class Attention(nnx.Module):
    """softmax(logit_scale * q.k) v, projected out. The preset's logit scale is applied here and nowhere else."""

    def __init__(self, config: TransformerConfig, init: Init) -> None:
        self.causal, self.rope_theta = config.causal, config.rotary_theta
        self.implementation: AttentionName = config.compute.attention
        self.fused = config.compute.projections == "fused"
        self.query, self.key, self.value = (init.param(name) for name in ("query", "key", "value"))
        self.out = init.param("out")
        self.query_bias, self.key_bias = init.maybe("query_bias"), init.maybe("key_bias")
        self.value_bias, self.out_bias = init.maybe("value_bias"), init.maybe("out_bias")
        eps = config.norm_eps
        self.query_norm = Norm("rmsnorm", init.scope("query_norm"), eps) if config.qk_norm else None
        self.key_norm = Norm("rmsnorm", init.scope("key_norm"), eps) if config.qk_norm else None
        self.logit_scale = init.factor("logit_scale")

    def heads(self, x_BTD: jax.Array, start: jax.Array | None = None) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries [B, T, H, N] (without the logit scale), keys and values [B, S, K, N]. Positions count from `start`."""
        q_BTHN, k_BSKN, v_BSKN = self._projected(x_BTD)
        if self.query_norm is not None and self.key_norm is not None:
            q_BTHN, k_BSKN = self.query_norm(q_BTHN), self.key_norm(k_BSKN)
        if self.rope_theta is not None:
            q_BTHN, k_BSKN = (rotary(x, self.rope_theta, start) for x in (q_BTHN, k_BSKN))
        # Where positions are split, every device keeps its queries and gathers all keys and values.
        return (
            partition.constrain(q_BTHN, "batch", "sequence", "heads", None),
            partition.constrain(k_BSKN, "batch", None, "kv_heads", None),
            partition.constrain(v_BSKN, "batch", None, "kv_heads", None),
        )

    def _projected(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        query_DHN, key_DKN, value_DKN = self.query[...], self.key[...], self.value[...]
        if self.fused:
            # Every key head beside its queries, so that heads stay split as they are.
            width, kv_heads, size = key_DKN.shape
            query_DKGN = query_DHN.reshape(width, kv_heads, -1, size)
            each_DKGN = jnp.concatenate([query_DKGN, key_DKN[:, :, None], value_DKN[:, :, None]], axis=2)
            y_BTKGN = project(x_BTD, each_DKGN)
            q_BTHN = y_BTKGN[..., :-2, :].reshape(*x_BTD.shape[:-1], *query_DHN.shape[1:])
            k_BSKN, v_BSKN = y_BTKGN[..., -2, :], y_BTKGN[..., -1, :]
        else:
            q_BTHN, k_BSKN, v_BSKN = (project(x_BTD, w) for w in (query_DHN, key_DKN, value_DKN))
        return biased(q_BTHN, self.query_bias), biased(k_BSKN, self.key_bias), biased(v_BSKN, self.value_bias)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return self._attended(*self.heads(x_BTD))

    def cached(self, x_BTD: jax.Array, cache: Cache, layer: jax.Array | int, *, fresh: bool) -> tuple[jax.Array, Cache]:
        """The same for the T positions after those in the cache, and the cache with them.

        Args:
            x_BTD: inputs.
            cache: of all layers.
            layer: which of them this is.
            fresh: the cache is empty: the new positions see only one another.
        """
        q_BTHN, k_BTKN, v_BTKN = self.heads(x_BTD, None if fresh else cache.length)
        cache = cache.put(layer, k_BTKN, v_BTKN)
        if fresh:
            return self._attended(q_BTHN, k_BTKN, v_BTKN), cache
        return self._projected_out(cache.attend(layer, self._scaled(q_BTHN))), cache

    def _attended(self, q_BTHN: jax.Array, k_BSKN: jax.Array, v_BSKN: jax.Array) -> jax.Array:
        y_BTHN = attend(self._scaled(q_BTHN), k_BSKN, v_BSKN, causal=self.causal, implementation=self.implementation)
        return self._projected_out(y_BTHN)

    def _scaled(self, q_BTHN: jax.Array) -> jax.Array:
        return q_BTHN * self.logit_scale[...].astype(q_BTHN.dtype)

    def _projected_out(self, y_BTHN: jax.Array) -> jax.Array:
        y_BTHN = partition.constrain(y_BTHN, "batch", "sequence", "heads", None)
        return biased(project(y_BTHN, self.out[...], inputs=2), self.out_bias)
