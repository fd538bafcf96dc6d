"""The models of the figures at initialization: the zoo's `bordelon-vit` and `bart-large` at small sizes, absolute presets, images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mupax.presets import Preset, get
from mupax.zoo import configs

if TYPE_CHECKING:
    from mupax.zoo.configs import EncoderDecoderConfig, ViTConfig


def vit(*, head_dim: int, heads: int, depth: int) -> ViTConfig:
    """The paper's ViT (LayerNorm without parameters, no biases, F = D, GELU, learned positions) on 8x8 images, 16 patches."""
    paper = configs.get("bordelon-vit")
    assert isinstance(paper, configs.ViTConfig)
    return replace(
        paper,
        width=head_dim * heads,
        num_heads=heads,
        depth=depth,
        image_size=8,
        patch_size=2,
        channels=1,
        norm_eps=1e-5,
        centered=False,
        compute=replace(paper.compute, layers="scan"),
    )


def encoder_decoder(
    *, head_dim: int, heads: int, depth: int, encoder_depth: int, seq_len: int, target_len: int
) -> EncoderDecoderConfig:
    """BART's layout (pre-norm, norms after both embeddings, learned positions, no biases and gains) on ASCII, F = D."""
    paper = configs.get("bart-large")
    assert isinstance(paper, configs.EncoderDecoderConfig)
    return replace(
        paper,
        width=head_dim * heads,
        num_heads=heads,
        depth=depth,
        encoder_depth=encoder_depth,
        mlp_ratio=1.0,
        vocab_size=128,
        seq_len=seq_len,
        target_len=target_len,
        compute=replace(paper.compute, layers="scan"),
    )


def absolute(*, alpha_a: float, alpha_l: float, beta0: float = 4.0) -> Preset:
    """`depth-mup` in the paper's absolute form."""
    return get("depth-mup", base=None, alpha_a=alpha_a, alpha_l=alpha_l, beta0=beta0)


def images(count: int) -> np.ndarray:
    """The first handwritten digits of scikit-learn, standardized over all of them, float32 [count, 8, 8, 1]."""
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    pixels = np.asarray(digits.images)
    return ((pixels[:count] - pixels.mean()) / pixels.std()).astype(np.float32)[..., None]


def at_initialization(
    config: configs.ModelConfig, look: Callable[[Any], Any]
) -> Callable[[int, Sequence[Preset]], list[Any]]:
    """A compiled program that starts a model and looks at it.

    Args:
        config: the model.
        look: model to a tree of arrays.

    Returns:
        (seed, presets) to what `look` sees under each preset, all with the same initial weights.

    Raises:
        ValueError: presets that do not start alike.
    """
    import jax

    from mupax.train.core import factors
    from mupax.zoo.definition import definition as define_model

    definition = define_model(config)

    @jax.jit
    def program(seed: Any, stds: Any, multipliers: Any, forwards: Any) -> Any:
        params = definition.initialize(seed, stds)
        return jax.lax.map(
            lambda forward: look(definition.model(params, multipliers, forward)), forwards
        )

    def run(seed: int, presets: Sequence[Preset]) -> list[Any]:
        resolved = [factors.resolve(preset, definition) for preset in presets]
        stds = [factors.init_stds(preset, definition) for preset in presets]
        for numbers in ([one.multiplier for one in resolved], stds):
            if any(
                not np.array_equal(one[name], numbers[0][name]) for one in numbers for name in one
            ):
                raise ValueError(
                    "these presets start from other weights; give each a call of its own"
                )
        forwards = jax.tree.map(
            lambda *numbers: np.stack(numbers), *(one.forward for one in resolved)
        )
        outputs = jax.device_get(
            program(np.uint32(seed), stds[0], resolved[0].multiplier, forwards)
        )
        return [
            jax.tree.map(lambda array, i=index: array[i], outputs) for index in range(len(presets))
        ]

    return run
