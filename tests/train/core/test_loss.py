"""Chunked cross-entropy against all logits at once: sums and gradients, on every mesh.

Tolerances are for float32, relative to the largest entry: sums over 48 tokens in another order.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from mupax import presets
from mupax.train.config.metrics import METRICS, Metric, MetricError, on_devices
from mupax.train.config.run import MeshConfig
from mupax.train.core import loss
from mupax.train.core.factors import resolve
from mupax.train.core.state import LossSums
from mupax.train.core.step import StepInputs, gradients
from mupax.train.parallel.sharding import MeshLayout, make_mesh
from mupax.zoo.configs import ComputeConfig, DecoderConfig
from mupax.zoo.definition import definition
from mupax.zoo.layers.linear import ReadoutInputs
from mupax.zoo.partition import ONE_DEVICE, Layout
from tests.fixtures.tiny import assert_close, batch_of, equations

B, T, D, V = 8, 6, 16, 24
PARTS = ("chunked", "vocab")
MESHES: dict[str, dict[str, int]] = {
    "data-fsdp": {"data": 2, "fsdp": 4},
    "fsdp-sequence-tensor": {"data": 1, "fsdp": 2, "sequence": 2, "tensor": 2},
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set chunks of at most five tokens or columns: several per device, the last one not full."""
    monkeypatch.setitem(loss.CHUNK_LOGITS, "cpu", 1)
    monkeypatch.setattr(loss, "LEAST_ROWS", 5)
    monkeypatch.setattr(loss, "PART_LOGITS", 100)
    monkeypatch.setattr(loss, "LANES", 5)


def draw(*shape: int, mean: float = 0.0) -> jax.Array:
    # Compiles nothing: several workers that collect tests would write one file of the cache at once.
    return jnp.asarray(
        (mean + np.random.default_rng(sum(shape)).standard_normal(shape)).astype(np.float32)
    )


def measured(total: Any, *, needs_rank: bool = False) -> Metric:
    """Return a metric that is not shown."""
    return Metric(label="", unit="", better="lower", total=total, needs_rank=needs_rank)


MEASURED = {
    "accuracy": METRICS["accuracy"],
    "log_partition": measured(lambda statistics, w: jnp.sum(statistics.log_partition * w)),
    "rank": measured(lambda statistics, w: jnp.sum(statistics.rank * w), needs_rank=True),
    "top 5": measured(lambda statistics, w: jnp.sum((statistics.rank < 5) * w), needs_rank=True),
}
FULL = ReadoutInputs(draw(B, T, D), draw(D, V), scale=jnp.float32(0.7), bias=draw(V))
START = ReadoutInputs(
    draw(B, T, D, mean=1.0), draw(D, V, mean=-1.0), scale=jnp.float32(0.7), bias=draw(V)
)
TARGETS = jnp.asarray(np.random.default_rng(1).integers(0, V, (B, T)).astype(np.int32))
WEIGHTS = jnp.asarray((np.random.default_rng(2).uniform(size=(B, T)) > 0.3).astype(np.float32))


def program(
    how: Any,
    reference: ReadoutInputs | None = None,
    *,
    layout: Layout = ONE_DEVICE,
    targets: jax.Array = TARGETS,
    z_loss: float | None = None,
    metrics: dict[str, Metric] = MEASURED,
) -> Any:
    """Compile (readout inputs, weights) -> sums, and gradients of three times the loss."""
    z_weight = None if z_loss is None else jnp.float32(z_loss)

    def total(readout: ReadoutInputs, weights: jax.Array) -> tuple[jax.Array, LossSums]:
        sums = loss.cross_entropy(
            readout, targets, weights, how=how, reference=reference, z_loss=z_weight,
            metrics=metrics, layout=layout,
        )  # fmt: skip
        return 3 * sums.loss, sums

    def sums_and_gradients(readout: ReadoutInputs, weights: jax.Array) -> Any:
        (_, sums), grads = jax.value_and_grad(total, has_aux=True)(readout, weights)
        return sums, grads

    return jax.jit(sums_and_gradients)


@functools.cache
def uncentered_program(how: Any) -> Any:
    """Return the `program` that several tests share on one device."""
    return program(how)


