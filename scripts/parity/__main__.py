"""`python -m scripts.parity`: logits of the same weights here and in `transformers`, both ways, for every family.

Models have random weights: every matrix, gain and bias its own numbers. `in` reads a file that transformers wrote, `out`
lets transformers read a file written from a model under a preset, at a size other than the preset's base. `--write` puts
the table into docs/howto/huggingface.md. Needs torch and transformers (`make parity` installs them).
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
"""mup and depth-mup are taken relative to the family's proxy; u-mup has absolute numbers."""

BASES = {"decoder": "lm-proxy", "vit": "vit-proxy", "encoder-decoder": "ed-proxy"}


class Row(NamedTuple):
    """One comparison."""

    model: str
    way: str
    preset: str
    largest: float
    """Largest |logit|."""
    difference: float
    """Largest |difference| of a logit, float32."""


def cases() -> list[tuple[str, str, str]]:
    """Model, way and preset of every comparison; a preset that has no rule for the model is left out, and of variants a form."""
    comparisons = []
    for model, config in MODELS.items():
        for name in PRESETS:
            if name == "u-mup" and (config.tied_readout or config.denoises):
                continue
            if name == "mup, mean-field form" and model in VARIANTS:
                continue
            comparisons += [(model, way, name) for way in ("in", "out")]
    return comparisons


def measure(model: str, way: str, preset: str, folder: Path) -> Row:
    """One comparison, in an empty folder."""
    config = {**MODELS, **WRITTEN}[model]
    preset_config = PRESETS[preset]
    if preset_config.name in ("mup", "depth-mup"):
        preset_config = replace(preset_config, base=BASES[config.family])
    built, parameterization = definition(config), preset_for(preset_config, config)
    factors = resolve(parameterization, built, parameterization.optimizers[0])
    theirs_at, ours_at = folder / "theirs", folder / "ours"
    if way == "in":
        random_transformers(config, theirs_at)
        source = trained.read(theirs_at)
        assert source.model == config, (source.model, config)
        files.write_imported(source, preset_config, ours_at, "random")
        params: Any = transplant.place(trained.read(ours_at), built, factors)
    else:
        params = random_params(built, init_stds(parameterization, built))
        plain = fold.absorb_multipliers(params, fold.scales(built, factors))
        record = pretrained.plain.preset_record(preset_config, parameterization, built, factors)
        files.write_huggingface(
            pretrained.WeightsSource(
                config, plain, {name: np.ones(()) for name in plain}, record, []
            ),
            theirs_at,
            "float32",
        )
    inputs = inputs_of(config)
    ours = np.asarray(
        jax.jit(built.apply)(params, factors.multiplier, factors.forward, *map(jnp.asarray, inputs))
    )
    theirs = transformers_logits(theirs_at, *inputs)
    return Row(model, way, preset, float(np.abs(theirs).max()), float(np.abs(ours - theirs).max()))


