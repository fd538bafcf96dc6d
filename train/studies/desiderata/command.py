"""`mupax check MODEL --desiderata`: which dimensions can be scaled, measured beside theory (`presets desiderata`).

In a series of models one dimension alone doubles; its slopes are those of what the mappings do.

The zoo's transformers are cut into their mappings: what each gives, how fast it moves by its own weights, and the backward
signal there.

Exact and from one batch: backward signals are gradients of zeros that are added to every mapping (one VJP), own speeds one JVP of
the same program with every mapping's inputs held fixed. What they should be as one dimension grows is computed by
`mupax.presets.analysis.desiderata`.

B batch, T and S positions, H heads, K key heads, N head dimension, D width, F hidden.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from mupax import terminal
from mupax.presets import Preset
from mupax.presets.analysis import desiderata as theory
from mupax.presets.analysis.desiderata import Cell
from mupax.presets.analysis.mappings import NAMES
from mupax.train.config.preset import preset_for
from mupax.train.config.run import Config
from mupax.train.core import factors
from mupax.train.core.factors import Factors
from mupax.train.studies.check import check
from mupax.train.studies.check.observables import rms
from mupax.zoo.definition import Arrays, Definition, definition
from mupax.zoo.families import ConfigError, ModelConfig
from mupax.zoo.layers.linear import GATES, biased, project
from mupax.zoo.transformer import TransformerConfig, transformer

Batch = Mapping[str, Any]
Hold = Callable[[Any], Any]
"""Applied to what a mapping reads, such as `jax.lax.stop_gradient`."""

OF_TOKENS = ("positions", "targets")
"""Dimensions that count tokens; in these every position sees all."""
_HEADS, _DIM, _WIDTH, _HIDDEN, _TOKENS = 4, 32, 128, 512, 8

BAND = 0.15
"""Theory and measurement agree where no exponent of a cell is farther apart."""

Row = dict[str, dict[str, tuple[Cell, Cell]]]
"""Dimension to desideratum to theory and measurement."""


class BlockProbe:
    """Forward pass of a block, mapping by mapping; `outputs` has the result of each.

    Args:
        zeros: by mapping, added to it.
        hold: applied to what a mapping reads.
        masked: a causal model sees no later positions.
        label: before every name, as "encoder ".
    """

    def __init__(self, zeros: Arrays, hold: Hold, *, masked: bool, label: str) -> None:
        self.zeros, self.hold, self.masked, self.label = zeros, hold, masked, label
        self.outputs: Arrays = {}

    def mapping(self, name: str, x: jax.Array) -> jax.Array:
        """x with its zeros, kept.

        Args:
            name: of the mapping in its stack.
            x: what it gives.
        """
        name = self.label + name
        self.outputs[name] = x + self.zeros[name] if name in self.zeros else x
        return self.outputs[name]

    def attended(
        self,
        attention: Any,
        heads: tuple[jax.Array, ...],
        bias_HTS: jax.Array | None = None,
        part: str = "",
    ) -> jax.Array:
        """What an attention writes, [B, T, D].

        Args:
            attention: the module of one layer.
            heads: its queries, keys and values.
            bias_HTS: added to logits.
            part: before the names of its mappings, as "cross ".
        """
        q_BTHN, k_BSKN, v_BSKN = (
            self.mapping(part + name, x) for name, x in zip("qkv", heads, strict=True)
        )
        groups = q_BTHN.shape[2] // k_BSKN.shape[2]
        k_BSHN, v_BSHN = (jnp.repeat(x, groups, axis=2) for x in (k_BSKN, v_BSKN))
        logits_BHTS = attention.logit_scale[...] * jnp.einsum("bthn,bshn->bhts", q_BTHN, k_BSHN)
        logits_BHTS = self.mapping(f"{part}logits", logits_BHTS)
        if bias_HTS is not None:
            logits_BHTS = logits_BHTS + bias_HTS
        if attention.causal and self.masked:
            mask_TS = jnp.tri(*logits_BHTS.shape[-2:], dtype=bool)
            logits_BHTS = jnp.where(mask_TS, logits_BHTS, jnp.finfo(jnp.float32).min)
        weights_BHTS = self.mapping(f"{part}softmax", jax.nn.softmax(logits_BHTS))
        o_BTHN = self.mapping(
            f"{part}o", jnp.einsum("bhts,bshn->bthn", self.hold(weights_BHTS), v_BSHN)
        )
        out_BTD = biased(
            project(self.hold(o_BTHN), attention.out[...], inputs=2), attention.out_bias
        )
        return self.mapping(f"{part}attention out", out_BTD)

    def written(self, mlp: Any, x_BTD: jax.Array) -> jax.Array:
        """What an MLP writes, [B, T, D].

        Args:
            mlp: the module of one layer.
            x_BTD: the stream after its norm.
        """
        act_BTF = up_BTF = self.mapping("MLP in", biased(project(x_BTD, mlp.up[...]), mlp.up_bias))
        if mlp.gate is not None:
            act_BTF = (
                GATES[mlp.activation](biased(project(x_BTD, mlp.gate[...]), mlp.gate_bias)) * up_BTF
            )
        elif mlp.activation == "relu":
            act_BTF = jax.nn.relu(up_BTF)
        else:
            act_BTF = jax.nn.gelu(up_BTF, approximate=mlp.activation != "gelu_exact")
        act_BTF = self.mapping("activation", act_BTF)
        return self.mapping(
            "MLP out", biased(project(self.hold(act_BTF), mlp.down[...]), mlp.down_bias)
        )

    def block(
        self, block: Any, h_BTD: jax.Array, bias_HTS: jax.Array | None, memory_BSD: jax.Array | None
    ) -> jax.Array:
        """The stream after a block of the zoo.

        Args:
            block: of one layer.
            h_BTD: the stream before it.
            bias_HTS: of relative positions.
            memory_BSD: what its cross-attention reads; None without one.
        """
        heads = block.attention.heads(self.hold(block.attention_norm(h_BTD)))
        h_BTD, branch = (
            block.add_branch(h_BTD, 0, self.attended(block.attention, heads, bias_HTS)),
            1,
        )
        if memory_BSD is not None:
            queries = block.cross.queries(self.hold(block.cross_norm(h_BTD)))
            heads = (queries, *block.cross.keys(self.hold(memory_BSD)))
            h_BTD, branch = (
                block.add_branch(h_BTD, 1, self.attended(block.cross, heads, part="cross ")),
                2,
            )
        return block.add_branch(
            h_BTD, branch, self.written(block.mlp, self.hold(block.mlp_norm(h_BTD)))
        )


def forward(
    model: Any, batch: Batch, zeros: Arrays, hold: Hold, *, masked: bool = True
) -> tuple[jax.Array, Arrays]:
    """The loss, mean over tokens, and what all mappings give: those of blocks with an axis of layers first.

    Args:
        model: of the zoo's transformers; an encoder-decoder without padding.
        batch: `inputs`, `targets`, and `decoder_inputs` where there is an encoder.
        zeros: by mapping, added to it in every layer.
        hold: applied to what a mapping reads.
        masked: a causal model sees no later positions.
    """
    outputs: Arrays = {}

    def stack(
        block: Any,
        embedding: jax.Array,
        bias_HTS: jax.Array | None = None,
        memory_BSD: jax.Array | None = None,
        label: str = "",
    ) -> jax.Array:
        graph, stacked = nnx.split(block)
        ends = {f"{label}embedding", f"{label}stream"}
        own = {
            name: x
            for name, x in zeros.items()
            if name.startswith("encoder ") == bool(label) and name not in ends
        }

        def layer(h_BTD: jax.Array, of: tuple[nnx.State, Arrays]) -> tuple[jax.Array, Arrays]:
            cutting = BlockProbe(of[1], hold, masked=masked, label=label)
            return cutting.block(
                nnx.merge(graph, of[0]), h_BTD, bias_HTS, memory_BSD
            ), cutting.outputs

        embedding = embedding + zeros.get(f"{label}embedding", 0.0)
        h_BTD, each = jax.lax.scan(layer, embedding, (stacked, own))
        h_BTD = h_BTD + zeros.get(f"{label}stream", 0.0)
        outputs.update({**each, f"{label}embedding": embedding, f"{label}stream": h_BTD})
        return h_BTD

    encoder, tokens = getattr(model, "encoder", None), batch["inputs"]
    if encoder is None:
        stream = stack(model.block, model.embed(tokens))
    else:
        source = encoder.first(model.token if encoder.token is None else encoder.token, tokens)
        e_BSD = stack(encoder.block, source, encoder.bias(*[tokens.shape[1]] * 2), label="encoder ")
        tokens = batch["decoder_inputs"]
        bias_HTT = model.bias(*[tokens.shape[1]] * 2)
        stream = stack(model.block, model.embed(tokens), bias_HTT, encoder.norm(e_BSD))
    nll = optax.softmax_cross_entropy_with_integer_labels(model.read(stream), batch["targets"])
    return jnp.mean(nll), outputs


class Mappings(NamedTuple):
    """One model at one moment; by mapping, root mean squares over all layers, tokens and entries, float32 []."""

    signal: Arrays
    speed: Arrays
    """Of every mapping by its own weights alone, with an equal part of the loss's decay from every weight and layer."""
    backward: Arrays
    parts: Arrays
    """rate ‖∇‖² of every weight under the preset's own rates, by name, all layers together."""