@pytest.mark.core
@pytest.mark.parametrize(
    ("fields", "reference"),
    [
        ((), None),
        (("scale", "bias"), None),
        (("scale",), START),
        (("bias", "cap"), START),
    ],
    ids=["features", "scale, bias", "centered", "centered, cap"],
)
def test_chunks_equal_all_logits_at_once(
    fields: tuple[str, ...], reference: ReadoutInputs | None
) -> None:
    missing = {name: None for name in ("scale", "bias") if name not in fields}
    readout = FULL._replace(**missing)
    if "cap" in fields:  # near 3, where logits go to 9
        readout = readout._replace(cap=jnp.float32(3))
        reference = reference and reference._replace(cap=jnp.float32(3))
        assert np.abs(readout.logits() - readout._replace(cap=None).logits()).max() > 1

    def compiled_program(how: Any) -> Any:
        return program(how, reference) if reference else uncentered_program(how)

    expected = compiled_program("plain")(readout, WEIGHTS)
    for how in PARTS:
        compiled = compiled_program(how)
        assert_close(compiled(readout, WEIGHTS), expected)
        # The control: without the last token, which fills a chunk alone, the loss is another.
        other, _ = compiled(readout, WEIGHTS.at[-1, -1].set(1 - WEIGHTS[-1, -1]))
        assert abs(other.loss - expected[0].loss) > 1e-3


@pytest.mark.core
@pytest.mark.parametrize("how", ["plain", *PARTS])
def test_no_gradient_flows_through_weights_and_z_loss(how: Any) -> None:
    def total(weights: jax.Array, z_loss: jax.Array, features: jax.Array) -> jax.Array:
        readout = FULL._replace(features=features)
        return loss.cross_entropy(readout, TARGETS, weights, how=how, z_loss=z_loss).loss

    inputs = (WEIGHTS, jnp.float32(0.1), FULL.features)
    weights, z_loss, features = jax.jit(jax.grad(total, argnums=(0, 1, 2)))(*inputs)
    assert not weights.any()
    assert z_loss == 0
    assert features.any()


@functools.partial(jax.jit, static_argnames="centered")
def by_formula(readout: ReadoutInputs, weight: float, centered: bool) -> Any:
    """Return nats plus `weight` times logsumexp(logits)^2, summed over targets, and gradients.

    All are times three, as those of `program`.
    """

    def total(readout: ReadoutInputs) -> jax.Array:
        logits = readout.logits()
        if centered:
            logits = logits - START._replace(cap=readout.cap).logits()
        top = jax.lax.stop_gradient(logits.max(-1))
        partition = jnp.log(jnp.sum(jnp.exp(logits - top[..., None]), -1)) + top
        label = jnp.take_along_axis(logits, TARGETS[..., None], -1)[..., 0]
        return 3 * jnp.sum(WEIGHTS * (partition - label + weight * partition**2))

    return jax.value_and_grad(total)(readout)


@pytest.mark.core
@pytest.mark.parametrize("how", ["plain", *PARTS])
@pytest.mark.parametrize(
    ("centered", "cap"), [(False, None), (True, 3.0)], ids=["", "centered, cap"]
)
def test_z_loss_and_its_gradients_are_the_formula(
    how: Any, centered: bool, cap: float | None
) -> None:
    limit = None if cap is None else jnp.float32(cap)
    readout = FULL._replace(cap=limit)
    reference = START._replace(cap=limit) if centered else None
    sums, grads = program(how, reference, z_loss=0.3, metrics={})(readout, WEIGHTS)
    value, expected = by_formula(readout, 0.3, centered)
    expected = expected._replace(cap=grads.cap)  # which nothing trains
    assert_close((3 * sums.loss, grads), (value, expected))
    nats, _ = by_formula(readout, 0.0, centered)
    assert_close(3 * 0.3 * sums.z, value - nats, 1e-4)
    # The control: another weight by a tenth has other gradients.
    _, wrong = by_formula(readout, 0.33, centered)
    assert np.abs(wrong.features - grads.features).max() > 1e-3 * np.abs(grads.features).max()


@functools.cache
def at_once_with_z_loss() -> Any:
    """Return sums and gradients of all logits at once, centred, on one device."""
    return program("plain", START, z_loss=0.3)(FULL, WEIGHTS)


@pytest.mark.parametrize("how", PARTS)
@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)
def test_every_mesh_gives_the_same(how: Any, sizes: dict[str, Any]) -> None:
    layout = MeshLayout(make_mesh(MeshConfig(**sizes)))
    actual = program(how, START, layout=layout, z_loss=0.3)(FULL, WEIGHTS)
    assert_close(actual, at_once_with_z_loss())


