"""Matrix products, norms and rotary positions. Shapes: B batch, T positions, D width, N head dimension, H heads, I inputs, O outputs.

V is vocabulary or classes, R all leading dimensions in one; an argument without a suffix has any number of them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mupax.zoo.definition import Init
from mupax.zoo.families import ComputeConfig, ConfigError
from mupax.zoo.partition import ONE_DEVICE, Layout
from mupax.zoo.transformer import RopeScaling

GATES = {"swiglu": jax.nn.silu, "geglu": jax.nn.gelu}
"""Activation of an MLP's gate; gelu in the tanh form."""

SAVED = "attention"
"""Name by which a remat policy may keep what a flash kernel's gradient needs: its output and the softmax's norm."""


def project(
    x: jax.Array,
    w: jax.Array,
    *,
    inputs: int = 1,
    out_dtype: jnp.dtype | None = None,
    kind: str | None = None,
    layout: Layout = ONE_DEVICE,
) -> jax.Array:
    """Return the product of x and w over the last `inputs` dimensions of x and the first of w, [..., O].

    On CPU leading dimensions are merged into one before the product: two to three times faster. Elsewhere they stay, and
    where positions are split over devices, which a merged dimension could not be.

    Args:
        x: [..., I], whose dtype the product is computed in.
        w: [I, O], each of one dimension or several.
        inputs: dimensions that I is.
        out_dtype: of the result; x's unless given.
        kind: `product_dtype` of the model's compute; the result then has x's type.
        layout: how x lies on devices.
    """
    lead, summed, out = x.shape[: x.ndim - inputs], w.shape[:inputs], w.shape[inputs:]
    contract = (tuple(range(x.ndim - inputs, x.ndim)), tuple(range(inputs)))
    if kind is not None:
        return _narrow(x, w.astype(x.dtype), (contract, ((), ())), kind)
    if layout.platform != "cpu" or layout.num_shards("sequence") > 1:
        return jax.lax.dot_general(
            x, w.astype(x.dtype), (contract, ((), ())), preferred_element_type=out_dtype or x.dtype
        )
    x_RI = x.reshape(math.prod(lead), math.prod(summed))
    w_IO = w.astype(x.dtype).reshape(math.prod(summed), math.prod(out))
    return jnp.matmul(x_RI, w_IO, preferred_element_type=out_dtype or x.dtype).reshape(*lead, *out)


def _narrow(x: jax.Array, w: jax.Array, dimensions: Any, kind: str) -> jax.Array:
    """The product of numbers rounded to 8 bits, each row of x and column of w over its largest; gradients are rounded likewise.

    So a factor on x or w is one on the result, whatever the preset. Of float8 gradients have the type of the larger range.
    """
    from qwix._src.core import dot_general_qt as qwix  # pyright: ignore[reportMissingImports]  # has no public function

    back, kind = ("float8_e5m2", "float8_e4m3fn") if kind == "float8" else (kind, kind)
    config = qwix.DotGeneralQtConfig(
        lhs_qtype=kind, rhs_qtype=kind, dlhs_grad_qtype=back, drhs_grad_qtype=back
    )
    return qwix.dot_general_qt(x, w, dimensions, config).astype(x.dtype)


def product_kind(compute: ComputeConfig) -> str | None:
    """`kind` of `project`.

    Raises:
        ConfigError: it needs a package that is not here.
    """
    if compute.product_dtype is not None:
        from mupax import extras

        extras.require(
            "quantized", f"model.compute.product_dtype {compute.product_dtype}", ConfigError
        )
    return compute.product_dtype


def biased(x: jax.Array, bias: nnx.Param | None) -> jax.Array:
    """x + bias, in x's dtype.

    Args:
        x: [..., O].
        bias: [O]; None where the layer has none.
    """
    return x if bias is None else x + bias[...].astype(x.dtype)


def adapted(
    y: jax.Array, x: jax.Array, lora: Callable[[jax.Array, int], jax.Array] | None, inputs: int = 1
) -> jax.Array:
    """y with what its matrix' adapter adds.

    Args:
        y: the product of x and the matrix, [..., O].
        x: [..., I].
        lora: the adapter (`mupax.zoo.lora.layer`); None where the matrix has none.
        inputs: dimensions that I is.
    """
    return y if lora is None else y + lora(x, inputs)