def measure(
    definition: Definition, params: Arrays, factors: Factors, batch: Batch, *, masked: bool = True
) -> Mappings:
    """All of a model where it stands. Pure: jit it, or map it over seeds.

    Args:
        definition: a transformer of the zoo with a readout of its own; an encoder-decoder with two tables.
        params: where to measure.
        factors: multipliers, and the rates of SGD that `parts` are under.
        batch: `inputs`, `targets`.
        masked: a causal model sees no later positions.
    """

    def loss(params: Arrays, zeros: Arrays, hold: Hold = lambda x: x) -> tuple[jax.Array, Arrays]:
        model = definition.model(params, factors.multiplier, factors.forward)
        return forward(model, batch, zeros, hold, masked=masked)

    shapes = jax.eval_shape(lambda p: loss(p, {})[1], params)
    zeros = {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in shapes.items()}
    (gradients, signals), outputs = jax.grad(loss, argnums=(0, 1), has_aux=True)(params, zeros)
    flow, parts = {}, {}
    for name, g in gradients.items():
        spec = definition.specs[name]
        layers = definition.sizes[spec.blocks] if spec.stacked else 1
        squares = jnp.sum(g.reshape(layers, -1) ** 2, axis=1)
        moves = name in NAMES or name.endswith("block.mlp.gate")
        rate = jnp.where(squares > 0, 1 / layers / squares, 0.0) * moves
        flow[name] = -g * rate.reshape(-1, *[1] * (g.ndim - 1)) if spec.stacked else -g * rate[0]
        if name in NAMES:
            parts[NAMES[name]] = jnp.sum(factors.lr[name] * squares)
    _, speeds = jax.jvp(lambda p: loss(p, {}, jax.lax.stop_gradient)[1], (params,), (flow,))
    for stack in ("", "encoder ") if "encoder_layers" in definition.sizes else ("",):
        stream = outputs[f"{stack}stream"]
        outputs[f"{stack}branches"] = (stream - outputs[f"{stack}embedding"]) / rms(stream)
    signal, speed, backward = (jax.tree.map(rms, dict(x)) for x in (outputs, speeds, signals))
    return Mappings(signal, speed, backward, parts)


