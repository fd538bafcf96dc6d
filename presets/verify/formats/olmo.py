"""YAML config of allenai/OLMo, which has no muP.

The values are those that its model.py initializes and its optimizer trains with. Standard
deviations by `init_fn`, for width D, L layers, and MLP size F (half of it under SwiGLU):

| parameter               | normal   | mitchell                         | full_megatron       |
|-------------------------|----------|----------------------------------|---------------------|
| embedding               | init_std | D^-1/2                           | init_std            |
| attention in, MLP in    | init_std | D^-1/2                           | init_std            |
| attention out           | init_std | D^-1/2 (2 (layer + 1))^-1/2      | init_std (2L)^-1/2  |
| MLP out                 | init_std | F^-1/2 (2 (layer + 1))^-1/2      | init_std (2L)^-1/2  |
| readout                 | init_std | D^-1/2                           | D^-1/2              |

`emb_init_std` replaces the std of the embedding, and `scale_emb_init` multiplies that of
full_megatron by D^1/2. Attention logits are multiplied by d^-1/2. With `scale_logits` the output
is multiplied by D^-1/2.
"""

from __future__ import annotations

import math
from typing import Any

from mupax.presets.roles import PresetError
from mupax.presets.verify.formats.decoder import Columns, Fields, ModelFile, Sizes, entries
from mupax.presets.verify.formats.dump import Dump

_MODEL_DEFAULTS = {
    "d_model": 768,
    "n_heads": 12,
    "n_layers": 12,
    "mlp_ratio": 4,
    "vocab_size": 50257,
    "embedding_size": 50304,
    "weight_tying": True,
    "init_fn": "normal",
    "init_std": 0.02,
    "scale_logits": False,
    "rope": False,
    "alibi": False,
    "max_sequence_length": 1024,
    "layer_norm_with_affine": True,
    "multi_query_attention": False,
    "scale_emb_init": False,
    "activation_type": "swiglu",
}
_OPTIMIZER_DEFAULTS = {
    "name": "lionw",
    "learning_rate": 1e-4,
    "weight_decay": 0.01,
    "eps": 1e-5,
    "decay_norm_and_bias": False,
    "decay_embeddings": False,
}
_OPTIMIZERS = {"adamw": "adamw", "lionw": "lion"}
"""Names of optimizers in `mupax.presets.optimizers.OPTIMIZERS`, by OLMo's names."""
_NAMES = {
    "token_embedding": "transformer.wte.weight",
    "block.qkv": "transformer.blocks.*.att_proj.weight",
    "block.attention_out": "transformer.blocks.*.attn_out.weight",
    "block.mlp_in": "transformer.blocks.*.ff_proj.weight",
    "block.mlp_out": "transformer.blocks.*.ff_out.weight",
}


def fits(contents: Any) -> bool:
    """Return whether the contents of a YAML file are a config of OLMo."""
    if not isinstance(contents, dict):
        return False
    model = contents.get("model")
    return isinstance(model, dict) and "d_model" in model