@pytest.mark.parametrize("sizes", [{"data": 8}, MESHES["data-fsdp"]], ids=str)
def test_logits_whose_exponentials_have_no_room_are_computed_again(sizes: dict[str, Any]) -> None:
    """On a mesh of data alone the results are compared for each number of exponentials kept."""
    layout = MeshLayout(make_mesh(MeshConfig(**sizes)))
    computed = {}
    work = loss.ReadoutShape(B * T // 8, V, D, 4, "cpu", layout.device_kind)
    least = loss.way(work, "vocab", exp_parts=0).bytes
    part = loss.way(work, "vocab", exp_parts=1).bytes - least
    assert loss.way(work, "vocab").exp_parts == len(work.parts)  # where nothing is known of room
    for num_parts in (0, 2, len(work.parts)):
        layout.room = least + num_parts * part
        assert loss.way(work._replace(room=layout.room), "vocab").exp_parts == num_parts
        if "fsdp" not in sizes or num_parts == 2:
            actual = program("vocab", START, layout=layout, z_loss=0.3)(FULL, WEIGHTS)
            assert_close(actual, at_once_with_z_loss())
        computed[num_parts] = num_products("vocab", layout)
    # Two products of a part with its readout, and of the reference's, less for each that is kept; three where all are.
    assert computed[0] - computed[2] == 2 * 2
    assert computed[0] - computed[len(work.parts)] == 2 * len(work.parts)


def test_what_does_not_divide_stays_whole() -> None:
    layout = MeshLayout(make_mesh(MeshConfig(data=2, tensor=4)))
    readout = FULL._replace(weight=FULL.weight[:, :23], bias=None)  # 23 columns over 4 devices
    targets = jnp.minimum(TARGETS, 22)
    expected = program("plain", targets=targets)(readout, WEIGHTS)
    actual = program("chunked", layout=layout, targets=targets)(readout, WEIGHTS)
    assert_close(actual, expected)


@pytest.mark.core
def test_classes_of_images() -> None:
    readout = ReadoutInputs(FULL.features[:, 0], FULL.weight, bias=FULL.bias)
    targets = TARGETS[:, 0]
    weights = WEIGHTS[:, 0]
    expected = program("plain", targets=targets)(readout, weights)
    assert_close(program("chunked", targets=targets)(readout, weights), expected)


@pytest.mark.core
def test_bfloat16_features() -> None:
    half = FULL._replace(features=FULL.features.astype(jnp.bfloat16))
    expected = program("plain")(half, WEIGHTS)
    for how in PARTS:
        actual = program(how)(half, WEIGHTS)
        assert actual[1].features.dtype == jnp.bfloat16
        assert actual[1].weight.dtype == jnp.float32
        # One product rounds its input to 8 bits, the other its output.
        assert_close(actual, expected, 2e-2)


def test_equal_logits_count_as_argmax_does() -> None:
    # A readout that starts at zero: the first column is the guess, not every one.
    nothing = ReadoutInputs(FULL.features, jnp.zeros((D, V)))
    for how in ("plain", *PARTS):
        sums, _ = uncentered_program(how)(nothing, WEIGHTS)
        assert sums.metrics["accuracy"] == jnp.sum(WEIGHTS * (TARGETS == 0))
        # Of equal logits the classes of smaller index come first, so that the rank is the target itself.
        assert sums.metrics["rank"] == jnp.sum(WEIGHTS * TARGETS)
        assert sums.metrics["top 5"] == jnp.sum(WEIGHTS * (TARGETS < 5))


def by_sorting(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return places of the targets, int [N], in a stable sort of [N, V] logits, NaN first."""
    order = np.argsort(-np.nan_to_num(logits, nan=np.inf), axis=-1, kind="stable")
    return np.argmax(order == targets[:, None], axis=-1)


def test_ranks_are_places_in_the_sorted_logits() -> None:
    # Rounded features and weights make ties.
    features, weight = jnp.round(FULL.features), jnp.round(FULL.weight)
    broken = weight.at[:, 7].set(jnp.nan)
    for how in ("plain", *PARTS):
        compiled = uncentered_program(how)
        for matrix in (weight, broken):
            logits = np.asarray(features @ matrix).reshape(-1, V)
            ranks = by_sorting(logits, np.asarray(TARGETS).reshape(-1)).reshape(B, T)
            assert len(np.unique(ranks)) > 10
            assert len(np.unique(logits[0])) < V
            for weights in (WEIGHTS, WEIGHTS.at[2:].set(0)):
                sums, _ = compiled(ReadoutInputs(features, matrix), weights)
                assert sums.metrics["rank"] == (ranks * np.asarray(weights)).sum()
                assert sums.metrics["top 5"] == ((ranks < 5) * np.asarray(weights)).sum()
                if matrix is weight:
                    assert sums.metrics["accuracy"] == ((ranks == 0) * np.asarray(weights)).sum()


def trace_loss(how: Any, metrics: dict[str, Metric]) -> Any:
    """Trace the loss with metrics, without compiling."""
    return jax.make_jaxpr(
        lambda: loss.cross_entropy(FULL, TARGETS, WEIGHTS, how=how, metrics=metrics)
    )()


def test_ranks_take_a_pass_over_all_logits_only_where_a_metric_reads_them() -> None:
    def count(metrics: dict[str, Metric]) -> int:
        names = [e.primitive.name for e in equations(trace_loss("vocab", metrics).jaxpr)]
        return names.count("dot_general")

    without = {name: metric for name, metric in MEASURED.items() if not metric.needs_rank}
    assert count(MEASURED) == 2 * count(without)


def test_a_rank_that_is_not_declared_is_refused() -> None:
    undeclared = dataclasses.replace(MEASURED["rank"], needs_rank=False)
    for how in ("plain", *PARTS):
        for metrics in ({"rank": undeclared}, {**MEASURED, "undeclared": undeclared}):
            with pytest.raises(MetricError, match="needs_rank=True"):
                trace_loss(how, metrics)


def test_a_metric_that_is_no_single_number_is_refused() -> None:
    per_token = measured(lambda statistics, weights: statistics.loss * weights)
    with pytest.raises(MetricError, match="return one number"):
        trace_loss("plain", {"per token": per_token})


def gradient_equations(
    how: Any, layout: Layout = ONE_DEVICE, reference: ReadoutInputs | None = None
) -> list[Any]:
    """Return the equations of the loss and its gradient."""

    def total(readout: ReadoutInputs) -> jax.Array:
        sums = loss.cross_entropy(
            readout, TARGETS, WEIGHTS, how=how, reference=reference, layout=layout
        )
        return sums.loss

    return [*equations(jax.make_jaxpr(jax.grad(total))(FULL).jaxpr)]


def num_products(how: Any, layout: Layout) -> int:
    """Count the matrix products of the centred loss and its gradient."""
    names = [equation.primitive.name for equation in gradient_equations(how, layout, START)]
    return names.count("dot_general")


def shapes(how: Any) -> set[tuple[int, ...]]:
    """Return the shapes of all arrays that are computed for the gradient."""
    array_shapes = set()
    for equation in gradient_equations(how):
        array_shapes.update(tuple(variable.aval.shape) for variable in equation.outvars)
    return array_shapes


def test_no_array_holds_all_logits() -> None:
    for how in PARTS:
        assert max(int(np.prod(shape)) for shape in shapes(how) if V in shape) == D * V < B * T * V
    assert (B, T, V) in shapes("plain")


def test_gradients_of_the_readout_are_summed_over_devices_once() -> None:
    layout = MeshLayout(make_mesh(MeshConfig(data=2, fsdp=4)))

    def total(reading: ReadoutInputs) -> jax.Array:
        metrics = on_devices(training=True)
        return loss.cross_entropy(
            reading, TARGETS, WEIGHTS, how="chunked", metrics=metrics, layout=layout
        ).loss

    counts: dict[str, int] = {}

    def look(jaxpr: Any, inside: bool) -> None:
        for equation in jaxpr.eqns:
            name = equation.primitive.name
            if name.startswith(("psum", "reduce_scatter", "all_gather")):
                counts[name] = counts.get(name, 0) + 1
                assert not inside, name
            for inner in jaxprs_in_params(equation.params):
                look(inner, inside or name == "scan")

    look(jax.make_jaxpr(jax.grad(total))(FULL).jaxpr, False)
    assert counts["reduce_scatter"] == 1
    assert counts.pop("all_gather") == 1
    # The sums of the loss, of the weights and of every metric, the readout over data, its scale and
    # its bias.
    assert sum(counts.values()) == 6 + len(on_devices(training=True))


def test_auto_is_chunked_where_there_are_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (B, T, V) not in shapes("auto")
    monkeypatch.setattr(loss, "LEAST_ROWS", B * T)
    assert (B, T, V) in shapes("auto")


@pytest.mark.parametrize("how", PARTS)
def test_a_tied_model_trains_the_same_with_either(how: Any) -> None:
    assert_close(tied_gradients(how), tied_gradients("plain"), 1e-4)


@functools.cache
def tied_gradients(how: Any) -> Any:
    """Return gradients of two microbatches of a model whose tied readout is halved."""
    config = DecoderConfig(
        width=8, depth=1, num_heads=2, vocab_size=17, seq_len=7, tied=True, bias=False,
        compute=ComputeConfig(cross_entropy=how),
    )  # fmt: skip
    model = definition(config)
    batch = batch_of(config, rows=4)
    params = {name: 0.3 * draw(*leaf.shape) for name, leaf in model.abstract.items()}
    factors = resolve(presets.get("mup", base={"embed": 4}), model)
    inputs = StepInputs(factors, cast("Any", None))
    return jax.jit(lambda params: gradients(model, params, inputs, batch, 2))(params)
