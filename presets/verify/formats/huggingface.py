"""A config.json of Hugging Face with the multipliers of muP: MiniCPM, Granite, Falcon-H1, and decoders that have none.

It has the forward pass and neither rates nor initial sizes of matrices: these are not judged. The table of embeddings and readout is
taken to start with `initializer_range`. Fields after `transformers` 5 (granite, minicpm3, falcon_h1) and MiniCPM's own modeling file:

| model_type         | embedding            | logits q.k                 | branch                    | output                   |
|--------------------|----------------------|----------------------------|---------------------------|--------------------------|
| minicpm, minicpm3  | scale_emb            | d^-1/2                     | scale_depth / sqrt(L)     | dim_model_base / width   |
| granite            | embedding_multiplier | attention_multiplier       | residual_multiplier       | 1 / logits_scaling       |
| falcon_h1          | embedding_multiplier | key_multiplier d^-1/2 (and attention_in_multiplier, squared) | 1 | lm_head_multiplier       |
| others             | 1                    | d^-1/2                     | 1                         | 1                        |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mupax.presets.verify.formats.decoder import Fields, Reading, Sizes, entries
from mupax.presets.verify.formats.dump import Dump

DEFAULTS = {
    "minicpm": {"scale_emb": 1, "scale_depth": 1, "dim_model_base": 1, "tie_word_embeddings": True},
    "minicpm3": {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256, "tie_word_embeddings": True, "qk_nope_head_dim": 64,
                 "qk_rope_head_dim": 32},
    "granite": {"embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 1.0},
    "falcon_h1": {"embedding_multiplier": 1.0, "lm_head_multiplier": 1.0, "key_multiplier": 1.0, "attention_in_multiplier": 1.0},
}  # fmt: skip
"""model_type to the fields that it has beside Llama's, and their defaults."""
_COMMON = {"initializer_range": 0.02, "tie_word_embeddings": False}
_NAMES = {
    "token_embedding": "model.embed_tokens.weight",
    "block.query": "model.layers.*.self_attn.q_proj.weight",
    "block.key": "model.layers.*.self_attn.k_proj.weight",
    "block.value": "model.layers.*.self_attn.v_proj.weight",
    "block.attention_out": "model.layers.*.self_attn.o_proj.weight",
    "block.mlp_in": "model.layers.*.mlp.up_proj.weight",
    "block.mlp_out": "model.layers.*.mlp.down_proj.weight",
    "norm_gain": "model.norm.weight",
}


def fits(contents: Any) -> bool:
    """Whether a JSON's contents are a config of Hugging Face."""
    return (
        isinstance(contents, dict)
        and isinstance(contents.get("model_type"), str)
        and "hidden_size" in contents
    )


class Config(Reading):
    """A config.

    Args:
        contents: of the JSON.
        source: the file.
    """

    def __init__(self, contents: Mapping[str, Any], source: str) -> None:
        self._kind = str(contents["model_type"])
        self._fields = Fields(contents, source, {**_COMMON, **DEFAULTS.get(self._kind, {})})
        f = self._fields
        width, heads = f.count("hidden_size"), f.count("num_attention_heads")
        if self._kind == "minicpm3":
            head_dim = f.count("qk_nope_head_dim") + f.count("qk_rope_head_dim")
        else:
            head_dim = f.count("head_dim") if "head_dim" in f else width // heads
        self._sizes = Sizes(
            width=width, mlp=f.count("intermediate_size"), layers=f.count("num_hidden_layers"), heads=heads,
            kv_heads=f.count("num_key_value_heads") if "num_key_value_heads" in f else heads, head_dim=head_dim,
            vocab=f.count("vocab_size"),
        )  # fmt: skip

    def dump(self) -> Dump:
        return self._dump(self._sizes)

    def base(self) -> Dump | None:
        """Of MiniCPM the model of width `dim_model_base`, with fewer heads of the same size."""
        if not self._kind.startswith("minicpm") or self._fields.count("dim_model_base") in (
            1,
            self._sizes.width,
        ):
            return None
        s, width = self._sizes, self._fields.count("dim_model_base")
        share = s.width / width
        smaller = dataclasses.replace(
            s,
            width=width,
            mlp=round(s.mlp / share),
            heads=max(1, round(s.heads / share)),
            kv_heads=max(1, round(s.kv_heads / share)),
        )
        return dataclasses.replace(self._dump(smaller), source=f"{self._fields.source} (base)")

    def _dump(self, sizes: Sizes) -> Dump:
        f, root = self._fields, sizes.head_dim**-0.5
        embedding, attention, branch, output = 1.0, root, 1.0, 1.0
        if self._kind.startswith("minicpm"):
            embedding, branch = f.number("scale_emb"), f.number("scale_depth") / sizes.layers**0.5
            output = f.number("dim_model_base") / sizes.width
        elif self._kind == "granite":
            embedding, attention = (
                f.number("embedding_multiplier"),
                f.number("attention_multiplier"),
            )
            branch, output = f.number("residual_multiplier"), 1 / f.number("logits_scaling")
        elif self._kind == "falcon_h1":
            embedding, output = f.number("embedding_multiplier"), f.number("lm_head_multiplier")
            attention = root * f.number("key_multiplier") * f.number("attention_in_multiplier") ** 2
        tied, std = f.flag("tie_word_embeddings"), f.number("initializer_range")

        def rule(role: str) -> Mapping[str, float | None]:
            of_table = {"token_embedding": embedding, "readout": output}
            return {"std": std if role in of_table else None, "multiplier": of_table.get(role, 1.0)}

        names = {**_NAMES, **({} if tied else {"readout": "lm_head.weight"})}
        if (
            self._kind == "minicpm3"
        ):  # queries, keys and values of low rank have matrices of their own
            names = {
                role: name
                for role, name in names.items()
                if role not in ("block.query", "block.key", "block.value")
            }
        notes = [
            f"a config.json has no rates and no initial sizes of matrices: of {f.source} multipliers alone are judged"
        ]
        if self._kind == "falcon_h1":
            notes.append(
                "of Falcon-H1 the multipliers of its state-space layers and of single matrices are not judged"
            )
        return Dump(
            source=f.source, parameters=entries(sizes, names, rule), head_dim=sizes.head_dim, layers=sizes.layers,
            attention=attention, branch=branch, readout=output if tied else None, notes=tuple(notes),
        )  # fmt: skip
