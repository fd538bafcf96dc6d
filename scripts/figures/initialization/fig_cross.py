"""The residual kernels of an encoder-decoder at initialization, against the recursion with attention to the encoder."""

from __future__ import annotations

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
"""Mistakes in the recursion."""


class Text(NamedTuple):
    """Two texts with gaps, and what was there: int32 [2, S] and [2, T]."""

    inputs: np.ndarray
    input_mask: np.ndarray
    decoder_inputs: np.ndarray


def text() -> Text:
    """Bytes; the inputs end in padding of different lengths."""
    gaps, whole = ("be _ to be\0\0", "to _\0\0\0\0\0\0\0\0"), ("<be not to be", "<to be or not")
    inputs, decoder_inputs = (
        np.array([list(one.encode()) for one in texts], np.int32) for texts in (gaps, whole)
    )
    return Text(inputs, (inputs > 0).astype(np.int32), decoder_inputs)


def recursion(
    settings: Settings, alpha_a: float, alpha_l: float, head_dim: int, wrong: str = ""
) -> np.ndarray:
    """Kernels of the decoder's stream by layer, [L + 1, M, M] with M the positions of both texts; the last with the encoder's first.

    Args:
        settings: of the figure.
        alpha_a: exponent of the logits' scale.
        alpha_l: of the branches.
        head_dim: N.
        wrong: of `CONTROLS`; none unless given.
    """
    of, rule = text(), {"alpha_a": alpha_a, "alpha_l": alpha_l, "head_dim": head_dim}
    rule |= {"beta0": settings["beta0"], "samples": settings["samples"], "activation": "gelu_exact"}
    mask = of.input_mask > 0
    first = [
        kernels.normalized(kernels.token_kernel(tokens))
        for tokens in (of.inputs, of.decoder_inputs)
    ]
    encoder = kernels.residual_kernels(
        first[0], depth=settings["encoder_depth"], mask=mask[:, None], **rule
    )
    memory = (
        None if wrong == "cross" else kernels.Memory(kernels.normalized(encoder.layers[-1]), mask)
    )
    causal = None if wrong == "causal" else np.tri(of.decoder_inputs.shape[1], dtype=bool)
    decoder = kernels.residual_kernels(
        first[1], depth=settings["depth"], mask=causal, memory=memory, seed=1, **rule
    )
    return decoder.layers.reshape(len(decoder.layers), of.decoder_inputs.size, -1)


def finite(settings: Settings, alpha_a: float, head_dim: int, heads: int) -> np.ndarray:
    """The same of models, h.h'/D, at every alpha_l of the settings: [alphas, seeds, L + 1, M, M]."""
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
    presets = [
        models.absolute(alpha_a=alpha_a, alpha_l=one, beta0=settings["beta0"])
        for one in settings["alpha_l"]
    ]
    return np.stack(
        [np.stack(program(seed, presets)) for seed in range(settings["seeds"])], axis=1
    ).astype(np.float64)


def measure(settings: Settings, work: Path) -> dict[str, Any]:
    """Per alpha_A squared errors [alpha_l, H, seeds], and of the widest the products [alpha_l, seeds, seeds], against mistakes too."""
    del work
    by_alpha_a: dict[str, Any] = {}
    for alpha_a, sizes in settings["heads"].items():
        rule = {"alpha_a": float(alpha_a), "head_dim": settings["head_dim"][alpha_a]}
        limits = {
            wrong: np.stack(
                [
                    recursion(settings, alpha_l=one, wrong=wrong, **rule)
                    for one in settings["alpha_l"]
                ]
            )
            for wrong in ("", *CONTROLS)
        }
        squared, widest = [], np.array([])
        for heads in sizes:
            widest = finite(settings, heads=heads, **rule)
            squared.append(finite_kernels.squared(finite_kernels.products(widest, limits[""])))
        by_alpha_a[alpha_a] = {
            "squared": np.stack(squared, axis=1),
            "products": finite_kernels.products(widest, limits[""]),
            "controls": {
                wrong: finite_kernels.products(widest, limits[wrong]) for wrong in CONTROLS
            },
            "by_layer": finite_kernels.sums(widest.mean(axis=1)),
            "limit": finite_kernels.sums(limits[""]),
            "without": finite_kernels.sums(limits["cross"]),
        }
    return by_alpha_a


