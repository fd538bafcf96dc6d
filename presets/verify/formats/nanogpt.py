"""Arguments of EleutherAI/nanoGPT-mup, `--name=value` or a config file of Python: what its model.py and train.py make of them.

With `mup_enabled`, m = mup_width_multiplier: c_attn and c_fc start with init_std m^-1/2, c_proj with init_std (2L m)^-1/2, all three train at
learning_rate / m, the tied readout is multiplied by mup_output_alpha / m and the embeddings by mup_input_alpha, logits by 1/d. The
rest is nanoGPT's: AdamW with one weight decay on everything of two dimensions, and eps 1e-8 (torch's own).
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from mupax.presets.roles import PresetError
from mupax.presets.verify.formats.decoder import Fields, Reading, Sizes, entries
from mupax.presets.verify.formats.dump import Dump

_DEFAULTS = {
    "n_layer": 12, "n_head": 12, "n_embd": 768, "init_std": 0.02, "learning_rate": 6e-4, "weight_decay": 1e-1, "block_size": 1024,
    "mup_enabled": False, "mup_disable_attention_scaling": False, "mup_disable_hidden_lr_scaling": False,
    "mup_width_multiplier": 1.0, "mup_input_alpha": 1.0, "mup_output_alpha": 1.0,
}  # fmt: skip
_VOCAB = 50304
_NAMES = {
    "token_embedding": "transformer.wte.weight",
    "position": "transformer.wpe.weight",
    "block.qkv": "transformer.h.*.attn.c_attn.weight",
    "block.attention_out": "transformer.h.*.attn.c_proj.weight",
    "block.mlp_in": "transformer.h.*.mlp.c_fc.weight",
    "block.mlp_out": "transformer.h.*.mlp.c_proj.weight",
    "block.norm_gain": "transformer.h.*.ln_1.weight",
    "norm_gain": "transformer.ln_f.weight",
}
_HIDDEN = ("block.qkv", "block.attention_out", "block.mlp_in", "block.mlp_out")


def fits(words: Sequence[str]) -> bool:
    """Whether the words are arguments of nanoGPT."""
    return any(word.startswith(("--n_embd=", "--mup_width_multiplier=")) for word in words)


def _values(words: str | Sequence[str], source: str) -> dict[str, Any]:
    if not isinstance(words, str):
        pairs = (word[2:].partition("=") for word in words if word.startswith("--"))
        return {name: value for name, equals, value in pairs if equals}
    try:
        return _assigned(ast.parse(words))
    except SyntaxError as error:
        raise PresetError(f"{source} is no Python: {error.msg} in line {error.lineno}") from None
    except (RecursionError, MemoryError):  # the parser's stack, not the machine's memory
        raise PresetError(f"{source} is no Python of a config: nested too deep") from None


def _assigned(tree: ast.Module) -> dict[str, Any]:
    """Return what a module assigns to its names: values, or the text of what it computes."""
    values = {}
    for node in tree.body:
        if (
            isinstance(node, ast.Assign)
            and len(node.targets) == 1
            and isinstance(node.targets[0], ast.Name)
        ):
            try:
                values[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:  # computed there; it is asked for where it is needed
                values[node.targets[0].id] = ast.unparse(node.value)
    return values


class Config(Reading):
    """Arguments.

    Args:
        words: of a command line, or the text of a config file.
        source: the file.
    """

    def __init__(self, words: str | Sequence[str], source: str) -> None:
        self._fields = Fields(_values(words, source), source, _DEFAULTS)
        f = self._fields
        width, heads = f.count("n_embd"), f.count("n_head")
        self._sizes = Sizes(
            width=width, mlp=4 * width, layers=f.count("n_layer"), heads=heads, kv_heads=heads, head_dim=width // heads,
            vocab=_VOCAB, positions=f.count("block_size"),
        )  # fmt: skip
        self._mup = f.flag("mup_enabled")
        self._times = f.number("mup_width_multiplier") if self._mup else 1.0
        if not self._times:
            raise PresetError(f"{source}: mup_width_multiplier is 0; write width / base width")

    def dump(self) -> Dump:
        return self._dump(self._sizes, self._times)

    def base(self) -> Dump | None:
        """The model whose width multiplier is 1, with fewer heads of the same size."""
        s = self._sizes
        if self._times == 1:
            return None
        width, heads = round(s.width / self._times), max(1, round(s.heads / self._times))
        smaller = dataclasses.replace(s, width=width, mlp=4 * width, heads=heads, kv_heads=heads)
        return dataclasses.replace(self._dump(smaller, 1.0), source=f"{self._fields.source} (base)")

    def _dump(self, sizes: Sizes, times: float) -> Dump:
        f = self._fields
        std, lr, wd = f.number("init_std"), f.number("learning_rate"), f.number("weight_decay")
        slowed = self._mup and not f.flag("mup_disable_hidden_lr_scaling")

        def rule(role: str) -> Mapping[str, float | None]:
            hidden, vector = role in _HIDDEN, "norm" in role
            deep = (
                (2 * sizes.layers) ** -0.5
                if role in ("block.attention_out", "block.mlp_out")
                else 1.0
            )
            return {
                "std": None if vector else std * deep * (times**-0.5 if hidden else 1.0),
                "lr": lr / times if hidden and slowed else lr,
                "wd": 0.0 if vector else wd,
                "eps": 1e-8,
                "multiplier": f.number("mup_input_alpha")
                if self._mup and role in ("token_embedding", "position")
                else 1.0,
            }

        power = 1.0 if self._mup and not f.flag("mup_disable_attention_scaling") else 0.5
        return Dump(
            source=f.source, parameters=entries(sizes, _NAMES, rule), optimizer="adamw", decay="coupled", head_dim=sizes.head_dim,
            layers=sizes.layers, attention=sizes.head_dim**-power, branch=1.0,
            readout=f.number("mup_output_alpha") / times if self._mup else 1.0,
        )  # fmt: skip