class Config(ModelFile):
    """Model that a YAML config of OLMo describes.

    Args:
        contents: Contents of the YAML file, for which `fits` is true.
        source: Name of the file, for messages and `Dump.source`.

    Raises:
        PresetError: A size is no whole number of at least 1, or `init_fn` cannot be read.
    """

    def __init__(self, contents: Any, source: str) -> None:
        model = Fields(contents["model"], source, _MODEL_DEFAULTS)
        self._model = model
        self._settings = Fields(contents.get("optimizer") or {}, source, _OPTIMIZER_DEFAULTS)

        width = model.count("d_model")
        heads = model.count("n_heads")
        if "mlp_hidden_size" in model:
            mlp = model.count("mlp_hidden_size")
        else:
            mlp = round(model.number("mlp_ratio") * width)
        if model.flag("multi_query_attention"):
            kv_heads = 1
        else:
            kv_heads = model.count_or("n_kv_heads", heads)
        self._sizes = Sizes(
            width=width,
            mlp=mlp,
            layers=model.count("n_layers"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=width // heads,
            vocab=model.count("embedding_size"),
            positions=model.count("max_sequence_length"),
        )
        init_fn = model.get("init_fn")
        if init_fn not in ("normal", "mitchell", "full_megatron"):
            raise PresetError(
                f"{source}: init_fn {init_fn!r} is not read; normal, mitchell and full_megatron are"
            )

    def dump(self) -> Dump:
        model = self._model
        sizes = self._sizes
        name = self._settings.get("name")
        optimizer = _OPTIMIZERS.get(str(name))
        if optimizer is None:
            raise PresetError(
                f"{model.source}: the optimizer {name!r} is not read; adamw and lionw are"
            )

        stds = self._stds()
        output = 1.0
        if model.flag("scale_logits"):
            output = sizes.width**-0.5
        tied = model.flag("weight_tying")
        names = self._parameter_names(tied)
        columns = {role: self._columns(role, stds.get(role), output, optimizer) for role in names}
        return Dump(
            source=model.source,
            parameters=entries(sizes, names, columns),
            optimizer=optimizer,
            decay="coupled",
            head_dim=sizes.head_dim,
            layers=sizes.layers,
            attention=sizes.head_dim**-0.5,
            branch=1.0,
            readout=output if tied else None,
        )

    def _parameter_names(self, tied: bool) -> dict[str, str]:
        """Return parameter names by role, for the parameters that this model has."""
        model = self._model
        names = dict(_NAMES)
        if not tied:
            names["readout"] = "transformer.ff_out.weight"
        if not (model.flag("rope") or model.flag("alibi")):
            names["position"] = "transformer.wpe.weight"
        if model.flag("layer_norm_with_affine"):
            names["block.norm_gain"] = "transformer.blocks.*.attn_norm.weight"
            names["norm_gain"] = "transformer.ln_f.weight"
        return names

    def _columns(self, role: str, std: float | None, output: float, optimizer: str) -> Columns:
        """Return std, learning rate, weight decay, eps and multiplier of the role's parameter.

        Args:
            role: Key of `_parameter_names`.
            std: Initial standard deviation. `None` for gains.
            output: Factor on the logits. Only the role "readout" uses it.
            optimizer: Name of `mupax.presets.optimizers.OPTIMIZERS`.
        """
        settings = self._settings
        decays = True
        if "norm" in role:
            decays = settings.flag("decay_norm_and_bias")
        elif role in ("token_embedding", "position"):
            decays = settings.flag("decay_embeddings")
        lr = settings.number("learning_rate")
        weight_decay = 0.0
        if decays:
            weight_decay = settings.number("weight_decay")
        # Lion has no eps.
        eps = None
        if optimizer == "adamw":
            eps = settings.number("eps")
        multiplier = 1.0
        if role == "readout":
            multiplier = output
        return {
            "std": std,
            "lr": lr,
            "wd": weight_decay,
            "eps": eps,
            "multiplier": multiplier,
        }

    def _stds(self) -> dict[str, float]:
        """Return initial standard deviations by role, as OLMo's `init_fn` draws them."""
        model = self._model
        sizes = self._sizes
        init_fn = model.get("init_fn")
        std = model.number("init_std")
        # 0 counts as not given.
        embedding_std = 0.0
        if "emb_init_std" in model:
            embedding_std = model.number("emb_init_std")

        if init_fn == "normal":
            stds = dict.fromkeys([*_NAMES, "position", "readout"], std)
            stds["token_embedding"] = embedding_std or std
            return stds

        if init_fn == "full_megatron":
            branch_output = std * (2 * sizes.layers) ** -0.5
            scaled = std * sizes.width**0.5 if model.flag("scale_emb_init") else std
            stds = dict.fromkeys([*_NAMES, "position"], std)
            stds["block.attention_out"] = branch_output
            stds["block.mlp_out"] = branch_output
            stds["readout"] = sizes.width**-0.5
            stds["token_embedding"] = embedding_std or scaled
            return stds

        # The remaining value of init_fn is "mitchell".
        by_width: float = sizes.width**-0.5
        # A dump has one std for all layers: the geometric mean of (2 (layer + 1))^-1/2.
        logs = math.fsum(math.log(2 * (layer + 1)) for layer in range(sizes.layers))
        by_depth = math.exp(-0.5 * logs / sizes.layers)
        # SwiGLU multiplies two halves of the MLP's hidden layer with one another.
        fan_in = sizes.mlp / 2 if model.get("activation_type") == "swiglu" else sizes.mlp
        stds = dict.fromkeys([*_NAMES, "position", "readout"], by_width)
        stds["block.attention_out"] = by_width * by_depth
        stds["block.mlp_out"] = fan_in**-0.5 * by_depth
        stds["token_embedding"] = embedding_std or by_width
        return stds
