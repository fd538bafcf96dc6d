"""MLP-Mixer (Tolstikhin et al. 2021), a model family in one file: `python -m examples.mlp_mixer`.

The command trains a mixer on the digits. No other file of the project knows of it. Shapes: B batch,
P patches, D width, S hidden units of the MLP over patches, F hidden units of the MLP over channels,
I values of a patch.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from mupax.presets.roles import FactorSpec, ParamSpec, Role, block_matrix
from mupax.zoo.definition import Init
from mupax.zoo.families import ImageModel
from mupax.zoo.layers.linear import Norm, project
from mupax.zoo.layers.stack import residual_stack


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixerConfig(ImageModel):
    """Mixer whose blocks have an MLP over patches and one over channels, each after an RMS norm."""

    width: int
    """Number of channels D."""
    depth: int
    """Number of blocks."""
    mixing: int = 32
    """Hidden units S of the MLP over patches, which do not grow with the model."""
    mlp_ratio: int = 4
    """Hidden units F of the MLP over channels, in widths."""

    def base_sizes(self) -> dict[str, int]:
        return {"embed": self.width, "mlp": self.mlp_ratio * self.width, "layers": self.depth}

    def sizes(self) -> dict[str, int]:
        return {**super().sizes(), "output": self.mixing}

    def parameters(self) -> dict[str, ParamSpec]:
        return {
            "patch": ParamSpec(
                role=Role.PATCH_EMBEDDING, axes=("patch", "embed"), fan_in=("patch",)
            ),
            # All channels share one MLP over patches, so that its gradients sum over the width.
            "block.mix": block_matrix(
                Role.HIDDEN, ("position", "output"), ("position",), shared=("embed",)
            ),
            "block.unmix": block_matrix(
                Role.HIDDEN, ("output", "position"), ("output",), shared=("embed",)
            ),
            "block.up": block_matrix(Role.MLP_IN, ("embed", "mlp"), ("embed",)),
            "block.down": block_matrix(Role.MLP_OUT, ("mlp", "embed"), ("mlp",)),
            "readout": ParamSpec(role=Role.READOUT, axes=("embed", "classes"), fan_in=("embed",)),
        }

    def factors(self) -> dict[str, FactorSpec]:
        kinds = ("skip", "branch")
        return {f"block.{kind}": FactorSpec(kind=kind, shape=(self.depth, 2)) for kind in kinds}

    def applications(self, spec: ParamSpec) -> float:
        # The MLP over patches is applied to every channel.
        if spec.role is Role.HIDDEN:
            return self.width
        return super().applications(spec)

    def module(self, rngs: nnx.Rngs) -> Mixer:
        return Mixer(self, rngs)


class Block(nnx.Module):
    """Block of h <- skip*h + branch*mlp(norm(h)), first over patches and then over channels."""

    def __init__(self, init: Init) -> None:
        self.norm = Norm("rmsnorm", init.scope("norm"), 1e-5)
        self.mix = init.param("mix")
        self.unmix = init.param("unmix")
        self.up = init.param("up")
        self.down = init.param("down")
        self.skip = init.factor("skip")
        self.branch = init.factor("branch")

    def __call__(self, h_BPD: jax.Array) -> jax.Array:
        skip = self.skip[...].astype(h_BPD.dtype)
        branch = self.branch[...].astype(h_BPD.dtype)
        mixed_BDS = jax.nn.gelu(project(self.norm(h_BPD).swapaxes(1, 2), self.mix[...]))
        h_BPD = skip[0] * h_BPD + branch[0] * project(mixed_BDS, self.unmix[...]).swapaxes(1, 2)
        hidden_BPF = jax.nn.gelu(project(self.norm(h_BPD), self.up[...]))
        return skip[1] * h_BPD + branch[1] * project(hidden_BPF, self.down[...])


class Mixer(nnx.Module):
    """Mixer from images [B, size, size, channels] to float32 logits [B, classes]."""

    def __init__(self, config: MixerConfig, rngs: nnx.Rngs) -> None:
        self.config = config
        init = Init(config, rngs)
        self.patch = init.param("patch")
        self.readout = init.param("readout")
        self.block = Block(init.scope("block"))
        self.norm = Norm("rmsnorm", init.scope("norm"), 1e-5)

    def embed(self, images_BHWC: jax.Array) -> jax.Array:
        """Return the input of the first block, [B, P, D]: every patch through one matrix."""
        batch, size, _, channels = images_BHWC.shape
        side = self.config.patch_size
        grid = size // side
        patches = images_BHWC.reshape(batch, grid, side, grid, side, channels).swapaxes(2, 3)
        patches_BPI = patches.reshape(batch, grid * grid, -1).astype(self.config.compute.dtype)
        return project(patches_BPI, self.patch[...])

    def read(self, h_BPD: jax.Array) -> jax.Array:
        """Return float32 logits [B, classes] of the last block's output."""
        mean_BD = jnp.mean(self.norm(h_BPD), axis=1)
        return project(mean_BD, self.readout[...], out_dtype=jnp.float32)

    def __call__(self, images_BHWC: jax.Array) -> jax.Array:
        h_BPD = self.embed(images_BHWC)
        h_BPD = residual_stack(self.block, h_BPD, self.config.depth, self.config.compute)
        return self.read(h_BPD)


MIXER = MixerConfig(width=64, depth=4, image_size=8, patch_size=2, channels=1, num_classes=10)

if __name__ == "__main__":
    import sys

    from examples import mlp_mixer
    from mupax.train.config.recipes import RECIPES
    from mupax.train.config.run import PresetConfig
    from mupax.train.run import loop

    preset = PresetConfig(name="mup", base="embed=32,mlp=128,layers=2")
    config = dataclasses.replace(
        RECIPES["vit-digits"](), recipe="mlp-mixer", model=mlp_mixer.MIXER, preset=preset
    )
    sys.exit(loop.run(config.resolved()))
