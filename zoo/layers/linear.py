"""Linear maps, norms and rotary positions, used by every model of the zoo.

Shapes: B batch, T positions, D width, N head dimension, H heads, M half of N, I inputs, O outputs,
V vocabulary or classes, R all leading dimensions merged into one. An array without a suffix has any
number of leading dimensions.
"""

from __future__ import annotations

import math
import re
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
"""Function of an MLP's gate by the config's `activation`. GELU is in its tanh approximation."""

FLOAT8_CAPABILITY = (8, 9)
"""Least compute capability of an NVIDIA GPU that multiplies numbers of float8."""
SAVED = "attention"
"""Checkpoint name of the arrays that the gradient of a flash kernel needs.

These are the kernel's output and the log of its softmax sums. A remat policy can keep them by name.
"""


def project(
    x: jax.Array,
    w: jax.Array,
    *,
    inputs: int = 1,
    out_dtype: jnp.dtype | None = None,
    kind: str | None = None,
    layout: Layout = ONE_DEVICE,
) -> jax.Array:
    """Return the matrix product of x and w, [..., O].

    The product sums over the last `inputs` dimensions of x and the first `inputs` dimensions of w.

    Args:
        x: Inputs, [..., I]. The product is computed in their dtype.
        w: Weights, [I, O]. I and O can each be several dimensions.
        inputs: Number of dimensions that I stands for.
        out_dtype: Dtype of the result, by default that of x.
        kind: "int8" or "float8" to round both factors to 8 bits, from `product_kind`. The result
            then has the dtype of x. `None` rounds nothing.
        layout: Layout of x. Its platform and its split of positions select the implementation.

    Raises:
        ConfigError: `kind` is "float8", and a GPU of the layout has no units for it.
    """
    num_leading = x.ndim - inputs
    leading_shape = x.shape[:num_leading]
    input_shape = w.shape[:inputs]
    output_shape = w.shape[inputs:]
    contracted = (tuple(range(num_leading, x.ndim)), tuple(range(inputs)))
    dimension_numbers = (contracted, ((), ()))

    if kind is not None:
        if kind == "float8":
            _refuse_gpus_without_float8(layout)
        return _quantized_product(x, w.astype(x.dtype), dimension_numbers, kind)

    out_dtype = out_dtype or x.dtype
    # On CPU the product is two to three times faster with all leading dimensions merged into one.
    # A merged dimension cannot stay split by positions, so layouts that split them do not merge.
    if layout.platform != "cpu" or layout.num_shards("sequence") > 1:
        return jax.lax.dot_general(
            x, w.astype(x.dtype), dimension_numbers, preferred_element_type=out_dtype
        )
    x_RI = x.reshape(math.prod(leading_shape), math.prod(input_shape))
    w_IO = w.astype(x.dtype).reshape(math.prod(input_shape), math.prod(output_shape))
    y_RO = jnp.matmul(x_RI, w_IO, preferred_element_type=out_dtype)
    return y_RO.reshape(*leading_shape, *output_shape)


def _quantized_product(x: jax.Array, w: jax.Array, dimensions: Any, kind: str) -> jax.Array:
    """Return the product of x and w, both rounded to 8 bits. Gradients are rounded likewise.

    Each row of x and each column of w is divided by its largest entry before it is rounded. A
    factor on x or w, such as a preset's multiplier, is therefore exactly a factor on the result.

    Args:
        w: Weights, which must have the dtype of x.
        dimensions: Contracted and batch dimensions, as `jax.lax.dot_general` takes them.
        kind: "int8" or "float8".
    """
    # qwix has no public function for this product.
    from qwix._src.core import dot_general_qt as qwix  # pyright: ignore[reportMissingImports]

    gradient_kind = kind
    if kind == "float8":
        kind = "float8_e4m3fn"
        # Gradients have the float8 type of the larger range.
        gradient_kind = "float8_e5m2"
    config = qwix.DotGeneralQtConfig(
        lhs_qtype=kind,
        rhs_qtype=kind,
        dlhs_grad_qtype=gradient_kind,
        drhs_grad_qtype=gradient_kind,
    )
    return qwix.dot_general_qt(x, w, dimensions, config).astype(x.dtype)


def _refuse_gpus_without_float8(layout: Layout) -> None:
    """Raise an error if a GPU of the mesh has no units for products of float8.

    XLA would compute the rounded products in bfloat16, more slowly than without rounding.

    Raises:
        ConfigError: An NVIDIA GPU has a compute capability below 8.9. Other GPUs are not checked.
    """
    for capability in sorted(layout.capabilities):
        # GPUs of other vendors report names such as gfx942.
        if not re.fullmatch(r"\d+\.\d+", capability):
            continue
        major, minor = capability.split(".")
        if (int(major), int(minor)) < FLOAT8_CAPABILITY:
            raise ConfigError(
                "model.compute.product_dtype float8 needs GPUs of compute capability 8.9 or later "
                f"(L4, H100, B200), and a GPU of the mesh has {capability}; "
                "leave out --model.compute.product-dtype"
            )


