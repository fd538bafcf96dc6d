"""The MLP branch: one hidden layer, plain or gated (SwiGLU). B batch, T positions, D width, F hidden."""

from __future__ import annotations

import jax
from flax import nnx

from presets.roles import Role
from zoo import partition
from zoo.configs import StackConfig
from zoo.layers import project
from zoo.param import Init


class MLP(nnx.Module):
    """W_out act(W_in x), or W_out (silu(W_gate x) * W_up x). Gate and up are both MLP-in with fan-in embed."""

    def __init__(self, config: StackConfig, init: Init) -> None:
        self.activation = config.activation
        self.up = init.param(Role.MLP_IN, ("embed", "mlp"), fan_in=("embed",))
        self.gate = init.param(Role.MLP_IN, ("embed", "mlp"), fan_in=("embed",)) if config.gated else None
        self.down = init.param(Role.MLP_OUT, ("mlp", "embed"), fan_in=("mlp",))
        self.up_bias = init.param(Role.BIAS, ("mlp",), of=Role.MLP_IN) if config.bias else None
        self.gate_bias = init.param(Role.BIAS, ("mlp",), of=Role.MLP_IN) if config.bias and config.gated else None
        self.down_bias = init.param(Role.BIAS, ("embed",), of=Role.MLP_OUT) if config.bias else None

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        h_BTF = project(x_BTD, self.up[...])
        if self.up_bias is not None:
            h_BTF = h_BTF + self.up_bias[...].astype(h_BTF.dtype)
        if self.gate is not None:
            g_BTF = project(x_BTD, self.gate[...])
            if self.gate_bias is not None:
                g_BTF = g_BTF + self.gate_bias[...].astype(g_BTF.dtype)
            h_BTF = jax.nn.silu(g_BTF) * h_BTF
        else:
            exact = self.activation == "gelu_exact"
            h_BTF = jax.nn.relu(h_BTF) if self.activation == "relu" else jax.nn.gelu(h_BTF, approximate=not exact)
        h_BTF = partition.constrain(h_BTF, "batch", "sequence", "mlp")
        y_BTD = project(h_BTF, self.down[...])
        return y_BTD if self.down_bias is None else y_BTD + self.down_bias[...].astype(y_BTD.dtype)
