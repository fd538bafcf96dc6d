"""A YAML of allenai/OLMo, which has no muP: what its model.py initializes and its optimizer trains with.

`init_fn`: normal has init_std everywhere; mitchell width^-1/2 (MLP out F^-1/2) and (2 (layer + 1))^-1/2 on what a branch writes; full_megatron
init_std, (2L)^-1/2 on what a branch writes, width^-1/2 for the output layer. Logits by 1/sqrt(d); `scale_logits` is width^-1/2 on the output.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mupax.presets.roles import PresetError
from mupax.presets.verify.formats.decoder import Fields, Reading, Sizes, entries
from mupax.presets.verify.formats.dump import Dump

_MODEL = {
    "d_model": 768, "n_heads": 12, "n_layers": 12, "mlp_ratio": 4, "vocab_size": 50257, "embedding_size": 50304, "weight_tying": True,
    "init_fn": "normal", "init_std": 0.02, "scale_logits": False, "rope": False, "alibi": False, "max_sequence_length": 1024,
    "layer_norm_with_affine": True, "multi_query_attention": False, "scale_emb_init": False, "activation_type": "swiglu",
}  # fmt: skip
_OPTIMIZER = {
    "name": "lionw",
    "learning_rate": 1e-4,
    "weight_decay": 0.01,
    "eps": 1e-5,
    "decay_norm_and_bias": False,
    "decay_embeddings": False,
}
_NAMES = {
    "token_embedding": "transformer.wte.weight",
    "block.qkv": "transformer.blocks.*.att_proj.weight",
    "block.attention_out": "transformer.blocks.*.attn_out.weight",
    "block.mlp_in": "transformer.blocks.*.ff_proj.weight",
    "block.mlp_out": "transformer.blocks.*.ff_out.weight",
}


def fits(contents: Any) -> bool:
    """Whether a YAML's contents are a config of OLMo."""
    return (
        isinstance(contents, dict)
        and isinstance(contents.get("model"), dict)
        and "d_model" in contents["model"]
    )


class Config(Reading):
    """A config.

    Args:
        contents: of the YAML.
        source: the file.
    """

    def __init__(self, contents: Any, source: str) -> None:
        self._model = Fields(contents["model"], source, _MODEL)
        self._rates = Fields(contents.get("optimizer") or {}, source, _OPTIMIZER)
        f = self._model
        width, heads = f.count("d_model"), f.count("n_heads")
        hidden = (
            f.count("mlp_hidden_size")
            if "mlp_hidden_size" in f
            else round(f.number("mlp_ratio") * width)
        )
        kv_heads = (
            1
            if f.flag("multi_query_attention")
            else f.count("n_kv_heads")
            if "n_kv_heads" in f
            else heads
        )
        self._sizes = Sizes(
            width=width, mlp=hidden, layers=f.count("n_layers"), heads=heads, kv_heads=kv_heads, head_dim=width // heads,
            vocab=f.count("embedding_size"), positions=f.count("max_sequence_length"),
        )  # fmt: skip
        if f.get("init_fn") not in ("normal", "mitchell", "full_megatron"):
            raise PresetError(
                f"{source}: init_fn {f.get('init_fn')!r} is not read; normal, mitchell and full_megatron are"
            )

    def dump(self) -> Dump:
        f, r, sizes = self._model, self._rates, self._sizes
        optimizer = {"adamw": "adamw", "lionw": "lion"}.get(str(r.get("name")))
        if optimizer is None:
            raise PresetError(
                f"{f.source}: the optimizer {r.get('name')!r} is not read; adamw and lionw are"
            )
        stds, layered = self._stds(), sizes.layers

        def rule(role: str) -> Mapping[str, float | None]:
            vector, table = "norm" in role, role in ("token_embedding", "position")
            decays = (
                r.flag("decay_norm_and_bias")
                if vector
                else r.flag("decay_embeddings")
                if table
                else True
            )
            return {
                "std": stds.get(role),
                "lr": r.number("learning_rate"),
                "wd": r.number("weight_decay") if decays else 0.0,
                "eps": r.number("eps") if optimizer == "adamw" else None,
                "multiplier": output if role == "readout" else 1.0,
            }

        output = sizes.width**-0.5 if f.flag("scale_logits") else 1.0
        tied = f.flag("weight_tying")
        names = {**_NAMES, **({} if tied else {"readout": "transformer.ff_out.weight"})}
        if not (f.flag("rope") or f.flag("alibi")):
            names["position"] = "transformer.wpe.weight"
        if f.flag("layer_norm_with_affine"):
            names |= {
                "block.norm_gain": "transformer.blocks.*.attn_norm.weight",
                "norm_gain": "transformer.ln_f.weight",
            }
        return Dump(
            source=f.source, parameters=entries(sizes, names, rule), optimizer=optimizer, decay="coupled", head_dim=sizes.head_dim,
            layers=layered, attention=sizes.head_dim**-0.5, branch=1.0, readout=output if tied else None,
        )  # fmt: skip

    def _stds(self) -> dict[str, float]:
        f, s = self._model, self._sizes
        kind, std = f.get("init_fn"), f.number("init_std")
        table: float = f.number("emb_init_std") if "emb_init_std" in f else 0.0
        if kind == "normal":
            return {
                **dict.fromkeys([*_NAMES, "position", "readout"], std),
                "token_embedding": table or std,
            }
        if kind == "full_megatron":
            deep = std * (2 * s.layers) ** -0.5
            wide = std * s.width**0.5 if f.flag("scale_emb_init") else std
            stds = {
                "block.attention_out": deep,
                "block.mlp_out": deep,
                "readout": s.width**-0.5,
                "token_embedding": table or wide,
            }
            return {**dict.fromkeys([*_NAMES, "position"], std), **stds}
        root: float = s.width**-0.5
        # The geometric mean over layers of (2 (layer + 1))^-1/2.
        deep = math.exp(-0.5 * math.fsum(math.log(2 * (i + 1)) for i in range(s.layers)) / s.layers)
        fan_in = s.mlp / 2 if f.get("activation_type") == "swiglu" else s.mlp
        stds: dict[str, float] = {
            "block.attention_out": root * deep,
            "block.mlp_out": fan_in**-0.5 * deep,
            "token_embedding": table or root,
        }
        return {**dict.fromkeys([*_NAMES, "position", "readout"], root), **stds}
