"""A YAML of Cerebras' Model Zoo for GPT: what its gpt2_model.py makes of the muP fields, `mup_base_hidden_size` and `mup_base_filter_size`.

With m = hidden_size / mup_base_hidden_size and m_F = filter_size / mup_base_filter_size:

| parameter                | std                          | lr       | multiplier            |
|--------------------------|------------------------------|----------|-----------------------|
| embeddings               | embedding_initializer        | lr       | embeddings_scale      |
| attention and FFN in     | initializer m^-1/2           | lr / m   | 1                     |
| attention out            | output_layer_initializer (2L m)^-1/2 | lr / m | 1               |
| FFN out                  | ffn_output_layer_initializer (2L m_F)^-1/2 | lr / m_F | 1       |
| readout                  | (the table's)                | lr       | output_logits_alpha / m |

logits by 1/d with scale_qk_dot_by_d, else 1/sqrt(d). The peak of the schedule is the learning rate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from mupax.presets.roles import PresetError
from mupax.presets.verify.formats.decoder import Fields, Reading, Sizes, entries
from mupax.presets.verify.formats.dump import Dump

_DEFAULTS = {
    "initializer_range": 0.02, "share_embedding_weights": True, "embeddings_scale": 1.0, "output_logits_alpha": 1.0,
    "scale_output_logits_by_d": True, "scale_qk_dot_by_d": False, "attention_logits_alpha": 1.0, "position_embedding_type": "learned",
    "max_position_embeddings": 1024, "vocab_size": 50257,
}  # fmt: skip
_NAMES = {
    "token_embedding": "embedding_layer.word_embeddings.weight",
    "block.query": "transformer_decoder.layers.*.self_attn.proj_q_dense_layer.weight",
    "block.key": "transformer_decoder.layers.*.self_attn.proj_k_dense_layer.weight",
    "block.value": "transformer_decoder.layers.*.self_attn.proj_v_dense_layer.weight",
    "block.attention_out": "transformer_decoder.layers.*.self_attn.proj_output_dense_layer.weight",
    "block.mlp_in": "transformer_decoder.layers.*.ffn.ffn.0.linear_layer.weight",
    "block.mlp_out": "transformer_decoder.layers.*.ffn.ffn.1.linear_layer.weight",
    "block.norm_gain": "transformer_decoder.layers.*.norm1.weight",
    "norm_gain": "ln_f.weight",
}


def _sections(contents: Any) -> tuple[Mapping[str, Any], Mapping[str, Any], Any]:
    """Model, optimizer and what has the schedule, in the layout of today and that before `trainer`."""
    top = (
        contents.get("trainer", {}).get("init", {})
        if isinstance(contents, dict) and "trainer" in contents
        else contents
    )
    if not isinstance(top, dict) or not isinstance(top.get("model"), dict):
        return {}, {}, None
    optimizer = top.get("optimizer") or {}
    return top["model"], optimizer, [optimizer, top.get("schedulers")]


def fits(contents: Any) -> bool:
    """Whether a YAML's contents are a config of Cerebras."""
    return "hidden_size" in _sections(contents)[0]


def _peaks(schedule: Any) -> Iterator[float]:
    if isinstance(schedule, dict):
        for name, value in schedule.items():
            if name in (
                "learning_rate",
                "initial_learning_rate",
                "end_learning_rate",
                "val",
            ) and isinstance(value, (int, float)):
                yield float(value)
            else:
                yield from _peaks(value)
    elif isinstance(schedule, list):
        for each in schedule:
            yield from _peaks(each)


