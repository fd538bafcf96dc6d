"""Arguments of EleutherAI/nanoGPT-mup, from a command line (`--name=value`) or a Python config.

The values are those that its model.py and train.py compute. With `mup_enabled` and
m = mup_width_multiplier:

| parameter            | std                | lr                | multiplier           |
|----------------------|--------------------|-------------------|----------------------|
| embeddings           | init_std           | learning_rate     | mup_input_alpha      |
| c_attn, c_fc         | init_std m^-1/2    | learning_rate / m | 1                    |
| c_proj               | init_std (2L m)^-1/2 | learning_rate / m | 1                  |
| readout (tied)       | (the table's)      | (the table's)     | mup_output_alpha / m |

Attention logits are multiplied by 1/d. The rest is nanoGPT's: AdamW with one weight decay on
everything of two dimensions, and eps 1e-8 (torch's own).
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Sequence
from typing import Any

from mupax.presets.roles import PresetError
from mupax.presets.verify.formats.decoder import Columns, Fields, ModelFile, Sizes, entries
from mupax.presets.verify.formats.dump import Dump

_DEFAULTS = {
    "n_layer": 12,
    "n_head": 12,
    "n_embd": 768,
    "init_std": 0.02,
    "learning_rate": 6e-4,
    "weight_decay": 1e-1,
    "block_size": 1024,
    "mup_enabled": False,
    "mup_disable_attention_scaling": False,
    "mup_disable_hidden_lr_scaling": False,
    "mup_width_multiplier": 1.0,
    "mup_input_alpha": 1.0,
    "mup_output_alpha": 1.0,
}
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
_BRANCH_OUTPUTS = ("block.attention_out", "block.mlp_out")


def fits(words: Sequence[str]) -> bool:
    """Return whether words are arguments of nanoGPT.

    One of them is then `--n_embd=` or `--mup_width_multiplier=`.
    """
    return any(word.startswith(("--n_embd=", "--mup_width_multiplier=")) for word in words)


def _parse_words(words: Sequence[str]) -> dict[str, str]:
    values = {}
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            if equals:
                values[name] = value
    return values


def _parse_python(text: str, source: str) -> dict[str, Any]:
    try:
        return _assigned_values(ast.parse(text))
    except SyntaxError as error:
        raise PresetError(f"{source} is no Python: {error.msg} in line {error.lineno}") from None
    except (RecursionError, MemoryError):
        # A MemoryError is of the parser's stack, not of the machine's memory.
        raise PresetError(f"{source} is no Python of a config: nested too deep") from None


def _assigned_values(tree: ast.Module) -> dict[str, Any]:
    """Return the values that a Python module assigns to single names, by name.

    A literal is evaluated. The value of any other expression is its source text.
    """
    values = {}
    for node in tree.body:
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            continue
        target = node.targets[0]
        if not isinstance(target, ast.Name):
            continue
        try:
            values[target.id] = ast.literal_eval(node.value)
        except ValueError:
            # `Fields.number` refuses the text, but only if the value is needed.
            values[target.id] = ast.unparse(node.value)
    return values


class Config(ModelFile):
    """Model that the arguments of a nanoGPT-mup run describe.

    Args:
        arguments: Words of a command line, or the text of a Python config file.
        source: Name of the file, for messages and `Dump.source`.

    Raises:
        PresetError: The text is no Python, a size is no whole number of at least 1, or
            `mup_width_multiplier` is no number above 0.
    """

    def __init__(self, arguments: str | Sequence[str], source: str) -> None:
        if isinstance(arguments, str):
            values = _parse_python(arguments, source)
        else:
            values = _parse_words(arguments)
        fields = Fields(values, source, _DEFAULTS)

        width = fields.count("n_embd")
        heads = fields.count("n_head")
        self._fields = fields
        self._sizes = Sizes(
            width=width,
            mlp=4 * width,
            layers=fields.count("n_layer"),
            heads=heads,
            kv_heads=heads,
            head_dim=width // heads,
            vocab=_VOCAB,
            positions=fields.count("block_size"),
        )
        self._mup = fields.flag("mup_enabled")
        self._width_ratio = fields.number("mup_width_multiplier") if self._mup else 1.0
        if not self._width_ratio:
            raise PresetError(f"{source}: mup_width_multiplier is 0; write width / base width")

    def dump(self) -> Dump:
        return self._dump(self._sizes, self._width_ratio)

    def base(self) -> Dump | None:
        """Return the dump of the base model, or `None` without muP or if the model is its own base.

        The base has the width n_embd / `mup_width_multiplier`, and fewer heads of the same size.
        """
        sizes = self._sizes
        ratio = self._width_ratio
        if ratio == 1:
            return None
        width = round(sizes.width / ratio)
        heads = max(1, round(sizes.heads / ratio))
        base_sizes = dataclasses.replace(
            sizes, width=width, mlp=4 * width, heads=heads, kv_heads=heads
        )
        source = f"{self._fields.source} (base)"
        return dataclasses.replace(self._dump(base_sizes, 1.0), source=source)

    def _dump(self, sizes: Sizes, width_ratio: float) -> Dump:
        fields = self._fields
        columns = {role: self._columns(role, sizes, width_ratio) for role in _NAMES}
        by_head_dim = self._mup and not fields.flag("mup_disable_attention_scaling")
        attention_exponent = 1.0 if by_head_dim else 0.5
        return Dump(
            source=fields.source,
            parameters=entries(sizes, _NAMES, columns),
            optimizer="adamw",
            decay="coupled",
            head_dim=sizes.head_dim,
            layers=sizes.layers,
            attention=sizes.head_dim**-attention_exponent,
            branch=1.0,
            readout=fields.number("mup_output_alpha") / width_ratio if self._mup else 1.0,
        )

    def _columns(self, role: str, sizes: Sizes, width_ratio: float) -> Columns:
        """Return std, learning rate, weight decay, eps and multiplier of the role's parameter.

        Args:
            role: Key of `_NAMES`.
            width_ratio: Width divided by base width, 1 without muP.
        """
        fields = self._fields
        std = fields.number("init_std")
        lr = fields.number("learning_rate")
        weight_decay = fields.number("weight_decay")
        if "norm" in role:
            # Gains start at 1, so there is no std to judge, and they do not decay.
            return {"std": None, "lr": lr, "wd": 0.0, "eps": 1e-8, "multiplier": 1.0}

        if role in _BRANCH_OUTPUTS:
            std *= (2 * sizes.layers) ** -0.5
        if role in _HIDDEN:
            std *= width_ratio**-0.5
            if self._mup and not fields.flag("mup_disable_hidden_lr_scaling"):
                lr /= width_ratio

        multiplier = 1.0
        if self._mup and role in ("token_embedding", "position"):
            multiplier = fields.number("mup_input_alpha")
        return {"std": std, "lr": lr, "wd": weight_decay, "eps": 1e-8, "multiplier": multiplier}
