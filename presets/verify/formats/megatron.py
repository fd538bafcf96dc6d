"""Command line of NVIDIA/Megatron-LM, with `--use-mup` and without.

Sizes, initial sizes and learning rates are those that its code computes. With muP and
m = hidden_size / mup_base_hidden_size:

| parameter                  | std             | lr     | eps     | multiplier         |
|----------------------------|-----------------|--------|---------|--------------------|
| embeddings                 | std             | lr     | eps     | mup_embedding_mult |
| block matrices             | std m^-1/2      | lr / m | eps / m | 1                  |
| attention out, MLP out     | std (2L m)^-1/2 | lr / m | eps / m | 1                  |
| output layer, tied or not  | std             | lr     | eps     | 1 / m              |

The table is Adam's. Muon scales no learning rate. SGD multiplies the learning rate of everything
but block matrices by m. The softmax scale is
sqrt(mup_base_head_dim or 1) / kv_channels^mup_attn_scale_power. Weight decay is AdamW's: one value,
and 0 for vectors.

Sources, of August 2026: megatron/core/transformer/transformer_config.py (`__post_init__`),
megatron/core/optimizer/__init__.py (`get_mup_config_overrides`), megatron/training/arguments.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from mupax.presets.roles import PresetError
from mupax.presets.verify.formats.decoder import Columns, Fields, ModelFile, Sizes, entries
from mupax.presets.verify.formats.dump import Dump

_DEFAULTS = {
    "init-method-std": 0.02,
    "adam-eps": 1e-8,
    "weight-decay": 0.01,
    "optimizer": "adam",
    "mup-embedding-mult": 1.0,
    "mup-output-mult": 1.0,
    "mup-attn-scale-power": 1.0,
    "padded-vocab-size": 50304,
    "position-embedding-type": "learned_absolute",
    "max-position-embeddings": 1024,
}
_OPTIMIZERS = {"adam": "adamw", "sgd": "sgd", "muon": "muon", "dist_muon": "muon"}
"""Names of optimizers in `mupax.presets.optimizers.OPTIMIZERS`, by Megatron's names."""
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
_BRANCH_OUTPUTS = ("block.attention_out", "block.mlp_out")


def fits(words: Sequence[str]) -> bool:
    """Return whether words are a command line of Megatron, which has `--hidden-size`."""
    return any(word.split("=")[0] == "--hidden-size" for word in words)


def _parse_flags(words: Sequence[str]) -> dict[str, str]:
    """Return the values of flags, by name without "--" and with dashes for underscores.

    A flag without a value has the value "true".
    """
    flags: dict[str, str] = {}
    following = [*words[1:], ""]
    for word, next_word in zip(words, following, strict=True):
        if not word.startswith("--"):
            continue
        name, equals, value = word[2:].partition("=")
        if not equals:
            has_value = next_word and not next_word.startswith("--")
            value = next_word if has_value else "true"
        flags[name.replace("_", "-")] = value
    return flags