def inputs_of(config: TransformerConfig, batch: int = 3) -> tuple[np.ndarray, ...]:
    """Random tokens [B, T], images [B, size, size, channels], or an encoder's tokens, their mask and a decoder's tokens."""
    random = np.random.default_rng(1)
    if isinstance(config, ImageModel):
        return (
            random.standard_normal(
                (batch, config.image_size, config.image_size, config.channels)
            ).astype(np.float32),
        )
    vocab, length = config.sizes()["vocab"], config.example()["inputs"].shape[0]
    tokens = random.integers(vocab, size=(batch, length), dtype=np.int32)
    if not isinstance(config, EncoderDecoderConfig):
        return (tokens,)
    mask = (np.arange(length) < np.array([[length], [length // 2], [3]])).astype(np.int32)
    return tokens, mask, random.integers(vocab, size=(batch, config.targets), dtype=np.int32)


def random_params(built: Definition, stds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Parameters of initial size; gains and biases are random too."""
    random = np.random.default_rng(0)

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        std, normal = (
            stds[name].reshape(-1, *[1] * (len(shape) - 1)),
            random.standard_normal(shape, np.float32),
        )
        return std + 0.2 * normal if built.specs[name].role in VECTORS else std * normal

    return {
        name: draw(name, leaf.shape).astype(np.float32) for name, leaf in built.abstract.items()
    }


def random_transformers(config: TransformerConfig, folder: Path) -> None:
    """A model of transformers with random weights, saved as it saves them."""
    import torch
    from transformers import AutoConfig

    fields = huggingface.to_huggingface(config)
    settings = AutoConfig.for_model(fields.pop("model_type"), **fields)
    model, random = _auto(settings).from_config(settings), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, value in model.named_parameters():
            noise = torch.randn(value.shape, generator=random)
            gain = name.endswith("weight") and value.ndim == 1
            value.copy_(
                1 + 0.2 * noise
                if gain
                else noise * (0.2 if value.ndim == 1 else value.shape[-1] ** -0.5)
            )
        for stack in (
            (model.model.encoder, model.model.decoder)
            if isinstance(config, EncoderDecoderConfig) and config.embedding_norm
            else ()
        ):
            stack.embed_tokens.weight.copy_(
                model.model.shared.weight
            )  # later versions tie all tables or none
    model.save_pretrained(folder)


def transformers_logits(folder: Path, inputs: np.ndarray, *extra_inputs: np.ndarray) -> np.ndarray:
    """Logits of a folder's model by transformers, float32; images are turned to its channels-first order."""
    import torch
    from transformers import AutoConfig

    kind = _auto(AutoConfig.from_pretrained(folder))
    with torch.no_grad():
        model = kind.from_pretrained(folder, dtype=torch.float32).eval()
        if inputs.ndim == 4:
            return model(torch.from_numpy(inputs.transpose(0, 3, 1, 2).copy())).logits.numpy()
        names = ("input_ids", "attention_mask", "decoder_input_ids")
        tokens = {
            name: torch.from_numpy(x.astype(np.int64))
            for name, x in zip(names, (inputs, *extra_inputs), strict=False)
        }
        return model(**tokens).logits.numpy()


def _auto(settings: Any) -> Any:
    """The class of transformers that makes a config's model."""
    import transformers

    kind = settings.architectures[0].removeprefix(
        settings.__class__.__name__.removesuffix("Config").removesuffix("Text")
    )
    return {
        "LMHeadModel": transformers.AutoModelForCausalLM,
        "ForCausalLM": transformers.AutoModelForCausalLM,
        "ForImageClassification": transformers.AutoModelForImageClassification,
        "ForConditionalGeneration": transformers.AutoModelForSeq2SeqLM,
    }[kind]


def table(rows: Sequence[Row]) -> str:
    """Return a Markdown table with one line per model: the largest differences over its presets."""
    lines = [
        "| model | read from `transformers` | written for `transformers` |",
        "|---|---|---|",
    ]
    for model in dict.fromkeys(row.model for row in rows):
        own = [row for row in rows if row.model == model]
        read = max(row.difference for row in own if row.way == "in")
        written = max(row.difference for row in own if row.way == "out")
        lines.append(f"| {model} | {read:.1e} | {written:.1e} |")
    return "\n".join(lines)


def recorded() -> list[Row]:
    """Return the committed rows."""
    return [Row(**row) for row in json.loads(RECORD.read_text())["rows"]]


@dataclass(frozen=True)
class Options:
    """Flags of the command."""

    write: Switch = False
    """Write the rows and the table of the page."""


def main() -> None:
    """Measure every case and print the table."""
    args = harness.parse(Options)
    rows = []
    for case in cases():
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(*case, Path(folder)))
    text = table(rows)
    print(text)
    if args.write:
        versions = {
            name: importlib.metadata.version(name).split("+")[0]
            for name in ("transformers", "torch", "jax")
        }
        about = {"command": "python -m scripts.parity --write", "versions": versions}
        content = harness.with_rows(about, "rows", [row._asdict() for row in rows])
        RECORD.write_text(content)
        DOCUMENT.write_text(replaced(DOCUMENT.read_text(), "parity", text))


if __name__ == "__main__":
    main()