def grown(model: ModelConfig, dimension: str, count: int) -> list[TransformerConfig]:
    """Models of a structure where one dimension alone doubles, from sizes at which exponents of large ones show.

    Args:
        model: whose structure; it gets as many key heads as query heads, no tie, and tables of its own for an encoder.
        dimension: of `growths`; positions are of text only.
        count: how many.
    """
    tokens = (
        {"vocab_size": 512, "seq_len": _TOKENS, "tied": False}
        if model.task == "tokens"
        else {"num_classes": 512}
    )
    if model.denoises:
        tokens |= {"shared": False, "encoder_depth": 2}
    start: Any = check.smallest(dataclasses.replace(model, value_dim=None))  # pyright: ignore[reportCallIssue]

    def sized(m: int) -> TransformerConfig:
        part = 1 if model.denoises else 2  # with an encoder powers show from twice the width on
        heads, head_dim, value_dim, width, hidden, depth = _HEADS, _DIM, _DIM, _WIDTH, _HIDDEN, 2
        sizes = dict(tokens)
        match dimension:
            case "d_k":
                head_dim *= m
            case "d_v":
                value_dim *= m
            case "d_ff":
                hidden *= m
            case "d_model":
                width = width // part * m
            case "heads":
                heads *= m
            case "width":
                heads, width, hidden = heads // part * m, width // part * m, hidden // part * m
            case "positions":
                # Fewer tokens than d_model, more than d_k; one layer: attention has tokens share what they were independent in.
                width, head_dim, value_dim, depth = 1024, 16, 16, 1
                sizes = {**tokens, "seq_len": 64 * m, "vocab_size": 4096}
            case "targets":
                width, head_dim, value_dim, depth = 1024, 16, 16, 1
                sizes = {**tokens, "target_len": 64 * m, "vocab_size": 4096, "encoder_depth": 1}
            case "depth":
                depth *= 4 * m
            case "encoder_depth":
                sizes["encoder_depth"] = 8 * m
        return dataclasses.replace(
            start, width=width, num_heads=heads, head_dim=head_dim, value_dim=value_dim, num_kv_heads=None,
            mlp_ratio=hidden / width, depth=depth, **sizes,
        )  # fmt: skip

    return [sized(2**k) for k in range(count)]


