"""A command line of NVIDIA/Megatron-LM: sizes, initialization and rates as its own code works them out, with `--use-mup` and without.

Fields after megatron/core/transformer/transformer_config.py (`__post_init__`), megatron/core/optimizer/__init__.py
(`get_mup_config_overrides`) and megatron/training/arguments.py, of August 2026. With muP, m = hidden / mup_base_hidden:

| parameter                     | std                     | lr       | eps      | multiplier        |
|-------------------------------|-------------------------|----------|----------|-------------------|
| embeddings                    | std                     | lr       | eps      | mup_embedding_mult|
| block matrices                | std m^-1/2              | lr / m   | eps / m  | 1                 |
| attention out, MLP out        | std (2L m)^-1/2         | lr / m   | eps / m  | 1                 |
| output layer, tied or not     | std                     | lr       | eps      | 1 / m             |

softmax scale sqrt(mup_base_head_dim or 1) / kv_channels^mup_attn_scale_power. Weight decay is AdamW's, one number, 0 on vectors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from mupax.presets.roles import PresetError
from mupax.presets.verify.formats.decoder import Fields, Reading, Sizes, entries
from mupax.presets.verify.formats.dump import Dump

_DEFAULTS = {
    "init-method-std": 0.02, "adam-eps": 1e-8, "weight-decay": 0.01, "optimizer": "adam", "mup-embedding-mult": 1.0,
    "mup-output-mult": 1.0, "mup-attn-scale-power": 1.0, "padded-vocab-size": 50304, "position-embedding-type": "learned_absolute",
    "max-position-embeddings": 1024,
}  # fmt: skip
_FAMILIES = {"adam": "adamw", "sgd": "sgd", "muon": "muon", "dist_muon": "muon"}
_NAMES = {
    "token_embedding": "embedding.word_embeddings.weight",
    "block.qkv": "decoder.layers.*.self_attention.linear_qkv.weight",
    "block.attention_out": "decoder.layers.*.self_attention.linear_proj.weight",
    "block.mlp_in": "decoder.layers.*.mlp.linear_fc1.weight",
    "block.mlp_out": "decoder.layers.*.mlp.linear_fc2.weight",
    "block.norm_gain": "decoder.layers.*.input_layernorm.weight",
    "norm_gain": "decoder.final_layernorm.weight",
}
_HIDDEN = ("block.qkv", "block.attention_out", "block.mlp_in", "block.mlp_out")


def fits(words: Sequence[str]) -> bool:
    """Whether the words are of a command line of Megatron."""
    return any(word.split("=")[0] == "--hidden-size" for word in words)


def _flags(words: Sequence[str]) -> dict[str, str]:
    flags: dict[str, str] = {}
    for word, after in zip(words, [*words[1:], ""], strict=True):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            flags[name.replace("_", "-")] = (
                value if equals else "true" if not after or after.startswith("--") else after
            )
    return flags


class CommandLine(Reading):
    """The words of a command line.

    Args:
        words: of the shell.
        source: the file.
    """

    def __init__(self, words: Sequence[str], source: str) -> None:
        self._fields = Fields(_flags(words), source, _DEFAULTS)
        f = self._fields
        heads = f.count("num-attention-heads")
        width = f.count("hidden-size")
        self._sizes = Sizes(
            width=width,
            mlp=f.count("ffn-hidden-size") if "ffn-hidden-size" in f else 4 * width,
            layers=f.count("num-layers"),
            heads=heads,
            kv_heads=f.count("num-query-groups") if f.flag("group-query-attention") else heads,
            head_dim=f.count("kv-channels") if "kv-channels" in f else width // heads,
            vocab=f.count("padded-vocab-size"),
            positions=f.count("max-position-embeddings"),
        )
        if "scaling-recipe" in f and f.get("scaling-recipe") not in ("none", "mup"):
            raise PresetError(
                f"{source}: --scaling-recipe {f.get('scaling-recipe')} is not read; dump its parameters instead"
            )
        self._mup = f.flag("use-mup") or f.get("scaling-recipe") == "mup"
        flag = next(
            (name for name in ("mup-base-hidden-size", "scaling-base-hidden-size") if name in f),
            None,
        )
        self._base_width = f.count(flag) if flag else width

    def dump(self) -> Dump:
        return self._dump(self._sizes)

    def base(self) -> Dump | None:
        """The model of `--mup-base-hidden-size`, with fewer heads of the same size, or of `--mup-base-head-dim`."""
        if not self._mup or self._base_width == self._sizes.width:
            return None
        s, f = self._sizes, self._fields
        times = s.width / self._base_width
        head_dim = f.count("mup-base-head-dim") if "mup-base-head-dim" in f else s.head_dim
        share = times * head_dim / s.head_dim
        smaller = dataclasses.replace(
            s, width=self._base_width, mlp=round(s.mlp / times), head_dim=head_dim,
            heads=max(1, round(s.heads / share)), kv_heads=max(1, round(s.kv_heads / share)),
        )  # fmt: skip
        return dataclasses.replace(self._dump(smaller), source=f"{self._fields.source} (base)")

    def _dump(self, sizes: Sizes) -> Dump:
        f, times = self._fields, sizes.width / self._base_width if self._mup else 1.0
        name = str(f.get("optimizer"))
        if name not in _FAMILIES:
            raise PresetError(
                f"{f.source}: --optimizer {name} is not read; dump its parameters instead"
            )
        std, lr, eps, wd = (
            f.number(n) for n in ("init-method-std", "lr", "adam-eps", "weight-decay")
        )
        output = f.number("mup-output-mult") if f.number("mup-output-mult") != 1 else 1 / times
        of_output = output if self._mup else 1.0
        adam, tied = _FAMILIES[name] == "adamw", not f.flag("untie-embeddings-and-output-weights")

        def rule(role: str) -> Mapping[str, float | None]:
            hidden = role in _HIDDEN
            smaller = std / times**0.5 if hidden else std
            deep = (
                (2 * sizes.layers) ** -0.5
                if role in ("block.attention_out", "block.mlp_out")
                else 1.0
            )
            scaled = 1 / times if hidden and name != "sgd" and _FAMILIES[name] != "muon" else 1.0
            scaled = times if self._mup and name == "sgd" and not hidden else scaled
            of_embedding = (
                f.number("mup-embedding-mult")
                if self._mup and role in ("token_embedding", "position")
                else 1.0
            )
            rate = (
                f.number("decoupled-lr")
                if "decoupled-lr" in f and role in ("token_embedding", "readout")
                else lr * scaled
            )
            return {
                "std": None if "norm" in role else smaller * deep,
                "lr": rate,
                "wd": 0.0 if "norm" in role else wd,
                "eps": None if name == "sgd" else eps / times if adam and hidden else eps,
                "multiplier": of_output if role == "readout" else of_embedding,
            }

        names = dict(_NAMES) if tied else {**_NAMES, "readout": "output_layer.weight"}
        if f.get("position-embedding-type") == "learned_absolute":
            names["position"] = "embedding.position_embeddings.weight"
        plain = sizes.head_dim**-0.5
        root = f.number("mup-base-head-dim") ** 0.5 if "mup-base-head-dim" in f else 1.0
        attention = (
            root / sizes.head_dim ** f.number("mup-attn-scale-power") if self._mup else plain
        )
        return Dump(
            source=f.source, parameters=entries(sizes, names, rule), optimizer=_FAMILIES[name], decay="coupled",
            head_dim=sizes.head_dim, layers=sizes.layers, attention=attention, branch=1.0, readout=of_output if tied else None,
        )  # fmt: skip