class CommandLine(ModelFile):
    """Model that a command line of Megatron-LM describes.

    Args:
        words: Words of the command line, as a shell splits them.
        source: Name of the file, for messages and `Dump.source`.

    Raises:
        PresetError: A size is missing or is no whole number of at least 1, or the scaling recipe is
            neither "none" nor "mup".
    """

    def __init__(self, words: Sequence[str], source: str) -> None:
        fields = Fields(_parse_flags(words), source, _DEFAULTS)
        self._fields = fields
        heads = fields.count("num-attention-heads")
        width = fields.count("hidden-size")
        grouped = fields.flag("group-query-attention")
        self._sizes = Sizes(
            width=width,
            mlp=fields.count_or("ffn-hidden-size", 4 * width),
            layers=fields.count("num-layers"),
            heads=heads,
            kv_heads=fields.count("num-query-groups") if grouped else heads,
            head_dim=fields.count_or("kv-channels", width // heads),
            vocab=fields.count("padded-vocab-size"),
            positions=fields.count("max-position-embeddings"),
        )

        recipe = fields.get("scaling-recipe")
        if "scaling-recipe" in fields and recipe not in ("none", "mup"):
            raise PresetError(
                f"{source}: --scaling-recipe {recipe} is not read; dump its parameters instead"
            )
        self._mup = fields.flag("use-mup") or recipe == "mup"
        self._base_width = width
        # The second name comes with --scaling-recipe, the first with --use-mup.
        for flag in ("mup-base-hidden-size", "scaling-base-hidden-size"):
            if flag in fields:
                self._base_width = fields.count(flag)
                break

    def dump(self) -> Dump:
        return self._dump(self._sizes)

    def base(self) -> Dump | None:
        """Return the dump of the base model of the command line.

        The base has the width `--mup-base-hidden-size` and fewer heads. Their size is
        `--mup-base-head-dim` if the flag is given, else the model's own. The result is `None`
        without muP, or if the base has the model's own width.
        """
        sizes = self._sizes
        fields = self._fields
        if not self._mup or self._base_width == sizes.width:
            return None
        width_ratio = sizes.width / self._base_width
        head_dim = fields.count_or("mup-base-head-dim", sizes.head_dim)
        heads_ratio = width_ratio * head_dim / sizes.head_dim
        base_sizes = dataclasses.replace(
            sizes,
            width=self._base_width,
            mlp=round(sizes.mlp / width_ratio),
            head_dim=head_dim,
            heads=max(1, round(sizes.heads / heads_ratio)),
            kv_heads=max(1, round(sizes.kv_heads / heads_ratio)),
        )
        return dataclasses.replace(self._dump(base_sizes), source=f"{fields.source} (base)")

    def _dump(self, sizes: Sizes) -> Dump:
        fields = self._fields
        name = str(fields.get("optimizer"))
        if name not in _OPTIMIZERS:
            raise PresetError(
                f"{fields.source}: --optimizer {name} is not read; dump its parameters instead"
            )
        optimizer = _OPTIMIZERS[name]
        width_ratio = sizes.width / self._base_width if self._mup else 1.0
        values = _Values(fields, optimizer=optimizer, mup=self._mup, width_ratio=width_ratio)

        tied = not fields.flag("untie-embeddings-and-output-weights")
        names = dict(_NAMES)
        if not tied:
            names["readout"] = "output_layer.weight"
        if fields.get("position-embedding-type") == "learned_absolute":
            names["position"] = "embedding.position_embeddings.weight"
        columns = {role: values.columns(role, sizes.layers) for role in names}
        return Dump(
            source=fields.source,
            parameters=entries(sizes, names, columns),
            optimizer=optimizer,
            decay="coupled",
            head_dim=sizes.head_dim,
            layers=sizes.layers,
            attention=self._attention(sizes.head_dim),
            branch=1.0,
            readout=values.output if tied else None,
        )

    def _attention(self, head_dim: int) -> float:
        """Return the factor on attention logits for heads of size N.

        Without muP it is N^-1/2. With muP it is `--mup-base-head-dim` (default 1) to the power 1/2,
        divided by N to the power `--mup-attn-scale-power`.
        """
        fields = self._fields
        if not self._mup:
            return head_dim**-0.5
        root = 1.0
        if "mup-base-head-dim" in fields:
            root = fields.number("mup-base-head-dim") ** 0.5
        return root / head_dim ** fields.number("mup-attn-scale-power")


class _Values:
    """Values that Megatron gives each parameter of a model of one width.

    Args:
        optimizer: Name of `mupax.presets.optimizers.OPTIMIZERS`.
        mup: Whether `--use-mup` is given, or `--scaling-recipe mup`.
        width_ratio: Width divided by base width, 1 without muP.

    Attributes:
        output: Factor on the logits.
    """

    def __init__(self, fields: Fields, *, optimizer: str, mup: bool, width_ratio: float) -> None:
        self._fields = fields
        self._optimizer = optimizer
        self._mup = mup
        self._width_ratio = width_ratio
        self._std = fields.number("init-method-std")
        self._lr = fields.number("lr")
        self._eps = fields.number("adam-eps")
        self._weight_decay = fields.number("weight-decay")
        # A multiplier that is not 1 replaces the default of 1/m.
        output = fields.number("mup-output-mult")
        if output == 1:
            output = 1 / width_ratio
        self.output = output if mup else 1.0

    def columns(self, role: str, layers: int) -> Columns:
        """Return std, learning rate, weight decay, eps and multiplier of the role's parameter.

        Args:
            role: Key of `_NAMES`, "readout" or "position".
            layers: Number of blocks. The std of the branches' output matrices depends on it.
        """
        is_vector = "norm" in role
        if is_vector:
            # Gains start at 1, so there is no std to judge, and they do not decay.
            std = None
            weight_decay = 0.0
        else:
            std = self._initial_std(role, layers)
            weight_decay = self._weight_decay
        return {
            "std": std,
            "lr": self._learning_rate(role),
            "wd": weight_decay,
            "eps": self._adam_eps(role),
            "multiplier": self._multiplier(role),
        }

    def _initial_std(self, role: str, layers: int) -> float:
        std = self._std
        if role in _HIDDEN:
            std /= self._width_ratio**0.5
        if role in _BRANCH_OUTPUTS:
            std *= (2 * layers) ** -0.5
        return std

    def _learning_rate(self, role: str) -> float:
        fields = self._fields
        if "decoupled-lr" in fields and role in ("token_embedding", "readout"):
            return fields.number("decoupled-lr")
        hidden = role in _HIDDEN
        if hidden and self._optimizer == "adamw":
            return self._lr * (1 / self._width_ratio)
        if self._mup and not hidden and self._optimizer == "sgd":
            return self._lr * self._width_ratio
        return self._lr

    def _adam_eps(self, role: str) -> float | None:
        if self._optimizer == "sgd":
            return None
        if self._optimizer == "adamw" and role in _HIDDEN:
            return self._eps / self._width_ratio
        # Under Muon, eps matters to the parameters that stay on Adam.
        return self._eps

    def _multiplier(self, role: str) -> float:
        if role == "readout":
            return self.output
        if self._mup and role in ("token_embedding", "position"):
            return self._fields.number("mup-embedding-mult")
        return 1.0