def batch(model: ModelConfig, dimension: str) -> dict[str, np.ndarray]:
    """Few random tokens, so that those of no size are more than the width; no padding.

    Args:
        model: of `grown`.
        dimension: that grows.
    """
    few = {
        name: array[: 1 if dimension in OF_TOKENS else 2]
        for name, array in check.even_batch(model).items()
    }
    return few | ({"input_mask": np.ones_like(few["inputs"])} if model.denoises else {})


def base(smallest: TransformerConfig, dimension: str) -> dict[str, int]:
    """What presets are relative to: the smallest model, but one layer, so that branches are small at every depth.

    With an encoder d_k is 8 times the base's from the start: logits taken by 1/d_k are small throughout, as is what the encoder gets
    back through keys, whose power is another than that through values.

    Args:
        smallest: of `grown`.
        dimension: that grows.
    """
    sizes = smallest.base_sizes()
    if dimension == "d_k" and smallest.denoises:
        return {**sizes, "head_dim": _DIM // 8}
    blocks = {"layers", "encoder_layers"} & sizes.keys() if dimension.endswith("depth") else ()
    return {**sizes, **dict.fromkeys(blocks, 1)}


class Series:
    """A structure at growing sizes, each compiled once for all presets.

    Args:
        definitions: at growing sizes.
        batches: one for each.
        seeds: initializations of each.
        masked: a causal model sees no later positions.
    """

    def __init__(
        self,
        definitions: Sequence[Definition],
        batches: Sequence[Mapping[str, Any]],
        seeds: int,
        *,
        masked: bool = True,
    ) -> None:
        self.definitions, self._batches, self._seeds = (
            definitions,
            batches,
            np.arange(seeds, dtype=np.uint32),
        )

        def program(definition: Definition) -> Any:
            def one(seed: Any, stds: Any, numbers: Any, batch: Any) -> Mappings:
                return measure(
                    definition, definition.initialize(seed, stds), numbers, batch, masked=masked
                )

            return jax.jit(
                lambda seeds, *arrays: jax.lax.map(lambda seed: one(seed, *arrays), seeds)
            )

        self._programs = [program(definition) for definition in definitions]

    def slopes(self, preset: Preset) -> dict[str, dict[str, float]]:
        """Log-log slopes over sizes, means over seeds, by field of `Mappings` and name.

        Args:
            preset: relative to the smallest size, or absolute.
        """
        records = []
        rule = "sgd" not in preset.no_rule
        for program, model, batch in zip(
            self._programs, self.definitions, self._batches, strict=True
        ):
            numbers = factors.resolve(
                preset, model, "sgd" if rule else preset.optimizers[0], "independent"
            )
            stds = factors.init_stds(preset, model)
            records.append(jax.device_get(program(self._seeds, stds, numbers, batch))._asdict())
        x = np.arange(len(records)) - (len(records) - 1) / 2

        def slope(what: str, name: str) -> float:
            y = np.log2([np.exp(np.mean(np.log(at[what][name]))) for at in records])
            return float(x @ y / (x @ x))

        return {what: {name: slope(what, name) for name in records[0][what]} for what in records[0]}


def compared(
    preset: Preset,
    dimension: str,
    slopes: Mapping[str, Mapping[str, float]],
    *,
    encoder: bool = False,
) -> dict[str, tuple[Cell, Cell]]:
    """By desideratum theory and the same exponents as measured.

    Args:
        preset: that was measured.
        dimension: that grew.
        slopes: of `Series.slopes`.
        encoder: of an encoder-decoder.
    """
    expected = theory.desiderata(preset, dimension, encoder=encoder)
    # The largest of many measured exponents is one that noise has lifted: what theory has at the top is their measure.
    top = [slopes["parts"][name] for name, x in expected["balance"].exponents.items() if not x]
    most = sum(top) / max(len(top), 1)
    measured = {
        "signal": slopes["signal"],
        "speed": slopes["speed"],
        "balance": {name: x - most for name, x in slopes["parts"].items()},
        "loss decay": slopes["parts"],
    }
    return {
        column: (
            cell,
            theory.cell({name: measured[column][name] for name in cell.exponents}, BAND)
            if cell.exponents
            else cell,
        )
        for column, cell in expected.items()
    }


def apart(expected: Cell, measured: Cell) -> dict[str, float]:
    """Names whose exponents are farther apart than `BAND`, and by how much they are measured to be larger.

    Args:
        expected: by theory.
        measured: the same exponents.
    """
    gaps = {name: measured.exponents[name] - x for name, x in expected.exponents.items()}
    return {name: by for name, by in gaps.items() if abs(by) > BAND}


def measured(
    model: ModelConfig,
    presets: Sequence[Callable[[Mapping[str, int]], Preset]],
    *,
    count: int,
    seeds: int,
    dimensions: Collection[str] | None = None,
) -> list[Row]:
    """Some dimensions of some presets, each dimension's models compiled once.

    Args:
        model: whose structure.
        presets: base to preset, of each.
        count: sizes of a dimension, each twice the one before.
        seeds: initializations of each size.
        dimensions: which; all that the model has unless given.
    """
    rows: list[Row] = [{} for _ in presets]
    for dimension in dimensions or theory.growths(encoder=model.denoises):
        if dimension == "positions" and model.task != "tokens":
            continue
        models = grown(model, dimension, count)
        batches = [batch(one, dimension) for one in models]
        series = Series(
            [definition(one) for one in models], batches, seeds, masked=dimension not in OF_TOKENS
        )
        for row, make in zip(rows, presets, strict=True):
            preset = make(base(models[0], dimension))
            row[dimension] = compared(
                preset, dimension, series.slopes(preset), encoder=model.denoises
            )
    return rows


def table(row: Row) -> list[list[str]]:
    """Every dimension, theory | measurement in every cell, and what is farther apart than `BAND`.

    Args:
        row: of one preset.
    """
    lines = [["dimension", "scales", *theory.COLUMNS, "apart"]]
    for dimension, cells in row.items():
        far = [(name, by) for pair in cells.values() for name, by in apart(*pair).items()]
        can = all(expected.holds for expected, _ in cells.values())
        lines.append([
            dimension,
            "can" if can else "cannot",
            *(cell_text(*cells[column]) for column in theory.COLUMNS),
            ", ".join(f"{name} {by:+.2f}" for name, by in far) or "-",
        ])  # fmt: skip
    return lines


def cell_text(expected: Cell, measurement: Cell) -> str:
    """Theory and measurement in one cell: `yes | -0.03`, `no: q, k -0.5 | -0.51`.

    Args:
        expected: by theory.
        measurement: the same exponents, measured.
    """
    if expected.exponent is None:
        return expected.why
    if expected.holds:
        return f"yes | {max(measurement.exponents.values(), key=abs):+.2f}"
    mean = sum(measurement.exponents[name] for name in expected.of) / len(expected.of)
    return f"no: {expected.names} {expected.exponent:+.3g} | {mean:+.2f}"


def main(config: Config, *, count: int, seeds: int, path: str | None, dry_run: bool = False) -> int:
    """`mupax check MODEL --desiderata`: 0 where theory and measurement agree on every cell.

    Args:
        config: has the model and the preset.
        count: sizes of a dimension.
        seeds: of a size.
        path: of a JSON file to write.
        dry_run: print what theory says, and measure nothing.

    Raises:
        ConfigError: no transformer, or one with other mappings.
    """

    def preset(base: Mapping[str, int]) -> Preset:
        absolute = preset_for(dataclasses.replace(config.preset, base=None), model)
        return absolute if absolute.baseless else dataclasses.replace(absolute, base=dict(base))

    model = transformer(config.model, "cutting blocks into mappings")
    plain = {
        "parallel": False,
        "window": None,
        "post_norm": False,
        "attention_softcap": None,
        "logit_softcap": None,
    }
    for field in dataclasses.fields(model):
        if field.name in plain and (value := getattr(model, field.name)) != plain[field.name]:
            raise ConfigError(
                f"model.{field.name} is {value}, and the mappings that a block is cut into are those of one without; write "
                f"{field.name} {plain[field.name]}"
            )
    if dry_run:
        print(terminal.table(theory.rows(preset({}), encoder=model.denoises)))
        return 0
    (row,) = measured(model, [preset], count=count, seeds=seeds)
    terminal.say(
        f"{config.recipe} under {preset({}).label}: exponent of each dimension, theory | measured"
    )
    print(terminal.table(table(row)))
    if path:
        Path(path).write_text(json.dumps(to_json(row), indent=2) + "\n")
    return 1 if any(apart(*pair) for cells in row.values() for pair in cells.values()) else 0


def to_json(row: Row) -> dict[str, Any]:
    """All exponents, by dimension, desideratum and name as [theory, measured]."""
    return {
        dimension: {
            column: {
                name: [x, round(measurement.exponents[name], 4)]
                for name, x in expected.exponents.items()
            }
            for column, (expected, measurement) in cells.items()
        }
        for dimension, cells in row.items()
    }