def softcapped(logits: jax.Array, cap: jax.Array | float | None) -> jax.Array:
    """cap * tanh(logits / cap), which is at most cap and near 0 the same.

    Args:
        logits: float32.
        cap: None: they stay as they are.
    """
    return logits if cap is None else cap * jnp.tanh(logits / cap)


class ReadoutInputs(NamedTuple):
    """Features and readout of which a loss may compute logits in parts: scale * features @ weight + bias, in float32, capped."""

    features: jax.Array
    """[..., D], in the type that products are computed in."""
    weight: jax.Array
    """[D, V]."""
    scale: jax.Array | None = None
    """[]; that of a readout through the embedding."""
    bias: jax.Array | None = None
    """[V]."""
    routing: Any = None
    """What the model's routers did (`mupax.zoo.experts.routing.Routing`); None without experts."""
    cap: jax.Array | None = None
    """[]; of `softcapped`."""

    def logits(self, layout: Layout = ONE_DEVICE) -> jax.Array:
        """Return all logits, float32 [..., V].

        Args:
            layout: how the features lie on devices.
        """
        logits = project(self.features, self.weight, out_dtype=jnp.float32, layout=layout)
        if self.scale is not None:
            logits = self.scale * logits
        cap = None if self.cap is None else jax.lax.stop_gradient(self.cap)
        return softcapped(logits if self.bias is None else logits + self.bias, cap)

    def uncapped(self, slope: jax.Array, logits: jax.Array) -> jax.Array:
        """The gradient with respect to what is capped: a cap's slope is 1 - (logits / cap)^2.

        Args:
            slope: the gradient with respect to the logits.
            logits: of `logits`.
        """
        return slope if self.cap is None else slope * (1 - jnp.square(logits / self.cap))


def readout_method(model: Any) -> Callable[..., ReadoutInputs] | None:
    """Return the method by which a model gives `ReadoutInputs`, or None where a loss has only its logits.

    Args:
        model: A module or its class. A method `reading`, as it was called before, is used too, and warns.
    """
    if hasattr(model, "readout_inputs"):
        return model.readout_inputs
    if not hasattr(model, "reading"):
        return None
    name = model.__name__ if isinstance(model, type) else type(model).__name__
    warnings.warn(
        f"{name}.reading is deprecated; call the method readout_inputs, which returns ReadoutInputs",
        DeprecationWarning,
        stacklevel=2,
    )
    return model.reading


def __getattr__(name: str) -> Any:
    if name != "Reading":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn("Reading is deprecated; write ReadoutInputs", DeprecationWarning, stacklevel=2)
    return ReadoutInputs


class Norm(nnx.Module):
    """LayerNorm or RMSNorm over the last axis in float32, with the gain and bias that its config declares, and GELU after it."""

    def __init__(self, kind: str, init: Init, eps: float, activation: str = "none") -> None:
        self.kind, self.eps, self.activation = kind, eps, activation
        self.gain, self.bias = init.maybe("gain"), init.maybe("bias")

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., D] to [..., D], in x's dtype."""
        y = x.astype(jnp.float32)
        if self.kind == "layernorm":
            y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.eps)
        if self.gain is not None:
            y = y * self.gain[...]
        if self.bias is not None:
            y = y + self.bias[...]
        if self.activation == "gelu":
            y = jax.nn.gelu(y)
        return y.astype(x.dtype)


def scaled_frequencies(frequency_M: jax.Array, scaling: RopeScaling) -> jax.Array:
    """Angles per position, float32 [M], as Llama 3.1 (Meta's reference code, `apply_scaling`) or linear interpolation has them.

    Args:
        frequency_M: plain ones.
        scaling: of the model.
    """
    if scaling.kind == "linear":
        return frequency_M / scaling.factor
    turns_M = scaling.original * frequency_M / (2 * math.pi)
    weight_M = jnp.clip((turns_M - scaling.low) / (scaling.high - scaling.low), 0, 1)
    return weight_M * frequency_M + (1 - weight_M) * frequency_M / scaling.factor


