"""A model from outside the zoo, an MLP-Mixer, under muP, and its coordinate check: `python docs/howto/mixer.py`."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mupax import presets, train, zoo
from mupax.presets import ParamSpec, Role
from mupax.train.studies.check import check

POSITIONS, PATCH, CLASSES, DEPTH = 16, 12, 10, 2


def weight(role, sizes, *axes, block=True, shared=()):
    spec = ParamSpec(role=role, axes=axes, fan_in=axes[:1], in_block=block, shared=shared)
    return nnx.Param(jnp.zeros([sizes[axis] for axis in axes]), spec=spec)


def normed(x):
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)


class Mixer(nnx.Module):
    def __init__(self, width):
        sizes = {
            "embed": width,
            "mlp": 2 * width,
            "position": POSITIONS,
            "output": POSITIONS,
            "patch": PATCH,
            "classes": CLASSES,
        }
        self.read = weight(Role.PATCH_EMBEDDING, sizes, "patch", "embed", block=False)
        # All channels have one matrix over patches, whose gradient is a sum over them: it is shared along embed.
        mix = [
            weight(Role.HIDDEN, sizes, "position", "output", shared=("embed",))
            for _ in range(DEPTH)
        ]
        self.mix = nnx.List(mix)
        self.up = nnx.List([weight(Role.MLP_IN, sizes, "embed", "mlp") for _ in range(DEPTH)])
        self.down = nnx.List([weight(Role.MLP_OUT, sizes, "mlp", "embed") for _ in range(DEPTH)])
        self.out = weight(Role.READOUT, sizes, "embed", "classes", block=False)

    def __call__(self, x):
        h = x @ self.read[...]
        for mix, up, down in zip(self.mix, self.up, self.down, strict=True):
            h = h + jnp.einsum("bpd,pq->bqd", normed(h), mix[...])
            h = h + jax.nn.relu(normed(h) @ up[...]) @ down[...]
        return normed(h).mean(axis=1) @ self.out[...]


def main() -> bool:
    rng = np.random.default_rng(0)
    images, labels = (
        rng.standard_normal((32, POSITIONS, PATCH)).astype(np.float32),
        rng.integers(0, CLASSES, 32),
    )
    batch = {
        "inputs": images,
        "targets": labels.astype(np.int32),
        "weights": np.ones(32, np.float32),
    }
    models = [zoo.define(lambda width=width: Mixer(width)) for width in (64, 128, 256)]
    mup = presets.get("mup", base={"embed": 64, "mlp": 128})
    adam = train.OptimizerConfig(name="adam", peak_lr=2e-3, schedule="constant", eps=1e-12)
    findings = check.study(models, mup, adam, batch)
    print(check.text(findings))
    return check.passes(findings)


if __name__ == "__main__":
    raise SystemExit(0 if main() else 1)
