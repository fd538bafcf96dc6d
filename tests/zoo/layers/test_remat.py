"""What a remat policy keeps of attention: its kernel runs forward once or twice in a step, and the gradients are the same.

Counted in the traced gradient of a decoder whose layers are a loop, so that each kernel stands there once for all of them.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from mupax.train.config.run import MeshConfig
from mupax.train.parallel.sharding import MeshLayout, make_mesh
from mupax.zoo.configs import ComputeConfig, DecoderConfig
from mupax.zoo.definition import Definition, definition
from mupax.zoo.layers import flash, kernels
from mupax.zoo.layers.stack import CUDNN
from mupax.zoo.partition import ONE_DEVICE, Layout

FORWARD_RUNS = {"none": 1, "dots": 1, "attention": 1, "block": 2}
"""Remat policy to times that attention runs forward: the last one is the control."""


def model(**compute: Any) -> Definition:
    compute_config = ComputeConfig(layers="scan", **compute)
    config = DecoderConfig(
        width=8, depth=3, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=17, seq_len=128, positions="rotary",
        compute=compute_config,
    )  # fmt: skip
    return definition(config)


def numbers(model_definition: Definition) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    random = np.random.default_rng(3)
    params = {
        name: jnp.asarray(random.normal(0, 0.3, leaf.shape), jnp.float32)
        for name, leaf in model_definition.abstract.items()
    }
    return params, {
        name: jnp.ones(f["shape"], jnp.float32) for name, f in model_definition.factors.items()
    }


def gradient(model_definition: Definition, layout: Layout = ONE_DEVICE) -> Callable[..., Any]:
    _, factors = numbers(model_definition)
    tokens = jnp.asarray(np.random.default_rng(5).integers(0, 17, (2, 128)), jnp.int32)

    def loss(params: dict[str, jax.Array]) -> jax.Array:
        network: Any = model_definition.bind(params, factors, layout=layout)
        logits_BTV = network(tokens)
        return jnp.mean(jax.nn.logsumexp(logits_BTV, axis=-1) - logits_BTV[..., 3])

    return jax.value_and_grad(loss)


def counts(function: Callable[..., Any], *arguments: Any) -> Counter[str]:
    """Kernels of Pallas by their names, and all else by its primitive's."""
    counter: Counter[str] = Counter()

    def count(jaxpr: Any) -> None:
        for equation in jaxpr.eqns:
            name = equation.primitive.name
            if not equation.outvars:
                continue  # of what is kept the tracer leaves calls that give nothing, which no compiler runs
            if name == "pallas_call":
                counter[equation.params["name"]] += 1
                continue
            counter[name] += 1
            for inner in jaxprs_in_params(equation.params):
                count(inner)

    count(jax.make_jaxpr(function)(*arguments).jaxpr)
    return counter


def test_splash_runs_forward_once_where_its_outputs_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "chosen", lambda *_, **__: "splash")
    monkeypatch.setattr(
        flash, "splash_attention", functools.partial(flash.splash_attention, interpret=True)
    )
    results = {}
    for remat, runs in FORWARD_RUNS.items():
        run, (params, _) = gradient(model(remat=remat)), numbers(model())
        kernels_run = {
            name: n for name, n in counts(run, params).items() if name.startswith("splash")
        }
        assert kernels_run == {
            "splash_mha_fwd_residuals": runs,
            "splash_mha_dq_no_residuals": 1,
            "splash_mha_dkv_no_residuals": 1,
        }, remat
        results[remat] = jax.jit(run)(params)
    for remat in FORWARD_RUNS:
        chex.assert_trees_all_close(results[remat], results["none"], rtol=1e-4, atol=1e-6)


def test_tiles_of_a_cpu_are_kept() -> None:
    # Two tiles of 64 queries, with two products each.
    params, _ = numbers(model())
    by_policy = {remat: counts(gradient(model(remat=remat)), params) for remat in FORWARD_RUNS}
    assert by_policy["block"]["dot_general"] - by_policy["attention"]["dot_general"] == 4


def test_the_kernel_of_cudnn_runs_forward_once_though_it_names_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = MeshLayout(make_mesh(MeshConfig(), jax.devices()[:1]))
    layout.platform = "gpu"
    checks = "jax._src.cudnn.fused_attention_stablehlo"
    monkeypatch.setattr(f"{checks}.check_cudnn_version", lambda: 91900)
    monkeypatch.setattr(f"{checks}.check_compute_capability", lambda _: True)
    monkeypatch.setattr(kernels, "chosen", lambda *_, **__: "cudnn")
    for remat, runs in FORWARD_RUNS.items():
        model_definition = model(remat=remat, dtype="bfloat16")
        run = gradient(model_definition, layout)
        assert counts(run, numbers(model_definition)[0])[CUDNN] == runs, remat