def rows(settings: Settings, data: Data) -> list[Row]:
    """Distances of the mean kernel of all models, slopes in H, and distances from mistaken recursions."""
    claims, controls = [], []
    for alpha_a, of in data.items():
        sizes, head_dim = settings["heads"][alpha_a], settings["head_dim"][alpha_a]
        widest = f"D = {sizes[-1] * head_dim} (H = {sizes[-1]}, N = {head_dim})"
        for index, alpha_l in enumerate(settings["alpha_l"]):
            ends = finite_kernels.name((float(alpha_a), alpha_l))
            apart = f"distance of the mean kernel of {settings['seeds']} models of {widest}, {ends}, from the recursion"
            claims.append(finite_kernels.of_mean(apart, of["products"][index], tolerance=0.05))
            error = f"squared error of a model's kernel against H, N = {head_dim}, {ends}"
            claims.append(
                exponent(error, sizes, of["squared"][index], predicted=-1.0, tolerance=0.15)
            )
            controls += [
                finite_kernels.of_mean(
                    f"{apart} {wrong}", of["controls"][name][index], tolerance=0.05, control=True
                )
                for name, wrong in CONTROLS.items()
            ]
    return [*claims, *controls]


def draw(settings: Settings, data: Data) -> matplotlib.figure.Figure:
    """Squared error against H, and the kernel by layer beside the recursion with and without the cross term."""
    figure, (left, *kernel_axes) = panels.row(
        1 + len(data), "Kernels of an encoder-decoder at initialization"
    )
    pairs = [(alpha_a, index) for alpha_a in data for index in range(len(settings["alpha_l"]))]
    for color, (alpha_a, index) in zip(panels.COLORS, pairs, strict=False):
        name = finite_kernels.title((float(alpha_a), settings["alpha_l"][index]))
        panels.power_law(
            left,
            settings["heads"][alpha_a],
            data[alpha_a]["squared"][index],
            name,
            color=color,
            predicted=-1,
        )
    panels.label(
        left, "Dashed: slope −1", "heads H", "squared error over the limit's square", legend=True
    )
    for axes, (alpha_a, of) in zip(kernel_axes, data.items(), strict=True):
        for color, index in zip(panels.COLORS, range(len(settings["alpha_l"])), strict=False):
            by_layer, limit, without = (
                np.asarray(of[name][index])[:, 1] for name in ("by_layer", "limit", "without")
            )
            axes.plot(
                by_layer,
                "o",
                color=color,
                markersize=5,
                label=rf"models, $\alpha_L$ = {settings['alpha_l'][index]:g}",
            )
            axes.plot(limit, "--", color=color, linewidth=1.3, label="recursion")
            axes.plot(
                without, ":", color=color, linewidth=1.3, label="recursion without the cross term"
            )
        panels.label(
            axes,
            rf"Mean off the diagonal, $\alpha_A$ = {alpha_a}",
            "block",
            r"$H^\ell$",
            legend=True,
        )
    return figure


FIGURE = Figure(
    title="The residual kernels of an encoder-decoder",
    source="the kernel recursion with attention to an encoder, derived here",
    about="The kernel h.h'/D of the decoder's residual stream after the last block of BART's layout "
    "with few blocks, against the recursion of `scripts/figures/initialization/kernels.py` at "
    "this N. The recursion goes through the encoder, its norm, and a decoder of causal "
    "attention, attention to the encoder and MLP. The kernel is over all positions of two short "
    "texts (bytes with gaps, inputs padded to different lengths). Weights and forward pass are "
    "the zoo's, under `depth-mup`. Distances are root mean squares over all pairs of positions, "
    "relative to that of the recursion.",
    **settings_of(__name__),
    measure=measure,
    rows=rows,
    draw=draw,
)  # fmt: skip
