"""YAML config of Cerebras' Model Zoo for GPT.

The values are those that its gpt2_model.py computes. With `mup_base_hidden_size`,
`mup_base_filter_size`, m = hidden_size / mup_base_hidden_size and
m_F = filter_size / mup_base_filter_size:

| parameter            | std                                        | lr       | multiplier       |
|----------------------|--------------------------------------------|----------|------------------|
| embeddings           | embedding_initializer                      | lr       | embeddings_scale |
| attention and FFN in | initializer m^-1/2                         | lr / m   | 1                |
| attention out        | output_layer_initializer (2L m)^-1/2       | lr / m   | 1                |
| FFN out              | ffn_output_layer_initializer (2L m_F)^-1/2 | lr / m_F | 1                |
| readout              | initializer_range, or the table's if tied  | lr       | (a)              |

(a) output_logits_alpha / m, or output_logits_alpha / sqrt(m) without scale_output_logits_by_d

Attention logits are multiplied by attention_logits_alpha / d with scale_qk_dot_by_d, else by
attention_logits_alpha / sqrt(d). The learning rate is the peak of the schedule.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from mupax.presets.roles import PresetError
from mupax.presets.verify.formats.decoder import Columns, Fields, ModelFile, Sizes, entries
from mupax.presets.verify.formats.dump import Dump

_DEFAULTS = {
    "initializer_range": 0.02,
    "share_embedding_weights": True,
    "embeddings_scale": 1.0,
    "output_logits_alpha": 1.0,
    "scale_output_logits_by_d": True,
    "scale_qk_dot_by_d": False,
    "attention_logits_alpha": 1.0,
    "position_embedding_type": "learned",
    "max_position_embeddings": 1024,
    "vocab_size": 50257,
}
_OPTIMIZER_DEFAULTS = {"eps": 1e-6, "weight_decay": 0.0}
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
_LR_KEYS = (
    "lr",
    "learning_rate",
    "learning_rates",
    "initial_learning_rate",
    "end_learning_rate",
    "base_lr",
    "max_lr",
    "val",
)
"""Config keys under which a number, or a list of numbers, is a learning rate.

