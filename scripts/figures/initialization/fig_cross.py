"""Residual kernels of an encoder-decoder at initialization, against their limit (`kernels.py`).

Shapes: L blocks of the decoder, M positions of both texts together.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from scripts.figures import models, panels
from scripts.figures.initialization import finite_kernels, kernels
from scripts.figures.result import Data, Figure, Row, Settings, exponent, settings_of

if TYPE_CHECKING:
    import matplotlib.figure

CONTROLS = {
    "cross": "without attention to the encoder",
    "causal": "whose decoder sees what follows",
}
"""Name of a mistake in computing the limit, made on purpose, to its description in rows."""


class Text(NamedTuple):
    """Batch of two texts: with gaps for the encoder, and complete for the decoder."""

    inputs: np.ndarray
    """Bytes int32 [2, S] with gaps, 0 at padding."""
    input_mask: np.ndarray
    """Int32 [2, S], 0 at padding and 1 elsewhere."""
    decoder_inputs: np.ndarray
    """Bytes int32 [2, T] without gaps."""


def text() -> Text:
    """Return the two texts as bytes. Their inputs end in padding of different lengths."""
    inputs = _as_bytes("be _ to be\0\0", "to _\0\0\0\0\0\0\0\0")
    decoder_inputs = _as_bytes("<be not to be", "<to be or not")
    return Text(inputs, (inputs > 0).astype(np.int32), decoder_inputs)


def _as_bytes(*texts: str) -> np.ndarray:
    """Return the bytes of texts of equal length, int32 [texts, bytes]."""
    return np.array([list(line.encode()) for line in texts], np.int32)


def recursion(
    settings: Settings, alpha_a: float, alpha_l: float, head_dim: int, wrong: str = ""
) -> np.ndarray:
    """Return the kernels [L + 1, M, M] of the decoder's residual stream in the limit of many heads.

    They are computed by the recursion of `kernels.py`.

    Args:
        alpha_a: Exponent of N in the scale of attention logits.
        alpha_l: Exponent of the depth in the scale of branches.
        head_dim: Head dimension `N`.
        wrong: Mistake to make, a key of `CONTROLS`; none by default.
    """
    batch = text()
    rule = {
        "alpha_a": alpha_a,
        "alpha_l": alpha_l,
        "head_dim": head_dim,
        "beta0": settings["beta0"],
        "samples": settings["samples"],
        "activation": "gelu_exact",
    }
    input_mask = batch.input_mask > 0
    # BART has a norm after both embeddings.
    encoder_first = kernels.normalized(kernels.token_kernel(batch.inputs))
    decoder_first = kernels.normalized(kernels.token_kernel(batch.decoder_inputs))

    encoder = kernels.residual_kernels(
        encoder_first, depth=settings["encoder_depth"], mask=input_mask[:, None], **rule
    )
    memory = kernels.Memory(kernels.normalized(encoder.layers[-1]), input_mask)
    if wrong == "cross":
        memory = None
    causal = np.tri(batch.decoder_inputs.shape[1], dtype=bool)
    if wrong == "causal":
        causal = None
    decoder = kernels.residual_kernels(
        decoder_first, depth=settings["depth"], mask=causal, memory=memory, seed=1, **rule
    )
    return decoder.layers.reshape(len(decoder.layers), batch.decoder_inputs.size, -1)


def finite(settings: Settings, alpha_a: float, head_dim: int, heads: int) -> np.ndarray:
    """Return kernels h.h'/D of the decoder's residual stream in finite models.

    The result is [alpha_l, seeds, L + 1, M, M].

    Args:
        settings: Settings of the figure, which have every alpha_l.
        alpha_a: Exponent of N in the scale of attention logits.
        head_dim: Head dimension `N`.
        heads: Number of heads `H`.
    """
    import jax
    import jax.numpy as jnp

    from mupax.train.studies.check.observables import internals

    batch = {name: jnp.asarray(array) for name, array in text()._asdict().items()}

    def look(model: Any) -> jax.Array:
        activations = internals(model, **batch)
        stream = jnp.concatenate([activations["embedding"][None], activations["residual"]])
        flat = stream.reshape(len(stream), -1, stream.shape[-1])
        return flat @ flat.swapaxes(1, 2) / stream.shape[-1]

    lengths = {"seq_len": batch["inputs"].shape[1], "target_len": batch["decoder_inputs"].shape[1]}
    depths = {name: settings[name] for name in ("depth", "encoder_depth")}
    config = models.encoder_decoder(head_dim=head_dim, heads=heads, **depths, **lengths)
    program = models.at_initialization(config, look)
    presets = []
    for alpha_l in settings["alpha_l"]:
        presets.append(models.absolute(alpha_a=alpha_a, alpha_l=alpha_l, beta0=settings["beta0"]))
    by_seed = [np.stack(program(seed, presets)) for seed in range(settings["seeds"])]
    return np.stack(by_seed, axis=1).astype(np.float64)


def measure(settings: Settings, work: Path) -> dict[str, Any]:
    """Measure how far the decoder's kernels are from their limit, and from mistaken limits.

    Returns:
        alpha_A to a dictionary. `squared` [alpha_l, H, seeds]: squared errors relative to the
        limit. `products` [alpha_l, seeds, seeds]: products of two seeds' errors, of the widest
        models. `controls`: key of `CONTROLS` to such products with the mistaken limit. `by_layer`,
        `limit` and `without` [alpha_l, L + 1, 2]: means of the kernels' entries on and off the
        diagonal, of the widest models, of the limit, and of the limit without attention to the
        encoder.
    """
    del work
    by_alpha_a: dict[str, Any] = {}
    for alpha_a, sizes in settings["heads"].items():
        rule = {"alpha_a": float(alpha_a), "head_dim": settings["head_dim"][alpha_a]}
        limits = {}
        for wrong in ("", *CONTROLS):
            by_alpha_l = []
            for alpha_l in settings["alpha_l"]:
                by_alpha_l.append(recursion(settings, alpha_l=alpha_l, wrong=wrong, **rule))
            limits[wrong] = np.stack(by_alpha_l)
        squared = []
        widest = np.array([])
        for heads in sizes:
            widest = finite(settings, heads=heads, **rule)
            squared.append(finite_kernels.squared(finite_kernels.products(widest, limits[""])))
        controls = {}
        for wrong in CONTROLS:
            controls[wrong] = finite_kernels.products(widest, limits[wrong])
        by_alpha_a[alpha_a] = {
            "squared": np.stack(squared, axis=1),
            "products": finite_kernels.products(widest, limits[""]),
            "controls": controls,
            "by_layer": finite_kernels.sums(widest.mean(axis=1)),
            "limit": finite_kernels.sums(limits[""]),
            "without": finite_kernels.sums(limits["cross"]),
        }
    return by_alpha_a


def rows(settings: Settings, data: Data) -> list[Row]:
    """Return rows on the kernels' distances from their limit, predicted as 0.

    Further rows have the exponent of the squared error in H, predicted as -1. Controls are
    distances from mistaken limits.
    """
    claims = []
    controls = []
    for alpha_a, of_alpha_a in data.items():
        sizes = settings["heads"][alpha_a]
        head_dim = settings["head_dim"][alpha_a]
        widest = f"D = {sizes[-1] * head_dim} (H = {sizes[-1]}, N = {head_dim})"
        distance = f"distance of the mean kernel of {settings['seeds']} models of {widest}"
        for index, alpha_l in enumerate(settings["alpha_l"]):
            pair = finite_kernels.name((float(alpha_a), alpha_l))
            description = f"{distance}, {pair}, from the recursion"
            products = of_alpha_a["products"][index]
            claims.append(finite_kernels.of_mean(description, products, tolerance=0.05))

            error = f"squared error of a model's kernel against H, N = {head_dim}, {pair}"
            squared = of_alpha_a["squared"][index]
            claims.append(exponent(error, sizes, squared, predicted=-1.0, tolerance=0.15))

            for name, wrong in CONTROLS.items():
                products = of_alpha_a["controls"][name][index]
                controls.append(
                    finite_kernels.of_mean(
                        f"{description} {wrong}", products, tolerance=0.05, control=True
                    )
                )
    return [*claims, *controls]


def draw(settings: Settings, data: Data) -> matplotlib.figure.Figure:
    """Draw squared errors against H, and kernels by layer with the recursion's.

    The recursion is drawn with and without attention to the encoder.
    """
    title = "Kernels of an encoder-decoder at initialization"
    figure, (left, *kernel_axes) = panels.row(1 + len(data), title)
    indices = range(len(settings["alpha_l"]))
    pairs = itertools.product(data, indices)
    for color, (alpha_a, index) in zip(panels.COLORS, pairs, strict=False):
        name = finite_kernels.title((float(alpha_a), settings["alpha_l"][index]))
        squared = data[alpha_a]["squared"][index]
        panels.power_law(left, settings["heads"][alpha_a], squared, name, color=color, predicted=-1)
    panels.label(
        left, "Dashed: slope −1", "heads H", "squared error over the limit's square", legend=True
    )
    for axes, (alpha_a, of_alpha_a) in zip(kernel_axes, data.items(), strict=True):
        for color, index in zip(panels.COLORS, indices, strict=False):
            # The second of the sums is the mean off the diagonal.
            by_layer = np.asarray(of_alpha_a["by_layer"][index])[:, 1]
            limit = np.asarray(of_alpha_a["limit"][index])[:, 1]
            without_cross = np.asarray(of_alpha_a["without"][index])[:, 1]
            name = rf"models, $\alpha_L$ = {settings['alpha_l'][index]:g}"
            axes.plot(by_layer, "o", color=color, markersize=5, label=name)
            axes.plot(limit, "--", color=color, linewidth=1.3, label="recursion")
            name = "recursion without the cross term"
            axes.plot(without_cross, ":", color=color, linewidth=1.3, label=name)
        title = rf"Mean off the diagonal, $\alpha_A$ = {alpha_a}"
        panels.label(axes, title, "block", r"$H^\ell$", legend=True)
    return figure


FIGURE = Figure(
    title="The residual kernels of an encoder-decoder",
    source="derived here",
    about="Inner products of the decoder's residual stream between positions, after the decoder's "
    "last block at initialization, in BART's layout with 2 + 2 blocks. A recursion for infinitely "
    "many heads (`scripts/figures/initialization/kernels.py`) predicts these products. Controls "
    "are recursions with a mistake.\n\n"
    "The recursion goes through the encoder, its norm, and a decoder of causal attention, "
    "attention to the encoder and MLP. The kernel is over all positions of two short texts "
    "(bytes with gaps, inputs padded to different lengths). Weights and forward pass are "
    "the zoo's, under `depth-mup`. Distances are root mean squares over all pairs of "
    "positions, relative to that of the recursion.",
    **settings_of(__name__),
    measure=measure,
    rows=rows,
    draw=draw,
)