def product_kind(compute: ComputeConfig) -> str | None:
    """Return the argument `kind` of `project`: the 8-bit type of products, `None` for no rounding.

    Raises:
        ConfigError: If the config needs the extra `quantized` and it is not installed.
    """
    if compute.product_dtype is not None:
        from mupax import extras

        setting = f"model.compute.product_dtype {compute.product_dtype}"
        extras.require("quantized", setting, ConfigError)
    return compute.product_dtype


def biased(x: jax.Array, bias: nnx.Param | None) -> jax.Array:
    """Return x + bias in the dtype of x.

    Args:
        x: Outputs of a matrix, [..., O].
        bias: Bias, [O]. `None` returns x.
    """
    if bias is None:
        return x
    return x + bias[...].astype(x.dtype)


def adapted(
    y: jax.Array, x: jax.Array, lora: Callable[[jax.Array, int], jax.Array] | None, inputs: int = 1
) -> jax.Array:
    """Return y plus the output of the low-rank adapter of its matrix.

    Args:
        y: Product of x and the matrix, [..., O].
        x: Inputs of the matrix, [..., I].
        lora: Adapter of the matrix (`mupax.zoo.lora.layer.Lora`). `None` returns y.
        inputs: Number of trailing dimensions of x that make up I.
    """
    if lora is None:
        return y
    return y + lora(x, inputs)


def softcapped(logits: jax.Array, cap: jax.Array | float | None) -> jax.Array:
    """Return cap * tanh(logits / cap), a smooth clip to (-cap, cap).

    Args:
        logits: Attention or output logits, float32.
        cap: Bound of the result. `None` returns the logits unchanged.
    """
    if cap is None:
        return logits
    return cap * jnp.tanh(logits / cap)


class ReadoutInputs(NamedTuple):
    """Final features and readout matrix of a model, from which a loss forms logits in chunks.

    The logits are softcapped(scale * features @ weight + bias), in float32.
    """

    features: jax.Array
    """Final hidden states, [..., D], in the dtype of products."""
    weight: jax.Array
    """Readout matrix, [D, V]."""
    scale: jax.Array | None = None
    """Factor on the logits of a tied readout, float32 []."""
    bias: jax.Array | None = None
    """Readout bias, [V]."""
    routing: Any = None
    """Routing statistics (`mupax.zoo.experts.routing.Routing`). `None` without experts."""
    cap: jax.Array | None = None
    """Soft cap of the logits (`softcapped`), float32 []."""
    attention_logits: dict[str, jax.Array] | None = None
    """Largest attention logit of each layer and head, float32 [layers, heads], by the name of the
    attention, such as "block.attention". `None` if not measured."""

    def logits(self, layout: Layout = ONE_DEVICE) -> jax.Array:
        """Return all logits with scale, bias and soft cap applied, float32 [..., V]."""
        logits = project(self.features, self.weight, out_dtype=jnp.float32, layout=layout)
        if self.scale is not None:
            logits = self.scale * logits
        cap = None
        if self.cap is not None:
            # The cap is a constant of the config. It is carried as an array, but gets no gradient.
            cap = jax.lax.stop_gradient(self.cap)
        if self.bias is not None:
            logits = logits + self.bias
        return softcapped(logits, cap)

    def uncapped(self, slope: jax.Array, logits: jax.Array) -> jax.Array:
        """Return the gradient with respect to the logits before the soft cap.

        The derivative of the cap is 1 - (logits / cap)^2.

        Args:
            slope: Gradient with respect to the capped logits.
            logits: Capped logits, as `logits` returns them.
        """
        if self.cap is None:
            return slope
        return slope * (1 - jnp.square(logits / self.cap))


