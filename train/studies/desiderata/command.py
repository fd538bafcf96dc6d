"""Command `mupax check MODEL --desiderata`: which dimensions of a transformer can be scaled.

Blocks of the zoo's transformers are cut into their mappings, such as q, softmax or MLP in. Three
root mean squares are measured for each mapping: that of its output, that of the speed with which
the mapping's own weights change the output, and that of the backward signal (the gradient of the
loss with respect to the output). In a series of models one dimension doubles alone, and log-log
slopes are compared with theory (`mupax.presets.analysis.desiderata`, which `mupax presets
desiderata` prints).

Everything is exact and from one batch. Backward signals are gradients with respect to zeros that
are added to the output of every mapping (one VJP). Speeds are one JVP of the same program with the
input of every mapping held fixed.

Shapes: B batch, T and S positions, H heads, K key heads, N head dimension, D width, F hidden.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from mupax import disk, terminal
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
"""Function on the input of a mapping, such as `jax.lax.stop_gradient`."""

OF_TOKENS = ("positions", "targets")
"""Dimensions that count tokens. While one of them grows, attention is not causal."""
_HEADS = 4
_DIM = 32
_WIDTH = 128
_HIDDEN = 512
_TOKENS = 8

BAND = 0.15
"""Greatest difference of an exponent between theory and measurement that counts as agreement."""

Row = dict[str, dict[str, tuple[Cell, Cell]]]
"""Results of one preset: (theory, measurement) by dimension that grows, then by desideratum."""


class BlockProbe:
    """Forward pass of a block, cut into mappings, whose outputs are recorded in `outputs` by name.

    Mappings are the operations of a block: q, k, v, logits, softmax, o, attention out, MLP in,
    activation and MLP out.

    Args:
        zeros: Arrays of zeros that are added to the outputs of mappings, by name including `label`.
            Gradients with respect to them are the backward signals. An output without an array
            stays as it is.
        hold: Function that is applied to the input of every mapping, such as
            `jax.lax.stop_gradient`.
        masked: Whether the attention of a causal model is masked, so that positions see no later
            positions.
        label: Prefix of every name, such as "encoder ".
    """

    def __init__(self, zeros: Arrays, hold: Hold, *, masked: bool, label: str) -> None:
        self.zeros = zeros
        self.hold = hold
        self.masked = masked
        self.label = label
        self.outputs: Arrays = {}

    def mapping(self, name: str, x: jax.Array) -> jax.Array:
        """Record the output of a mapping, after its array of `zeros` (if any) is added.

        Return the sum.

        Args:
            name: Name of the mapping, without the label.
            x: Output of the mapping, of any shape.
        """
        name = self.label + name
        if name in self.zeros:
            x = x + self.zeros[name]
        self.outputs[name] = x
        return x

    def attended(
        self,
        attention: Any,
        heads: tuple[jax.Array, ...],
        bias_HTS: jax.Array | None = None,
        part: str = "",
    ) -> jax.Array:
        """Apply attention to projected queries, keys and values, and record all its mappings.

        Return the output of the attention, [B, T, D].

        Args:
            heads: Queries [B, T, H, N], keys [B, S, K, N] and values [B, S, K, N].
            bias_HTS: Bias that is added to the logits, if any.
            part: Prefix of the names of the attention's mappings, such as "cross ".
        """
        q_BTHN, k_BSKN, v_BSKN = heads
        q_BTHN = self.mapping(f"{part}q", q_BTHN)
        k_BSKN = self.mapping(f"{part}k", k_BSKN)
        v_BSKN = self.mapping(f"{part}v", v_BSKN)
        groups = q_BTHN.shape[2] // k_BSKN.shape[2]
        # Repeated after `mapping`, so that shared keys are measured once and not per query head.
        k_BSHN = jnp.repeat(k_BSKN, groups, axis=2)
        v_BSHN = jnp.repeat(v_BSKN, groups, axis=2)

        logits_BHTS = attention.logit_scale[...] * jnp.einsum("bthn,bshn->bhts", q_BTHN, k_BSHN)
        logits_BHTS = self.mapping(f"{part}logits", logits_BHTS)
        if bias_HTS is not None:
            logits_BHTS = logits_BHTS + bias_HTS
        if attention.causal and self.masked:
            mask_TS = jnp.tri(*logits_BHTS.shape[-2:], dtype=bool)
            logits_BHTS = jnp.where(mask_TS, logits_BHTS, jnp.finfo(jnp.float32).min)
        weights_BHTS = self.mapping(f"{part}softmax", jax.nn.softmax(logits_BHTS))

        o_BTHN = jnp.einsum("bhts,bshn->bthn", self.hold(weights_BHTS), v_BSHN)
        o_BTHN = self.mapping(f"{part}o", o_BTHN)
        projected_BTD = project(self.hold(o_BTHN), attention.out[...], inputs=2)
        return self.mapping(f"{part}attention out", biased(projected_BTD, attention.out_bias))

    def mlp_output(self, mlp: Any, x_BTD: jax.Array) -> jax.Array:
        """Apply an MLP and record its mappings. Return its output, [B, T, D].

        Args:
            x_BTD: Input of the MLP, to which `hold` was already applied.
        """
        up_BTF = self.mapping("MLP in", biased(project(x_BTD, mlp.up[...]), mlp.up_bias))
        if mlp.gate is not None:
            gate_BTF = biased(project(x_BTD, mlp.gate[...]), mlp.gate_bias)
            act_BTF = GATES[mlp.activation](gate_BTF) * up_BTF
        elif mlp.activation == "relu":
            act_BTF = jax.nn.relu(up_BTF)
        else:
            act_BTF = jax.nn.gelu(up_BTF, approximate=mlp.activation != "gelu_exact")
        act_BTF = self.mapping("activation", act_BTF)
        out_BTD = biased(project(self.hold(act_BTF), mlp.down[...]), mlp.down_bias)
        return self.mapping("MLP out", out_BTD)

    def block(
        self, block: Any, h_BTD: jax.Array, bias_HTS: jax.Array | None, memory_BSD: jax.Array | None
    ) -> jax.Array:
        """Apply a block of the zoo and record its mappings. Return the stream after it, [B, T, D].

        Args:
            memory_BSD: Encoder output that cross-attention reads; `None` without an encoder.
        """
        heads = block.attention.heads(self.hold(block.attention_norm(h_BTD)))
        h_BTD = block.add_branch(h_BTD, 0, self.attended(block.attention, heads, bias_HTS))
        mlp_branch = 1
        if memory_BSD is not None:
            queries = block.cross.queries(self.hold(block.cross_norm(h_BTD)))
            heads = (queries, *block.cross.keys(self.hold(memory_BSD)))
            h_BTD = block.add_branch(h_BTD, 1, self.attended(block.cross, heads, part="cross "))
            mlp_branch = 2
        mlp_out_BTD = self.mlp_output(block.mlp, self.hold(block.mlp_norm(h_BTD)))
        return block.add_branch(h_BTD, mlp_branch, mlp_out_BTD)


def forward(
    model: Any, batch: Batch, zeros: Arrays, hold: Hold, *, masked: bool = True
) -> tuple[jax.Array, Arrays]:
    """Run a model. Return the mean loss over tokens, and the outputs of all mappings by name.

    Outputs of mappings of blocks have a first axis of layers.

    Args:
        model: Transformer of the zoo. An encoder-decoder gets no padding.
        batch: `inputs` and `targets`, and `decoder_inputs` if there is an encoder.
        zeros: Arrays of zeros that are added to the outputs of mappings, by name. Gradients with
            respect to them are the backward signals. Arrays for mappings of blocks have a first
            axis of layers. An output without an array stays as it is.
        hold: Function that is applied to the input of every mapping.
        masked: Whether the attention of a causal model is masked, so that positions see no later
            positions.
    """
    outputs: Arrays = {}

    def stack(
        block: Any,
        embedding: jax.Array,
        bias_HTS: jax.Array | None = None,
        memory_BSD: jax.Array | None = None,
        label: str = "",
    ) -> jax.Array:
        """Apply all blocks of a stack to its embedding and return the stream after them.

        The `zeros` of this stack are added to the outputs of its mappings. The sums are written
        into `outputs`, under names that begin with `label`.
        """
        graph, stacked = nnx.split(block)
        # These two are added outside of the scan, which only takes arrays with an axis of layers.
        ends = {f"{label}embedding", f"{label}stream"}
        block_zeros = {}
        for name, x in zeros.items():
            is_this_stack = name.startswith("encoder ") == bool(label)
            if is_this_stack and name not in ends:
                block_zeros[name] = x

        def layer(h_BTD: jax.Array, slices: tuple[nnx.State, Arrays]) -> tuple[jax.Array, Arrays]:
            state, layer_zeros = slices
            probe = BlockProbe(layer_zeros, hold, masked=masked, label=label)
            layer_block = nnx.merge(graph, state)
            h_BTD = probe.block(layer_block, h_BTD, bias_HTS, memory_BSD)
            return h_BTD, probe.outputs

        embedding = embedding + zeros.get(f"{label}embedding", 0.0)
        h_BTD, layer_outputs = jax.lax.scan(layer, embedding, (stacked, block_zeros))
        h_BTD = h_BTD + zeros.get(f"{label}stream", 0.0)
        outputs.update(layer_outputs)
        outputs[f"{label}embedding"] = embedding
        outputs[f"{label}stream"] = h_BTD
        return h_BTD

    encoder = getattr(model, "encoder", None)
    tokens = batch["inputs"]
    if encoder is None:
        stream = stack(model.block, model.embed(tokens))
    else:
        table = model.token if encoder.token is None else encoder.token
        source = encoder.first(table, tokens)
        source_length = tokens.shape[1]
        bias_HSS = encoder.bias(source_length, source_length)
        e_BSD = stack(encoder.block, source, bias_HSS, label="encoder ")

        tokens = batch["decoder_inputs"]
        length = tokens.shape[1]
        bias_HTT = model.bias(length, length)
        stream = stack(model.block, model.embed(tokens), bias_HTT, encoder.norm(e_BSD))
    nll = optax.softmax_cross_entropy_with_integer_labels(model.read(stream), batch["targets"])
    return jnp.mean(nll), outputs


class Mappings(NamedTuple):
    """Measurements of one model at one moment, float32 [] by mapping.

    All but `parts` are root mean squares over layers, tokens and entries.

    Attributes:
        signal: Outputs of the mappings.
        speed: Speeds with which the mappings' own weights change the outputs. Weights move by SGD
            with learning rates at which every weight in every layer lowers the loss equally.
        backward: Backward signals: gradients of the loss with respect to the outputs.
        parts: Fall of the loss by each weight under the preset's own learning rates: learning rate
            times squared gradient norm, summed over layers.
    """

    signal: Arrays
    speed: Arrays
    backward: Arrays
    parts: Arrays


def measure(
    definition: Definition, params: Arrays, factors: Factors, batch: Batch, *, masked: bool = True
) -> Mappings:
    """Measure all mappings of a model on one batch, by one VJP and one JVP.

    The function is pure: it can be compiled by `jax.jit`, or mapped over seeds.

    Args:
        definition: Definition of a transformer of the zoo with an untied readout. An
            encoder-decoder has two embedding tables.
        factors: Multipliers of the forward pass, and learning rates of SGD for `Mappings.parts`.
        batch: `inputs` and `targets`, and `decoder_inputs` if there is an encoder.
        masked: Whether the attention of a causal model is masked, so that positions see no later
            positions.
    """

    def loss(params: Arrays, zeros: Arrays, hold: Hold = lambda x: x) -> tuple[jax.Array, Arrays]:
        model = definition.model(params, factors.multiplier, factors.forward)
        return forward(model, batch, zeros, hold, masked=masked)

    shapes = jax.eval_shape(lambda p: loss(p, {})[1], params)
    # The gradient with respect to a zero that is added to an output is the backward signal there.
    zeros = {}
    for name, leaf in shapes.items():
        zeros[name] = jnp.zeros(leaf.shape, leaf.dtype)
    (gradients, signals), outputs = jax.grad(loss, argnums=(0, 1), has_aux=True)(params, zeros)
    flow: Arrays = {}
    parts: Arrays = {}
    for name, g in gradients.items():
        spec = definition.specs[name]
        layers = definition.sizes[spec.blocks] if spec.stacked else 1
        squares = jnp.sum(g.reshape(layers, -1) ** 2, axis=1)
        # Gains and biases do not move, because theory covers only the matrices of the mappings.
        moves = name in NAMES or name.endswith("block.mlp.gate")
        # rate = 1 / (layers ‖∇‖²) takes equal parts off the loss; a weight without gradient stays.
        rate = jnp.where(squares > 0, 1 / layers / squares, 0.0) * moves
        if spec.stacked:
            trailing = [1] * (g.ndim - 1)
            flow[name] = -g * rate.reshape(-1, *trailing)
        else:
            flow[name] = -g * rate[0]
        if name in NAMES:
            parts[NAMES[name]] = jnp.sum(factors.lr[name] * squares)
    # stop_gradient on every input leaves only the speed that a mapping's own weights cause.
    _, speeds = jax.jvp(lambda p: loss(p, {}, jax.lax.stop_gradient)[1], (params,), (flow,))

    stacks = ("", "encoder ") if "encoder_layers" in definition.sizes else ("",)
    for stack in stacks:
        stream = outputs[f"{stack}stream"]
        # The sum of all branches, relative to the RMS of the stream, by which the readout's norm
        # divides.
        outputs[f"{stack}branches"] = (stream - outputs[f"{stack}embedding"]) / rms(stream)
    signal = jax.tree.map(rms, dict(outputs))
    speed = jax.tree.map(rms, dict(speeds))
    backward = jax.tree.map(rms, dict(signals))
    return Mappings(signal, speed, backward, parts)


def grown(model: ModelConfig, dimension: str, count: int) -> list[TransformerConfig]:
    """Return `count` models in which one dimension, such as "d_k" or "heads", doubles alone.

    The smallest model is large enough that slopes are close to the exponents of the limit.

    Args:
        model: Model with the structure to measure. The results have as many key heads as query
            heads, an untied readout, and a separate embedding table for an encoder.
        dimension: Dimension that grows, one of `mupax.presets.analysis.desiderata.growths`.
            "positions" is for models of text only.
    """
    start: Any = check.smallest(dataclasses.replace(model, value_dim=None))  # pyright: ignore[reportCallIssue]
    models = []
    for k in range(count):
        sizes = _sizes(dimension, 2**k, denoises=model.denoises, text=model.task == "tokens")
        models.append(dataclasses.replace(start, **sizes))
    return models


def _sizes(dimension: str, factor: int, *, denoises: bool, text: bool) -> dict[str, Any]:
    """Return the config fields of a model whose `dimension` is `factor` times the smallest size.

    Args:
        dimension: Dimension that grows, one of `mupax.presets.analysis.desiderata.growths`.
        denoises: Whether the model is an encoder-decoder (`ModelConfig.denoises`).
        text: Whether the model reads tokens and not images.
    """
    sizes: dict[str, Any] = {
        "width": _WIDTH,
        "num_heads": _HEADS,
        "head_dim": _DIM,
        "value_dim": _DIM,
        "num_kv_heads": None,
        "depth": 2,
    }
    hidden = _HIDDEN
    if text:
        sizes |= {"vocab_size": 512, "seq_len": _TOKENS, "tied": False}
    else:
        sizes |= {"num_classes": 512}
    if denoises:
        sizes |= {"shared": False, "encoder_depth": 2}

    # With an encoder, slopes are close to theory's exponents only from twice the width on.
    divisor = 1 if denoises else 2
    # The studies of tokens have fewer tokens than d_model and more than d_k. They have one layer,
    # because attention mixes tokens, which are then no longer independent in the next layer.
    token_sizes = {"width": 1024, "head_dim": 16, "value_dim": 16, "depth": 1, "vocab_size": 4096}
    match dimension:
        case "d_k":
            sizes["head_dim"] *= factor
        case "d_v":
            sizes["value_dim"] *= factor
        case "d_ff":
            hidden *= factor
        case "d_model":
            sizes["width"] = _WIDTH // divisor * factor
        case "heads":
            sizes["num_heads"] *= factor
        case "width":
            sizes["num_heads"] = _HEADS // divisor * factor
            sizes["width"] = _WIDTH // divisor * factor
            hidden = _HIDDEN // divisor * factor
        case "positions":
            sizes |= {**token_sizes, "seq_len": 64 * factor}
        case "targets":
            sizes |= {**token_sizes, "target_len": 64 * factor, "encoder_depth": 1}
        case "depth":
            sizes["depth"] *= 4 * factor
        case "encoder_depth":
            sizes["encoder_depth"] = 8 * factor
    # Set last, because `match` may have changed the width or the hidden size.
    sizes["mlp_ratio"] = hidden / sizes["width"]
    return sizes


def batch(model: ModelConfig, dimension: str) -> dict[str, np.ndarray]:
    """Return the random batch on which a model is measured, without padding.

    It has the first 2 examples of `check.even_batch`, or 1 example if `dimension` is in
    `OF_TOKENS`. So few examples keep the number of tokens below the width.

    Args:
        model: Model from `grown`.
        dimension: Dimension that grows, one of `mupax.presets.analysis.desiderata.growths`.
    """
    examples = 1 if dimension in OF_TOKENS else 2
    arrays = {}
    for name, array in check.even_batch(model).items():
        arrays[name] = array[:examples]
    if model.denoises:
        # Padding would make the number of tokens random, and that number is one of the dimensions.
        arrays["input_mask"] = np.ones_like(arrays["inputs"])
    return arrays


def base(smallest: TransformerConfig, dimension: str) -> dict[str, int]:
    """Return the base sizes for presets: those of the smallest model, with two exceptions.

    If depth grows, the base has one layer, so that residual branches are small at every depth. If
    d_k of an encoder-decoder grows, the base has an eighth of the smallest d_k. Attention logits of
    scale 1/d_k are then small at every size. So is the part of the encoder's gradient that comes
    back through keys, whose exponent differs from that of the part through values.

    Args:
        smallest: Smallest model from `grown`.
    """
    sizes = smallest.base_sizes()
    if dimension == "d_k" and smallest.denoises:
        return {**sizes, "head_dim": _DIM // 8}
    if dimension.endswith("depth"):
        blocks = {"layers", "encoder_layers"} & sizes.keys()
        return {**sizes, **dict.fromkeys(blocks, 1)}
    return dict(sizes)


class Series:
    """Models of one structure at growing sizes, each compiled once for all presets.

    Args:
        definitions: Models, each twice as large as the one before in the dimension that grows. A
            slope needs at least two.
        batches: Batch of each of the `definitions`, in their order.
        seeds: Number of initializations of each model, from seeds 0 to `seeds` - 1.
        masked: Whether the attention of a causal model is masked, so that positions see no later
            positions.
    """

    def __init__(
        self,
        definitions: Sequence[Definition],
        batches: Sequence[Mapping[str, Any]],
        seeds: int,
        *,
        masked: bool = True,
    ) -> None:
        self.definitions = definitions
        self._batches = batches
        self._seeds = np.arange(seeds, dtype=np.uint32)
        self._programs = [self._program(definition, masked) for definition in definitions]

    def _program(self, definition: Definition, masked: bool) -> Any:
        """Return a function (seeds, initial stds, factors, batch) -> `Mappings`, arrays [seeds].

        It compiles at its first call.
        """

        def of_seed(seed: Any, stds: Any, numbers: Any, batch: Any) -> Mappings:
            params = definition.initialize(seed, stds)
            return measure(definition, params, numbers, batch, masked=masked)

        # `map` and not `vmap`, so that memory holds one seed at a time.
        return jax.jit(lambda seeds, *arrays: jax.lax.map(lambda s: of_seed(s, *arrays), seeds))

    def slopes(self, preset: Preset) -> dict[str, dict[str, float]]:
        """Measure every size under a preset, and return log-log slopes over the sizes.

        The result has slopes by field of `Mappings`, then by mapping. They are fitted to geometric
        means over seeds. Learning rates are those of the preset for SGD, or for the preset's first
        optimizer if it has no rule for SGD.

        Args:
            preset: Rules, relative to the smallest size, or absolute.
        """
        # The desiderata are defined for the gradient flow of SGD. A preset without a rule for SGD
        # is measured under its first optimizer.
        optimizer = "sgd" if "sgd" not in preset.no_rule else preset.optimizers[0]
        records = []
        programs = zip(self._programs, self.definitions, self._batches, strict=True)
        for program, model, batch in programs:
            numbers = factors.resolve(preset, model, optimizer, "independent")
            stds = factors.init_stds(preset, model)
            measured = jax.device_get(program(self._seeds, stds, numbers, batch))
            records.append(measured._asdict())

        # Sizes double, so their log2 are consecutive whole numbers. Centered ones need no intercept
        # in the fit.
        x = np.arange(len(records)) - (len(records) - 1) / 2
        slopes: dict[str, dict[str, float]] = {}
        for field, mappings in records[0].items():
            slopes[field] = {}
            for name in mappings:
                means = []
                for record in records:
                    # Geometric, because slopes are of logs and a single seed may be far off.
                    means.append(np.exp(np.mean(np.log(record[field][name]))))
                slopes[field][name] = float(x @ np.log2(means) / (x @ x))
        return slopes


def compared(
    preset: Preset,
    dimension: str,
    slopes: Mapping[str, Mapping[str, float]],
    *,
    encoder: bool = False,
) -> dict[str, tuple[Cell, Cell]]:
    """Return (theory, measurement) for each desideratum.

    Keys are "signal", "speed", "balance" and "loss decay". If theory has no exponent, the
    measurement is theory's cell, too.

    Args:
        dimension: Dimension that grows, one of `mupax.presets.analysis.desiderata.growths`.
        slopes: Measured slopes, from `Series.slopes`.
        encoder: True if the model has an encoder in addition to its decoder.
    """
    expected = theory.desiderata(preset, dimension, encoder=encoder)
    # The largest of many noisy exponents is biased upwards. The reference of balance is therefore
    # the mean over the weights whose exponent is the largest in theory.
    top = []
    for name, x in expected["balance"].exponents.items():
        if not x:
            top.append(slopes["parts"][name])
    top_mean = sum(top) / max(len(top), 1)
    balance = {}
    for name, x in slopes["parts"].items():
        balance[name] = x - top_mean
    measured = {
        "signal": slopes["signal"],
        "speed": slopes["speed"],
        "balance": balance,
        "loss decay": slopes["parts"],
    }

    cells = {}
    for column, cell in expected.items():
        measured_cell = cell
        if cell.exponents:
            exponents = {name: measured[column][name] for name in cell.exponents}
            measured_cell = theory.cell(exponents, BAND)
        cells[column] = (cell, measured_cell)
    return cells


def apart(expected: Cell, measured: Cell) -> dict[str, float]:
    """Return measured minus theoretical exponents by mapping, only differences above `BAND`."""
    gaps = {}
    for name, exponent in expected.exponents.items():
        gap = measured.exponents[name] - exponent
        if abs(gap) > BAND:
            gaps[name] = gap
    return gaps


def measured(
    model: ModelConfig,
    presets: Sequence[Callable[[Mapping[str, int]], Preset]],
    *,
    count: int,
    seeds: int,
    dimensions: Collection[str] | None = None,
) -> list[Row]:
    """Measure exponents of presets as dimensions grow, and compare them with theory.

    The models of a dimension are compiled once for all presets.

    Args:
        presets: Functions that return a preset for given base sizes, by axis.
        count: Number of sizes of a dimension, each twice the one before. At least 2.
        seeds: Number of initializations of each model, from seeds 0 to `seeds` - 1.
        dimensions: Dimensions to grow; by default all that the model has. "positions" is skipped
            for a model of images.

    Returns:
        A row per preset: (theory, measurement) by dimension, then by desideratum.
    """
    rows: list[Row] = [{} for _ in presets]
    for dimension in dimensions or theory.growths(encoder=model.denoises):
        if dimension == "positions" and model.task != "tokens":
            continue
        models = grown(model, dimension, count)
        batches = [batch(grown_model, dimension) for grown_model in models]
        definitions = [definition(grown_model) for grown_model in models]
        series = Series(definitions, batches, seeds, masked=dimension not in OF_TOKENS)
        for row, make_preset in zip(rows, presets, strict=True):
            preset = make_preset(base(models[0], dimension))
            slopes = series.slopes(preset)
            row[dimension] = compared(preset, dimension, slopes, encoder=model.denoises)
    return rows


def table(row: Row) -> list[list[str]]:
    """Return the table of one preset's results as text: a header, and a line per dimension.

    Cells are "theory | measurement". The last column has the mappings whose exponents differ by
    more than `BAND`, with the differences.
    """
    lines = [["dimension", "scales", *theory.COLUMNS, "apart"]]
    for dimension, cells in row.items():
        gaps = []
        for expected, measurement in cells.values():
            for name, gap in apart(expected, measurement).items():
                gaps.append(f"{name} {gap:+.2f}")
        can_scale = all(expected.holds for expected, _ in cells.values())
        texts = [cell_text(*cells[column]) for column in theory.COLUMNS]
        line = [dimension, "can" if can_scale else "cannot", *texts, ", ".join(gaps) or "-"]
        lines.append(line)
    return lines


def cell_text(expected: Cell, measurement: Cell) -> str:
    """Return theory and measurement as text, such as "yes | -0.03" or "no: q, k -0.5 | -0.51".

    "yes" means that theory says the desideratum holds, and the measured exponent farthest from 0
    follows. "no" names the mappings that break it, with theory's exponent and the mean of the
    measured ones. If theory has no exponent, return the reason.
    """
    if expected.exponent is None:
        return expected.why
    if expected.holds:
        return f"yes | {max(measurement.exponents.values(), key=abs):+.2f}"
    mean = sum(measurement.exponents[name] for name in expected.of) / len(expected.of)
    return f"no: {expected.names} {expected.exponent:+.3g} | {mean:+.2f}"


def main(config: Config, *, count: int, seeds: int, path: str | None, dry_run: bool = False) -> int:
    """Run `mupax check MODEL --desiderata`: measure all dimensions, and print a table.

    Return 0 if theory and measurement agree in every cell, otherwise 1. A dry run returns 0.

    Args:
        config: Run with the model and the preset.
        count: Number of sizes of each dimension, each twice the one before.
        seeds: Number of initializations of each model, from seeds 0 to `seeds` - 1.
        path: JSON file to write the exponents to, in an existing folder. An existing file is
            replaced. `None` writes none.
        dry_run: Print what theory says, and measure nothing.

    Raises:
        ConfigError: The model is no transformer, or its blocks have other mappings.
    """
    model = transformer(config.model, "cutting blocks into mappings")
    _refuse_other_mappings(model)

    def make_preset(base: Mapping[str, int]) -> Preset:
        absolute = preset_for(dataclasses.replace(config.preset, base=None), model)
        return absolute if absolute.baseless else dataclasses.replace(absolute, base=dict(base))

    if dry_run:
        print(terminal.table(theory.rows(make_preset({}), encoder=model.denoises)))
        return 0

    (row,) = measured(model, [make_preset], count=count, seeds=seeds)
    label = make_preset({}).label
    terminal.say(f"{config.recipe} under {label}: exponent of each dimension, theory | measured")
    print(terminal.table(table(row)))
    if path:
        Path(path).write_text(disk.json_text(to_json(row), indent=2) + "\n")

    for cells in row.values():
        if any(apart(expected, measurement) for expected, measurement in cells.values()):
            return 1
    return 0


def _refuse_other_mappings(model: TransformerConfig) -> None:
    """Raise ConfigError if the model's blocks have mappings that `BlockProbe` does not have."""
    plain_values = {
        "parallel": False,
        "window": None,
        "post_norm": False,
        "attention_softcap": None,
        "logit_softcap": None,
    }
    for field in dataclasses.fields(model):
        if field.name not in plain_values:
            continue
        value = getattr(model, field.name)
        plain_value = plain_values[field.name]
        if value != plain_value:
            raise ConfigError(
                f"model.{field.name} is {value}, and the mappings that a block is cut into are "
                f"those of one without; write {field.name} {plain_value}"
            )


def to_json(row: Row) -> dict[str, Any]:
    """Return all exponents as [theory, measured], by dimension, then desideratum, then mapping."""
    content: dict[str, Any] = {}
    for dimension, cells in row.items():
        content[dimension] = {}
        for column, (expected, measurement) in cells.items():
            pairs = {}
            for name, exponent in expected.exponents.items():
                pairs[name] = [exponent, round(measurement.exponents[name], 4)]
            content[dimension][column] = pairs
    return content
