"""A model family in one file, an MLP-Mixer (Tolstikhin et al. 2021): `python -m examples.mlp_mixer` trains one on the digits.

B batch, P patches, D width, S hidden units of the mix over patches, F those of the MLP. Nothing else in the project knows of it.
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
    """An MLP over patches and one over channels in every block, each after an RMS norm without gain."""

    width: int
    """Channels D."""
    depth: int
    """Blocks L."""
    mixing: int = 32
    """Hidden units S of the MLP over patches; it stays as it is when the model grows."""
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
            # Every channel has the same MLP over patches, so that its gradients are sums over the width.
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
        return self.width if spec.role is Role.HIDDEN else super().applications(spec)

    def module(self, rngs: nnx.Rngs) -> Mixer:
        return Mixer(self, rngs)


class Block(nnx.Module):
    """h <- skip*h + branch*mlp(norm(h)), over patches and then over channels."""

    def __init__(self, init: Init) -> None:
        self.norm = Norm("rmsnorm", init.scope("norm"), 1e-5)
        self.mix, self.unmix = init.param("mix"), init.param("unmix")
        self.up, self.down = init.param("up"), init.param("down")
        self.skip, self.branch = init.factor("skip"), init.factor("branch")

    def __call__(self, h_BPD: jax.Array) -> jax.Array:
        skip, branch = self.skip[...].astype(h_BPD.dtype), self.branch[...].astype(h_BPD.dtype)
        mixed_BDS = jax.nn.gelu(project(self.norm(h_BPD).swapaxes(1, 2), self.mix[...]))
        h_BPD = skip[0] * h_BPD + branch[0] * project(mixed_BDS, self.unmix[...]).swapaxes(1, 2)
        hidden_BPF = jax.nn.gelu(project(self.norm(h_BPD), self.up[...]))
        return skip[1] * h_BPD + branch[1] * project(hidden_BPF, self.down[...])


class Mixer(nnx.Module):
    """Images [B, size, size, channels] to float32 logits [B, classes]."""

    def __init__(self, config: MixerConfig, rngs: nnx.Rngs) -> None:
        self.config = config
        init = Init(config, rngs)
        self.patch, self.readout = init.param("patch"), init.param("readout")
        self.block, self.norm = (
            Block(init.scope("block")),
            Norm("rmsnorm", init.scope("norm"), 1e-5),
        )

    def embed(self, images_BHWC: jax.Array) -> jax.Array:
        """Images to the residual stream's first layer, [B, P, D]."""
        batch, size, _, channels = images_BHWC.shape
        side, grid = self.config.patch_size, size // self.config.patch_size
        patches = images_BHWC.reshape(batch, grid, side, grid, side, channels).swapaxes(2, 3)
        patches_BPI = patches.reshape(batch, grid * grid, -1).astype(self.config.compute.dtype)
        return project(patches_BPI, self.patch[...])

    def read(self, h_BPD: jax.Array) -> jax.Array:
        """The residual stream's last layer to float32 logits [B, classes]."""
        return project(jnp.mean(self.norm(h_BPD), axis=1), self.readout[...], out_dtype=jnp.float32)

    def __call__(self, images_BHWC: jax.Array) -> jax.Array:
        depth, compute = self.config.depth, self.config.compute
        return self.read(residual_stack(self.block, self.embed(images_BHWC), depth, compute))


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