def readout_method(model: Any) -> Callable[..., ReadoutInputs] | None:
    """Return the model's method that gives `ReadoutInputs`, or `None` for a model without one.

    Args:
        model: A module or its class. Its method can also have the earlier name `reading`, which
            warns.
    """
    if hasattr(model, "readout_inputs"):
        return model.readout_inputs
    if not hasattr(model, "reading"):
        return None
    name = model.__name__ if isinstance(model, type) else type(model).__name__
    warnings.warn(
        f"{name}.reading is deprecated; call the method readout_inputs, which returns "
        "ReadoutInputs",
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
    """LayerNorm or RMSNorm over the last axis, computed in float32.

    Gain and bias exist where the config declares them.

    Args:
        kind: "layernorm" or "rmsnorm". RMSNorm does not subtract the mean.
        init: Scope of the parameters `gain` and `bias`.
        eps: Constant added to the variance or mean square.
        activation: "gelu" applies GELU after the norm, "none" applies nothing.
    """

    def __init__(self, kind: str, init: Init, eps: float, activation: str = "none") -> None:
        self.kind = kind
        self.eps = eps
        self.activation = activation
        self.gain = init.maybe("gain")
        self.bias = init.maybe("bias")

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return normalized x, [..., D], in the dtype of x."""
        y = x.astype(jnp.float32)
        if self.kind == "layernorm":
            y = y - jnp.mean(y, axis=-1, keepdims=True)
        mean_square = jnp.mean(jnp.square(y), axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(mean_square + self.eps)
        if self.gain is not None:
            y = y * self.gain[...]
        if self.bias is not None:
            y = y + self.bias[...]
        if self.activation == "gelu":
            y = jax.nn.gelu(y)
        return y.astype(x.dtype)


def scaled_frequencies(frequency_M: jax.Array, scaling: RopeScaling) -> jax.Array:
    """Return rotary frequencies stretched for a longer context, float32 [M].

    Args:
        frequency_M: Unscaled frequencies, float32, in radians per position.
        scaling: Linear interpolation (Chen et al. 2023), or the rule of Llama 3.1 (`apply_scaling`
            in Meta's reference code).
    """
    if scaling.kind == "linear":
        return frequency_M / scaling.factor
    # Llama 3.1 keeps frequencies that turn often within the original context and divides those that
    # turn rarely. Between the two it interpolates.
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
    """Return x with each pair of entries (i, i + N/2) rotated by position * theta^(-2i/N) radians.

    These are rotary positions (Su et al. 2021) in the half-split order of Llama.

    Args:
        x_BTHN: Queries or keys, whose head dimension N is even.
        start: Position of the first entry along T, int32 [], or int32 [B] with one for each
            sequence. Default: positions of the layout, which begin at 0.
        scaling: Stretching of the frequencies for a longer context. `None` leaves them unscaled.
        size: Number of leading entries of each head to rotate, which is then N in the formula. The
            other entries are returned unchanged. Default: all are rotated.
        layout: Layout of positions on devices. Its platform selects the implementation.
    """
    if size not in (None, x_BTHN.shape[-1]):
        rotated_BTHN = rotary(x_BTHN[..., :size], theta, start, scaling, layout=layout)
        return jnp.concatenate([rotated_BTHN, x_BTHN[..., size:]], axis=-1)

    length = x_BTHN.shape[1]
    half = x_BTHN.shape[-1] // 2
    frequency_M = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if scaling is not None:
        frequency_M = scaled_frequencies(frequency_M, scaling)
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
    rotated_a_BTHM = a_BTHM * cos_BTHM - b_BTHM * sin_BTHM
    rotated_b_BTHM = b_BTHM * cos_BTHM + a_BTHM * sin_BTHM
    rotated_BTHN = jnp.concatenate([rotated_a_BTHM, rotated_b_BTHM], axis=-1)
    return rotated_BTHN.astype(x_BTHN.dtype)


@jax.custom_vjp
def _turned(x_BTHN: jax.Array, cos_BTM: jax.Array, sin_BTM: jax.Array) -> jax.Array:
    """Return the rotation of `rotary`, computed with a matrix product.

    A product with a matrix of 0, 1 and -1 maps the halves (a, b) to (-b, a) without rounding.

    Args:
        cos_BTM: Cosine of the angle of each pair of entries. B is 1 if it is the same in all
            sequences.
        sin_BTM: Sine of these angles, [B, T, M].
    """
    # Rotate by a matrix product. On TPU, half a row of 128 entries is half of the lanes of a
    # vector. Splitting and joining rows there takes five times as long as the product.
    half = cos_BTM.shape[-1]
    swap_NN = np.kron([[0, 1], [-1, 0]], np.eye(half))
    precision = jax.lax.Precision.HIGHEST if x_BTHN.dtype == jnp.float32 else None
    swapped_BTHN = jnp.matmul(
        x_BTHN,
        swap_NN.astype(x_BTHN.dtype),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    cos_BTHN = jnp.tile(cos_BTM, 2)[:, :, None]
    sin_BTHN = jnp.tile(sin_BTM, 2)[:, :, None]
    rotated_BTHN = x_BTHN.astype(jnp.float32) * cos_BTHN + swapped_BTHN * sin_BTHN
    return rotated_BTHN.astype(x_BTHN.dtype)


def _turned_forward(
    x_BTHN: jax.Array, cos_BTM: jax.Array, sin_BTM: jax.Array
) -> tuple[jax.Array, Any]:
    return _turned(x_BTHN, cos_BTM, sin_BTM), (cos_BTM, sin_BTM)


def _turned_backward(
    residuals: tuple[jax.Array, jax.Array], gradient_BTHN: jax.Array
) -> tuple[jax.Array, None, None]:
    """Return the gradient rotated by the opposite angle, which is the transpose of the rotation."""
    cos_BTM, sin_BTM = residuals
    return _turned(gradient_BTHN, cos_BTM, -sin_BTM), None, None


_turned.defvjp(_turned_forward, _turned_backward)