They are looked for in the sections of the optimizer and of its schedule.
"""


class _Sections(NamedTuple):
    """Sections of a config. All are empty if the file is no config of Cerebras.

    Attributes:
        model: Section "model".
        optimizer: Section "optimizer".
        schedule: Sections that may have learning rates.
    """

    model: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    schedule: Any


def _sections(contents: Any) -> _Sections:
    """Return the sections of a config, in the present layout or in the older one without `trainer`.

    Args:
        contents: Contents of a YAML file, of any kind.
    """
    top = contents
    if isinstance(contents, dict) and "trainer" in contents:
        top = contents.get("trainer", {}).get("init", {})
    if not isinstance(top, dict) or not isinstance(top.get("model"), dict):
        return _Sections({}, {}, None)
    optimizer = top.get("optimizer") or {}
    # The old layout has the learning rate in the optimizer, the present one in `schedulers`.
    schedule = [optimizer, top.get("schedulers")]
    return _Sections(top["model"], optimizer, schedule)


def fits(contents: Any) -> bool:
    """Return whether the contents of a YAML file are a config of Cerebras."""
    return "hidden_size" in _sections(contents).model


def _learning_rates(schedule: Any) -> Iterator[float]:
    """Yield all learning rates in a part of the config: numbers under the keys in `_LR_KEYS`.

    Args:
        schedule: Part of the config, which is searched at any depth.
    """
    if isinstance(schedule, dict):
        for name, value in schedule.items():
            values = value if isinstance(value, list) else [value]
            is_rate = name in _LR_KEYS and all(isinstance(item, (int, float)) for item in values)
            if is_rate:
                yield from map(float, values)
            else:
                yield from _learning_rates(value)
    elif isinstance(schedule, list):
        for item in schedule:
            yield from _learning_rates(item)


class Config(ModelFile):
    """Model that a YAML config of Cerebras' Model Zoo describes.

    Args:
        contents: Contents of the YAML file, for which `fits` is true.
        source: Name of the file, for messages and `Dump.source`.

    Raises:
        PresetError: The optimizer is none of those that can be read, or a field has a wrong value.
    """

    def __init__(self, contents: Any, source: str) -> None:
        sections = _sections(contents)
        fields = Fields(sections.model, source, _DEFAULTS)
        self._fields = fields
        self._read_optimizer(sections, source)

        heads = fields.count("num_heads")
        width = fields.count("hidden_size")
        self._sizes = Sizes(
            width=width,
            mlp=fields.count("filter_size"),
            layers=fields.count("num_hidden_layers"),
            heads=heads,
            kv_heads=heads,
            head_dim=width // heads,
            vocab=fields.count("vocab_size"),
            positions=fields.count("max_position_embeddings"),
        )
        self._base_width = self._optional_count("mup_base_hidden_size")
        self._base_mlp = self._optional_count("mup_base_filter_size")

    def _read_optimizer(self, sections: _Sections, source: str) -> None:
        """Set the optimizer's name and settings, with the schedule's largest learning rate.

        Raises:
            PresetError: The optimizer is none of AdamW, SGD and Lion.
        """
        optimizer = sections.optimizer
        # The old layout has {optimizer_type: AdamW, ...}, the present one {AdamW: {...}}.
        name = str(optimizer.get("optimizer_type") or next(iter(optimizer), ""))
        if name.lower() not in ("adamw", "sgd", "lion"):
            raise PresetError(
                f"{source}: the optimizer {name!r} is not read; AdamW, SGD and Lion are"
            )
        nested = optimizer.get(name)
        settings = nested if isinstance(nested, dict) else optimizer
        # A schedule also names the low rates at which its warm-up begins and its decay ends.
        peak = max(_learning_rates(sections.schedule), default=None)
        self._optimizer = name.lower()
        self._settings = Fields({**settings, "lr": peak}, source, _OPTIMIZER_DEFAULTS)

    def _optional_count(self, name: str) -> int | None:
        if name not in self._fields:
            return None
        return self._fields.count(name)

    def dump(self) -> Dump:
        return self._dump(self._sizes)

    def base(self) -> Dump | None:
        """Return the dump of the base model, or `None` if the file names no base of another width.

        The base has the width `mup_base_hidden_size`, and fewer heads of the same size.
        """
        sizes = self._sizes
        width = self._base_width
        if width is None or width == sizes.width:
            return None
        # The file names the base's width but not its heads. The quotient may be no whole number.
        heads = max(1, round(sizes.heads * width / sizes.width))
        mlp = self._base_mlp or round(sizes.mlp * width / sizes.width)
        base_sizes = dataclasses.replace(sizes, width=width, mlp=mlp, heads=heads, kv_heads=heads)
        source = f"{self._fields.source} (base)"
        return dataclasses.replace(self._dump(base_sizes), source=source)

    def _dump(self, sizes: Sizes) -> Dump:
        fields = self._fields
        stds = self._stds(sizes)
        output = self._output_multiplier(sizes)

        tied = fields.flag("share_embedding_weights")
        names = dict(_NAMES)
        if not tied:
            names["readout"] = "lm_head.weight"
        if fields.get("position_embedding_type") == "learned":
            names["position"] = "embedding_layer.position_embeddings.weight"

        columns = {role: self._columns(role, sizes, stds, output) for role in names}
        attention_exponent = 1.0 if fields.flag("scale_qk_dot_by_d") else 0.5
        alpha = fields.number("attention_logits_alpha")
        return Dump(
            source=fields.source,
            parameters=entries(sizes, names, columns),
            optimizer=self._optimizer,
            decay="coupled",
            head_dim=sizes.head_dim,
            layers=sizes.layers,
            attention=alpha * sizes.head_dim**-attention_exponent,
            branch=1.0,
            readout=output if tied else None,
        )

    def _width_ratio(self, sizes: Sizes) -> float:
        """Return m: the width divided by the base width, 1 without muP."""
        if not self._base_width:
            return 1.0
        return sizes.width / self._base_width

    def _mlp_ratio(self, sizes: Sizes) -> float:
        """Return m_F: the MLP's size divided by the base size, 1 if the file names none."""
        if not self._base_mlp:
            return 1.0
        return sizes.mlp / self._base_mlp

    def _output_multiplier(self, sizes: Sizes) -> float:
        fields = self._fields
        if self._base_width is None:
            return 1.0
        ratio = self._width_ratio(sizes)
        divisor = ratio**0.5
        if fields.flag("scale_output_logits_by_d"):
            divisor = ratio
        return fields.number("output_logits_alpha") / divisor

    def _initializer_std(self, *names: str) -> float:
        """Return the std of the first of these initializers that the config has.

        Without any of them it is `initializer_range`.

        Args:
            *names: Config fields, tried in order, such as "output_layer_initializer".
        """
        for name in names:
            initializer = self._fields.values.get(name)
            if isinstance(initializer, dict):
                return Fields(initializer, f"{self._fields.source}: {name}", {}).number("std")
        return self._fields.number("initializer_range")

    def _stds(self, sizes: Sizes) -> dict[str, float]:
        """Return initial standard deviations by role, for all parameters except gains."""
        by_width = self._width_ratio(sizes) ** -0.5
        attention_out = self._initializer_std("output_layer_initializer") * by_width
        if self._base_width is None:
            # Without muP, output_layer_initializer is the default for the FFN's output too.
            mlp_out = self._initializer_std(
                "ffn_output_layer_initializer", "output_layer_initializer"
            )
        else:
            by_mlp = self._mlp_ratio(sizes) ** -0.5
            by_depth = (2 * sizes.layers) ** -0.5
            attention_out *= by_depth
            mlp_out = self._initializer_std("ffn_output_layer_initializer") * by_mlp * by_depth

        embedding = self._initializer_std("embedding_initializer")
        readout = self._fields.number("initializer_range")
        hidden = self._initializer_std("initializer") * by_width
        return {
            "token_embedding": embedding,
            "position": embedding,
            "block.query": hidden,
            "block.key": hidden,
            "block.value": hidden,
            "block.attention_out": attention_out,
            "block.mlp_in": hidden,
            "block.mlp_out": mlp_out,
            "readout": readout,
        }

    def _columns(
        self, role: str, sizes: Sizes, stds: Mapping[str, float], output: float
    ) -> Columns:
        """Return std, learning rate, weight decay, eps and multiplier of the role's parameter.

        Args:
            role: Key of `stds`, or the role of a norm's gain.
            stds: Initial standard deviation by role, from `_stds`.
            output: Factor on the logits. Only the role "readout" uses it.
        """
        settings = self._settings
        is_vector = "norm" in role
        in_block = role.startswith("block.")

        lr = settings.number("lr")
        if in_block and not is_vector:
            # The learning rate falls with the fan-in, which for the MLP's output is F.
            if role == "block.mlp_out":
                lr /= self._mlp_ratio(sizes)
            else:
                lr /= self._width_ratio(sizes)

        multiplier = 1.0
        if role == "readout":
            multiplier = output
        elif not is_vector and not in_block:
            multiplier = self._fields.number("embeddings_scale")
        if is_vector:
            # Gains start at 1, so there is no std to judge, and they do not decay.
            std = None
            weight_decay = 0.0
        else:
            std = stds[role]
            weight_decay = settings.number("weight_decay")
        # SGD and Lion have no eps.
        eps = None
        if self._optimizer == "adamw":
            eps = settings.number("eps")
        return {
            "std": std,
            "lr": lr,
            "wd": weight_decay,
            "eps": eps,
            "multiplier": multiplier,
        }