def rotary(
    x_BTHN: jax.Array,
    theta: float,
    start: jax.Array | None = None,
    scaling: RopeScaling | None = None,
    size: int | None = None,
    *,
    layout: Layout = ONE_DEVICE,
) -> jax.Array:
    """Turn the pairs (i, i + N/2) of x by position * theta^(-2i/N) (Su et al. 2021, in the half-split order of Llama).

    M is N / 2.

    Args:
        x_BTHN: queries or keys; N is even.
        theta: base of the frequencies.
        start: position of the first of them, int32 [] or, of each sequence, [B]; 0 unless given.
        scaling: of the frequencies; None: they are the plain ones.
        size: entries of each head that are turned, the first ones; all unless given.
        layout: says which position lies where, and for which platform the rotation is compiled.
    """
    if size not in (None, x_BTHN.shape[-1]):
        turned_BTHN = rotary(x_BTHN[..., :size], theta, start, scaling, layout=layout)
        return jnp.concatenate([turned_BTHN, x_BTHN[..., size:]], axis=-1)
    length, half = x_BTHN.shape[1], x_BTHN.shape[-1] // 2
    frequency_M = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    frequency_M = frequency_M if scaling is None else scaled_frequencies(frequency_M, scaling)
    if start is None:
        positions_BT = layout.positions(length)[None]
    else:
        positions_BT = jnp.reshape(start, (-1, 1)) + jnp.arange(length)[None]
    angle_BTM = positions_BT.astype(jnp.float32)[..., None] * frequency_M
    if layout.platform == "tpu":
        return _turned(x_BTHN, jnp.cos(angle_BTM), jnp.sin(angle_BTM))
    cos_BTHM = jnp.cos(angle_BTM)[:, :, None]
    sin_BTHM = jnp.sin(angle_BTM)[:, :, None]
    a_BTHM, b_BTHM = jnp.split(x_BTHN.astype(jnp.float32), 2, axis=-1)
    turned = [a_BTHM * cos_BTHM - b_BTHM * sin_BTHM, b_BTHM * cos_BTHM + a_BTHM * sin_BTHM]
    return jnp.concatenate(turned, axis=-1).astype(x_BTHN.dtype)


@jax.custom_vjp
def _turned(x_BTHN: jax.Array, cos_BTM: jax.Array, sin_BTM: jax.Array) -> jax.Array:
    """Return the rotation of `rotary` by a product: (a, b) is (-b, a) after a matrix of 0, 1 and -1, exactly.

    On TPU half a row is half of a vector's 128 lanes: to cut and to join rows there takes five times as long as the product.
    """
    half = cos_BTM.shape[-1]
    swap_NN = np.kron([[0, 1], [-1, 0]], np.eye(half))
    exact = jax.lax.Precision.HIGHEST if x_BTHN.dtype == jnp.float32 else None
    swapped_BTHN = jnp.matmul(
        x_BTHN, swap_NN.astype(x_BTHN.dtype), precision=exact, preferred_element_type=jnp.float32
    )
    cos_BTHN, sin_BTHN = (jnp.tile(x_BTM, 2)[:, :, None] for x_BTM in (cos_BTM, sin_BTM))
    return (x_BTHN.astype(jnp.float32) * cos_BTHN + swapped_BTHN * sin_BTHN).astype(x_BTHN.dtype)


def _turned_forward(
    x_BTHN: jax.Array, cos_BTM: jax.Array, sin_BTM: jax.Array
) -> tuple[jax.Array, Any]:
    return _turned(x_BTHN, cos_BTM, sin_BTM), (cos_BTM, sin_BTM)


def _turned_backward(
    turn: tuple[jax.Array, jax.Array], gradient_BTHN: jax.Array
) -> tuple[jax.Array, None, None]:
    """A rotation's transpose is the rotation back."""
    cos_BTM, sin_BTM = turn
    return _turned(gradient_BTHN, cos_BTM, -sin_BTM), None, None


_turned.defvjp(_turned_forward, _turned_backward)
