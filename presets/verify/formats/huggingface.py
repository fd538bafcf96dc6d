"""config.json of Hugging Face with muP's multipliers: MiniCPM, Granite, Falcon-H1, other decoders.

Such a file describes the forward pass. It has no learning rates and no initial sizes of matrices,
so these are not judged. The tables of embeddings and readout are taken to start with
`initializer_range`.

| model_type        | embedding            | logits q.k           | branch                | output |
|-------------------|----------------------|----------------------|-----------------------|--------|
| minicpm, minicpm3 | scale_emb            | d^-1/2               | scale_depth / sqrt(L) | (a)    |
| granite           | embedding_multiplier | attention_multiplier | residual_multiplier   | (b)    |
| falcon_h1         | embedding_multiplier | (c)                  | 1                     | (d)    |
| others            | 1                    | d^-1/2               | 1                     | 1      |

(a) dim_model_base / width
(b) 1 / logits_scaling
(c) key_multiplier attention_in_multiplier^2 d^-1/2
(d) lm_head_multiplier

Sources: `transformers` 5 (granite, minicpm3, falcon_h1) and MiniCPM's own modeling file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mupax.presets.verify.formats.decoder import Columns, Fields, ModelFile, Sizes, entries
from mupax.presets.verify.formats.dump import Dump

DEFAULTS = {
    "minicpm": {
        "scale_emb": 1,
        "scale_depth": 1,
        "dim_model_base": 1,
        "tie_word_embeddings": True,
    },
    "minicpm3": {
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 256,
        "tie_word_embeddings": True,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
    },
    "granite": {
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
    },
    "falcon_h1": {
        "embedding_multiplier": 1.0,
        "lm_head_multiplier": 1.0,
        "key_multiplier": 1.0,
        "attention_in_multiplier": 1.0,
    },
}
"""Defaults of config fields by model_type, for the fields that Llama's config does not have."""
_COMMON_DEFAULTS = {"initializer_range": 0.02, "tie_word_embeddings": False}
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Multipliers:
    """Factors that a config puts into the forward pass: those in the table of this module.

    Attributes:
        embedding: Factor on the token embedding.
        attention: Factor on the attention logits q.k.
        branch: Factor on every residual branch.
        output: Factor on the output logits.
    """

    embedding: float = 1.0
    attention: float
    branch: float = 1.0
    output: float = 1.0


def fits(contents: Any) -> bool:
    """Return whether the contents of a JSON file are a config of Hugging Face."""
    return (
        isinstance(contents, dict)
        and isinstance(contents.get("model_type"), str)
        and "hidden_size" in contents
    )


class Config(ModelFile):
    """Model that a config.json of Hugging Face describes.

    Args:
        contents: Contents of the JSON file, for which `fits` is true.
        source: Name of the file, for messages and `Dump.source`.

    Raises:
        PresetError: A size is missing or is no whole number of at least 1.
    """

    def __init__(self, contents: Mapping[str, Any], source: str) -> None:
        self._model_type = str(contents["model_type"])
        defaults = {**_COMMON_DEFAULTS, **DEFAULTS.get(self._model_type, {})}
        fields = Fields(contents, source, defaults)
        self._fields = fields

        width = fields.count("hidden_size")
        heads = fields.count("num_attention_heads")
        if self._model_type == "minicpm3":
            head_dim = fields.count("qk_nope_head_dim") + fields.count("qk_rope_head_dim")
        else:
            head_dim = fields.count_or("head_dim", width // heads)
        self._sizes = Sizes(
            width=width,
            mlp=fields.count("intermediate_size"),
            layers=fields.count("num_hidden_layers"),
            heads=heads,
            kv_heads=fields.count_or("num_key_value_heads", heads),
            head_dim=head_dim,
            vocab=fields.count("vocab_size"),
        )

    def dump(self) -> Dump:
        return self._dump(self._sizes)

    def base(self) -> Dump | None:
        """Return the dump of MiniCPM's base model.

        The base has the width `dim_model_base`, and fewer heads of the same size. The result is
        `None` for other model types, and if the file is itself the base.
        """
        if not self._model_type.startswith("minicpm"):
            return None
        sizes = self._sizes
        width = self._fields.count("dim_model_base")
        # MiniCPM's default is 1, which is no width of a model.
        if width in (1, sizes.width):
            return None
        ratio = sizes.width / width
        base_sizes = dataclasses.replace(
            sizes,
            width=width,
            mlp=round(sizes.mlp / ratio),
            heads=max(1, round(sizes.heads / ratio)),
            kv_heads=max(1, round(sizes.kv_heads / ratio)),
        )
        source = f"{self._fields.source} (base)"
        return dataclasses.replace(self._dump(base_sizes), source=source)

    def _dump(self, sizes: Sizes) -> Dump:
        fields = self._fields
        multipliers = self._multipliers(sizes)
        tied = fields.flag("tie_word_embeddings")
        std = fields.number("initializer_range")

        names = dict(_NAMES)
        if not tied:
            names["readout"] = "lm_head.weight"
        if self._model_type == "minicpm3":
            # Its queries, keys and values are of low rank: two matrices each, of other names.
            for role in ("block.query", "block.key", "block.value"):
                del names[role]

        columns: dict[str, Columns] = {role: {"std": None, "multiplier": 1.0} for role in names}
        columns["token_embedding"] = {"std": std, "multiplier": multipliers.embedding}
        columns["readout"] = {"std": std, "multiplier": multipliers.output}
        return Dump(
            source=fields.source,
            parameters=entries(sizes, names, columns),
            head_dim=sizes.head_dim,
            layers=sizes.layers,
            attention=multipliers.attention,
            branch=multipliers.branch,
            readout=multipliers.output if tied else None,
            notes=self._notes(),
        )

    def _multipliers(self, sizes: Sizes) -> _Multipliers:
        """Return the factors of the forward pass, computed from the fields of the model type."""
        fields = self._fields
        inverse_root = sizes.head_dim**-0.5
        if self._model_type.startswith("minicpm"):
            return _Multipliers(
                embedding=fields.number("scale_emb"),
                attention=inverse_root,
                branch=fields.number("scale_depth") / sizes.layers**0.5,
                output=fields.number("dim_model_base") / sizes.width,
            )
        if self._model_type == "granite":
            return _Multipliers(
                embedding=fields.number("embedding_multiplier"),
                attention=fields.number("attention_multiplier"),
                branch=fields.number("residual_multiplier"),
                output=1 / fields.number("logits_scaling"),
            )
        if self._model_type == "falcon_h1":
            embedding = fields.number("embedding_multiplier")
            output = fields.number("lm_head_multiplier")
            key = fields.number("key_multiplier")
            # Queries and keys both read the scaled input.
            attention_in = fields.number("attention_in_multiplier")
            attention = inverse_root * key * attention_in**2
            return _Multipliers(embedding=embedding, attention=attention, output=output)
        return _Multipliers(attention=inverse_root)

    def _notes(self) -> tuple[str, ...]:
        no_rates = (
            "a config.json has no rates and no initial sizes of matrices: "
            f"of {self._fields.source} multipliers alone are judged"
        )
        if self._model_type != "falcon_h1":
            return (no_rates,)
        state_space = (
            "of Falcon-H1 the multipliers of its state-space layers and of single matrices "
            "are not judged"
        )
        return (no_rates, state_space)