class Config(Reading):
    """A config.

    Args:
        contents: of the YAML.
        source: the file.
    """

    def __init__(self, contents: Any, source: str) -> None:
        model, optimizer, schedule = _sections(contents)
        self._fields = Fields(model, source, _DEFAULTS)
        kind = str(optimizer.get("optimizer_type") or next(iter(optimizer), ""))
        if kind.lower() not in ("adamw", "sgd", "lion"):
            raise PresetError(
                f"{source}: the optimizer {kind!r} is not read; AdamW, SGD and Lion are"
            )
        self._optimizer = kind.lower()
        named = optimizer.get(kind)
        settings = named if isinstance(named, dict) else optimizer
        self._rates = Fields(
            {**settings, "lr": max(_peaks(schedule), default=None)},
            source,
            {"eps": 1e-6, "weight_decay": 0.0},
        )
        f = self._fields
        heads = f.count("num_heads")
        self._sizes = Sizes(
            width=f.count("hidden_size"), mlp=f.count("filter_size"), layers=f.count("num_hidden_layers"), heads=heads,
            kv_heads=heads, head_dim=f.count("hidden_size") // heads, vocab=f.count("vocab_size"), positions=f.count("max_position_embeddings"),
        )  # fmt: skip
        self._base = {
            "width": f.count("mup_base_hidden_size") if "mup_base_hidden_size" in f else None,
            "mlp": f.count("mup_base_filter_size") if "mup_base_filter_size" in f else None,
        }

    def dump(self) -> Dump:
        return self._dump(self._sizes)

    def base(self) -> Dump | None:
        """The model of `mup_base_hidden_size`, with fewer heads of the same size."""
        width, s = self._base["width"], self._sizes
        if width is None or width == s.width:
            return None
        heads = max(1, round(s.heads * width / s.width))
        mlp = self._base["mlp"] or round(s.mlp * width / s.width)
        smaller = dataclasses.replace(
            s, width=width, mlp=mlp, heads=heads, kv_heads=heads, head_dim=s.head_dim
        )
        return dataclasses.replace(self._dump(smaller), source=f"{self._fields.source} (base)")

    def _std(self, *names: str) -> float:
        """Of the first initializer that the file has."""
        for name in names:
            initializer = self._fields.values.get(name)
            if isinstance(initializer, dict):
                return Fields(initializer, f"{self._fields.source}: {name}", {}).number("std")
        return self._fields.number("initializer_range")

    def _dump(self, sizes: Sizes) -> Dump:
        f, rates = self._fields, self._rates
        wide = sizes.width / self._base["width"] if self._base["width"] else 1.0
        wide_mlp = sizes.mlp / self._base["mlp"] if self._base["mlp"] else 1.0
        mup = self._base["width"] is not None
        deep = (2 * sizes.layers) ** -0.5 if mup else 1.0
        stds = {
            "block.attention_out": self._std("output_layer_initializer") * wide**-0.5 * deep,
            "block.mlp_out": self._std("ffn_output_layer_initializer") * wide_mlp**-0.5 * deep,
            "token_embedding": self._std("embedding_initializer"),
            "position": self._std("embedding_initializer"),
            "readout": f.number("initializer_range"),
        }
        if not mup:
            stds["block.mlp_out"] = self._std(
                "ffn_output_layer_initializer", "output_layer_initializer"
            )

        def rule(role: str) -> Mapping[str, float | None]:
            vector, block = "norm" in role, role.startswith("block.")
            slowed = wide_mlp if role == "block.mlp_out" else wide
            return {
                "std": None if vector else stds.get(role, self._std("initializer") * wide**-0.5),
                "lr": rates.number("lr") / (slowed if block and not vector else 1.0),
                "wd": 0.0 if vector else rates.number("weight_decay"),
                "eps": rates.number("eps") if self._optimizer == "adamw" else None,
                "multiplier": output
                if role == "readout"
                else f.number("embeddings_scale")
                if "norm" not in role and not block
                else 1.0,
            }

        output = (
            f.number("output_logits_alpha")
            / (wide if f.flag("scale_output_logits_by_d") else wide**0.5)
            if mup
            else 1.0
        )
        tied = f.flag("share_embedding_weights")
        names = {**_NAMES, **({} if tied else {"readout": "lm_head.weight"})}
        if f.get("position_embedding_type") == "learned":
            names["position"] = "embedding_layer.position_embeddings.weight"
        power = 1.0 if f.flag("scale_qk_dot_by_d") else 0.5
        return Dump(
            source=f.source, parameters=entries(sizes, names, rule), optimizer=self._optimizer, decay="coupled",
            head_dim=sizes.head_dim, layers=sizes.layers, attention=f.number("attention_logits_alpha") * sizes.head_dim**-power,
            branch=1.0, readout=output if tied else None,
        )  # fmt: skip
