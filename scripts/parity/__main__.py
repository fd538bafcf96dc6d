"""Compare logits of the same weights in mupax and in `transformers`, both ways, for every family.

    python -m scripts.parity [--write]

Models have random weights: every matrix, gain and bias has its own values. `in` reads files that
transformers wrote. `out` lets transformers read files that mupax wrote, from a model under a preset
at another size than the preset's base. `--write` writes docs/evidence/parity.json and the table of
docs/howto/huggingface.md. Needs torch and transformers (`make parity` installs them).
"""

# Torch is optional and in no lock file.
# pyright: reportMissingImports=false
from __future__ import annotations

import importlib.metadata
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mupax.command_line import Switch
from mupax.presets import VECTORS
from mupax.train.config.preset import PresetConfig, preset_for
from mupax.train.core.factors import init_stds, resolve
from mupax.train.reuse import plain as fold
from mupax.train.reuse import source as pretrained
from mupax.train.reuse import trained, transplant
from mupax.train.reuse.huggingface import files
from mupax.zoo.definition import Definition, definition
from mupax.zoo.encoder_decoder.config import EncoderDecoderConfig
from mupax.zoo.families import ImageModel
from mupax.zoo.huggingface import config as huggingface
from mupax.zoo.transformer import TransformerConfig
from scripts import ROOT, harness
from scripts.pages.markdown import replaced
from scripts.parity.models import MODELS, VARIANTS, WRITTEN

DOCUMENT = ROOT / "docs" / "howto" / "huggingface.md"
RECORD = ROOT / "docs" / "evidence" / "parity.json"

PRESETS: dict[str, PresetConfig] = {
    "sp": PresetConfig(name="sp"),
    "mup": PresetConfig(name="mup"),
    "depth-mup": PresetConfig(name="depth-mup", gamma0=0.25, beta0=2.0),
    "mup, mean-field form": PresetConfig(name="mup", form="mean-field"),
    "u-mup": PresetConfig(name="u-mup"),
}
"""Presets by the name in the table. mup and depth-mup get a base of `BASES`; u-mup has none."""

BASES = {"decoder": "lm-proxy", "vit": "vit-proxy", "encoder-decoder": "ed-proxy"}
"""Base model of the presets, by family."""


class Row(NamedTuple):
    """Result of one comparison.

    Attributes:
        model: Key of `MODELS` or `WRITTEN`.
        way: "in" if mupax reads a file of transformers, "out" if transformers reads one of mupax.
        preset: Key of `PRESETS`.
        largest: Largest |logit|.
        difference: Largest |difference| of a logit in float32.
    """

    model: str
    way: str
    preset: str
    largest: float
    difference: float


def cases() -> list[tuple[str, str, str]]:
    """Return model, way and preset of every comparison.

    Presets that have no rule for a model are left out, and so is "mup, mean-field form" for the
    models of `VARIANTS`.
    """
    comparisons = []
    for model, config in MODELS.items():
        for name in PRESETS:
            if name == "u-mup" and (config.tied_readout or config.denoises):
                continue  # u-mup has no rule for it
            if name == "mup, mean-field form" and model in VARIANTS:
                continue
            comparisons += [(model, "in", name), (model, "out", name)]
    return comparisons


def measure(model: str, way: str, preset: str, folder: Path) -> Row:
    """Run one comparison of `cases` and return its row.

    Args:
        folder: Empty folder, in which the models are saved.
    """
    config = {**MODELS, **WRITTEN}[model]
    preset_config = PRESETS[preset]
    if preset_config.name in ("mup", "depth-mup"):
        preset_config = replace(preset_config, base=BASES[config.family])
    built = definition(config)
    parameterization = preset_for(preset_config, config)
    factors = resolve(parameterization, built, parameterization.optimizers[0])
    transformers_folder = folder / "theirs"
    mupax_folder = folder / "ours"
    if way == "in":
        random_transformers(config, transformers_folder)
        source = trained.read(transformers_folder)
        # A wrong config could still give equal logits in both.
        assert source.model == config, (source.model, config)
        files.write_imported(source, preset_config, mupax_folder, "random")
        params: Any = transplant.place(trained.read(mupax_folder), built, factors)
    else:
        params = random_params(built, init_stds(parameterization, built))
        plain = fold.absorb_multipliers(params, fold.scales(built, factors))
        record = pretrained.plain.preset_record(preset_config, parameterization, built, factors)
        ones = {name: np.ones(()) for name in plain}
        source = pretrained.WeightsSource(config, plain, ones, record, [])
        files.write_huggingface(source, transformers_folder, "float32")

    inputs = inputs_of(config)
    arrays = [jnp.asarray(array) for array in inputs]
    logits = jax.jit(built.apply)(params, factors.multiplier, factors.forward, *arrays)
    ours = np.asarray(logits)
    theirs = transformers_logits(transformers_folder, *inputs)
    largest = float(np.abs(theirs).max())
    difference = float(np.abs(ours - theirs).max())
    return Row(model, way, preset, largest, difference)


