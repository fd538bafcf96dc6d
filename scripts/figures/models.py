"""Models, presets and images of the figures at initialization.

The models are the zoo's `bordelon-vit` and `bart-large` at small sizes, under absolute presets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mupax.presets import Preset, get
from mupax.zoo import configs

if TYPE_CHECKING:
    from mupax.zoo.configs import EncoderDecoderConfig, ViTConfig


def vit(*, head_dim: int, heads: int, depth: int) -> ViTConfig:
    """Return the configuration of the paper's ViT on 8x8 images with 16 patches.

    The ViT has LayerNorm without parameters, no biases, an MLP as wide as the stream, GELU and
    learned positions. The output is not centred.
    """
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
        # A loop compiles as fast at any depth.
        compute=replace(paper.compute, layers="scan"),
    )


def encoder_decoder(
    *, head_dim: int, heads: int, depth: int, encoder_depth: int, seq_len: int, target_len: int
) -> EncoderDecoderConfig:
    """Return the configuration of an encoder-decoder in BART's layout on ASCII text.

    The layout is pre-norm with norms after both embeddings, learned positions, no biases and gains,
    and an MLP as wide as the stream.
    """
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
    """Return `depth-mup` in the paper's absolute form, which has no base."""
    return get("depth-mup", base=None, alpha_a=alpha_a, alpha_l=alpha_l, beta0=beta0)


def images(count: int) -> np.ndarray:
    """Return the first handwritten digits of scikit-learn, float32 [count, 8, 8, 1].

    Pixels are standardized by the mean and standard deviation of all digits.
    """
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    pixels = np.asarray(digits.images)
    return ((pixels[:count] - pixels.mean()) / pixels.std()).astype(np.float32)[..., None]


def at_initialization(
    config: configs.ModelConfig, look: Callable[[Any], Any]
) -> Callable[[int, Sequence[Preset]], list[Any]]:
    """Return a function that initializes a model and observes it under several presets.

    The function is compiled once for all seeds and presets.

    Args:
        look: Function that observes: from a model to a pytree of arrays.

    Returns:
        Function from a seed and presets to the list of what `look` returns under each preset. All
        presets get the same initial weights. The function raises `ValueError` for presets whose
        initial weights differ.
    """
    import jax

    from mupax.train.core import factors
    from mupax.zoo.definition import definition as define_model

    definition = define_model(config)

    @jax.jit
    def program(seed: Any, stds: Any, multipliers: Any, forwards: Any) -> Any:
        # Under jit, because eager initialization differs in bits on some versions of JAX.
        params = definition.initialize(seed, stds)
        # On a CPU, presets one after the other are faster than vmapped ones.
        return jax.lax.map(
            lambda forward: look(definition.model(params, multipliers, forward)), forwards
        )

    def run(seed: int, presets: Sequence[Preset]) -> list[Any]:
        resolved = [factors.resolve(preset, definition) for preset in presets]
        stds = [factors.init_stds(preset, definition) for preset in presets]
        multipliers = [values.multiplier for values in resolved]
        for values_by_preset in (multipliers, stds):
            if not all(_equal(values, values_by_preset[0]) for values in values_by_preset):
                raise ValueError(
                    "these presets have different initial weights; call the program once for each"
                )
        forwards = jax.tree.map(
            lambda *values: np.stack(values), *(values.forward for values in resolved)
        )
        outputs = jax.device_get(program(np.uint32(seed), stds[0], multipliers[0], forwards))
        outputs_by_preset = []
        for index in range(len(presets)):
            outputs_by_preset.append(jax.tree.map(lambda array, i=index: array[i], outputs))
        return outputs_by_preset

    return run


def _equal(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    """Return whether two mappings with the same keys have equal arrays."""
    return all(np.array_equal(left[name], right[name]) for name in left)