def inputs_of(config: TransformerConfig) -> tuple[np.ndarray, ...]:
    """Return random inputs of a model.

    Returns:
        Tokens [B, T]; images [B, size, size, channels]; or, for an encoder-decoder, the encoder's
        tokens and their mask [B, S], and the decoder's tokens [B, T].
    """
    random = np.random.default_rng(1)
    batch = 3
    if isinstance(config, ImageModel):
        shape = (batch, config.image_size, config.image_size, config.channels)
        return (random.standard_normal(shape).astype(np.float32),)

    vocab = config.sizes()["vocab"]
    length = config.example()["inputs"].shape[0]
    tokens = random.integers(vocab, size=(batch, length), dtype=np.int32)
    if not isinstance(config, EncoderDecoderConfig):
        return (tokens,)
    # A complete text, a half and a short one, so that the mask counts.
    mask = (np.arange(length) < np.array([[length], [length // 2], [3]])).astype(np.int32)
    targets = random.integers(vocab, size=(batch, config.targets), dtype=np.int32)
    return tokens, mask, targets


def random_params(built: Definition, stds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return random parameters with their initial std, and with random gains and biases.

    Args:
        stds: Initial std of each parameter, one for each layer of a stacked one. For gains and
            biases, the mean of their values.
    """
    random = np.random.default_rng(0)
    params = {}
    for name, leaf in built.abstract.items():
        std = stds[name].reshape(-1, *[1] * (len(leaf.shape) - 1))
        normal = random.standard_normal(leaf.shape, np.float32)
        if built.specs[name].role in VECTORS:
            # Gains that are equal, or biases of 0, would hide one that is read wrongly.
            values = std + 0.2 * normal
        else:
            values = std * normal
        params[name] = values.astype(np.float32)
    return params


def random_transformers(config: TransformerConfig, folder: Path) -> None:
    """Save a model of transformers with random weights into a folder, in transformers' format."""
    import torch
    from transformers import AutoConfig

    fields = huggingface.to_huggingface(config)
    settings = AutoConfig.for_model(fields.pop("model_type"), **fields)
    model = _auto(settings).from_config(settings)
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, value in model.named_parameters():
            noise = torch.randn(value.shape, generator=random)
            if value.ndim > 1:
                # Activations keep their size through the layers.
                value.copy_(noise * value.shape[-1] ** -0.5)
            elif name.endswith("weight"):
                value.copy_(1 + 0.2 * noise)  # a gain
            else:
                value.copy_(noise * 0.2)  # a bias
        if isinstance(config, EncoderDecoderConfig) and config.embedding_norm:
            # Later versions of transformers tie all embedding tables or none.
            for stack in (model.model.encoder, model.model.decoder):
                stack.embed_tokens.weight.copy_(model.model.shared.weight)
    model.save_pretrained(folder)


def transformers_logits(folder: Path, inputs: np.ndarray, *extra_inputs: np.ndarray) -> np.ndarray:
    """Return the logits of a saved model by transformers in float32.

    Args:
        inputs: First array of `inputs_of`. Images are transposed to channels first.
        extra_inputs: Mask and decoder tokens of an encoder-decoder.
    """
    import torch
    from transformers import AutoConfig

    model_class = _auto(AutoConfig.from_pretrained(folder))
    with torch.no_grad():
        model = model_class.from_pretrained(folder, dtype=torch.float32).eval()
        if inputs.ndim == 4:
            images = torch.from_numpy(inputs.transpose(0, 3, 1, 2).copy())
            return model(images).logits.numpy()
        names = ("input_ids", "attention_mask", "decoder_input_ids")
        arguments = {}
        for name, array in zip(names, (inputs, *extra_inputs), strict=False):
            arguments[name] = torch.from_numpy(array.astype(np.int64))
        return model(**arguments).logits.numpy()


def _auto(settings: Any) -> Any:
    """Return the auto class of transformers that makes the model of a config."""
    import transformers

    family = settings.__class__.__name__.removesuffix("Config").removesuffix("Text")
    suffix = settings.architectures[0].removeprefix(family)
    return {
        "LMHeadModel": transformers.AutoModelForCausalLM,
        "ForCausalLM": transformers.AutoModelForCausalLM,
        "ForImageClassification": transformers.AutoModelForImageClassification,
        "ForConditionalGeneration": transformers.AutoModelForSeq2SeqLM,
    }[suffix]


def table(rows: Sequence[Row]) -> str:
    """Return a Markdown table with a row per model and its largest differences over the presets."""
    lines = [
        "| model | read from `transformers` | written for `transformers` |",
        "|---|---|---|",
    ]
    for model in dict.fromkeys(row.model for row in rows):
        differences: dict[str, list[float]] = {"in": [], "out": []}
        for row in rows:
            if row.model == model:
                differences[row.way].append(row.difference)
        read = max(differences["in"])
        written = max(differences["out"])
        lines.append(f"| {model} | {read:.1e} | {written:.1e} |")
    return "\n".join(lines)


def recorded() -> list[Row]:
    """Return the rows of docs/evidence/parity.json."""
    return [Row(**row) for row in json.loads(RECORD.read_text())["rows"]]


@dataclass(frozen=True)
class Options:
    """Flags of the command."""

    write: Switch = False
    """Write the record and the table of the page."""


def main() -> None:
    """Run every comparison, print the table and, with `--write`, write record and page."""
    args = harness.parse(Options)
    rows = []
    for case in cases():
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(*case, Path(folder)))
    text = table(rows)
    print(text)
    if args.write:
        versions = {}
        for name in ("transformers", "torch", "jax"):
            # The version of a build of torch ends in +cpu or another device.
            versions[name] = importlib.metadata.version(name).split("+")[0]
        about = {"command": "python -m scripts.parity --write", "versions": versions}
        content = harness.with_rows(about, "rows", [row._asdict() for row in rows])
        RECORD.write_text(content)
        DOCUMENT.write_text(replaced(DOCUMENT.read_text(), "parity", text))


if __name__ == "__main__":
    main()
