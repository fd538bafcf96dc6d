"""`mupax verify`'s readers of other code's configs find in them what the published tuned presets give.

The readers were written without these presets. The files below have the fields of the sources' own configs that a reader takes.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from mupax import presets
from mupax.presets.tuned import find, published
from mupax.presets.verify import formats
from tests.fixtures.commands import command
from tests.fixtures.published_sources import SOURCES

pytestmark = pytest.mark.core

CEREBRAS = """trainer:
  init:
    model: {{hidden_size: {width}, num_hidden_layers: {layers}, num_heads: {heads}, filter_size: {mlp}, vocab_size: 50257,
      max_position_embeddings: 2048, position_embedding_type: learned, share_embedding_weights: true,
      embedding_initializer: {{std: {std}}}, initializer: {{std: {std}}}, output_layer_initializer: {{std: {std}}},
      ffn_output_layer_initializer: {{std: {std}}}, mup_base_hidden_size: 256, mup_base_filter_size: 1024,
      scale_qk_dot_by_d: true, output_logits_alpha: 1.0, embeddings_scale: 10}}
    optimizer: {{AdamW: {{betas: [0.9, 0.95], eps: 1.0e-08, weight_decay: 0.1}}}}
    schedulers: [{{SequentialLR: {{schedulers: [{{LinearLR: {{initial_learning_rate: 0.0, end_learning_rate: 0.006}}}}]}}}}]
"""
OLMO = """model: {{d_model: {width}, n_heads: {heads}, n_layers: {layers}, mlp_hidden_size: {mlp}, weight_tying: false, rope: true,
  layer_norm_with_affine: true, vocab_size: 100278, embedding_size: 100352, init_fn: normal, init_std: {std}, activation_type: swiglu}}
optimizer: {{name: adamw, learning_rate: 3.0e-4, weight_decay: 0.1, eps: 1.0e-8, decay_norm_and_bias: true, decay_embeddings: false}}
"""
NANOGPT = "--n_layer={layers} --n_head={heads} --n_embd={width} --init_std={std} --learning_rate=6e-4 --weight_decay=0.1"
FILES = {
    "mup:cerebras-gpt": ("yaml", CEREBRAS, 0.08, 1),
    "sp:olmo2": ("yaml", OLMO, 0.02, 2),
    "sp:nanogpt-gpt2": ("txt", NANOGPT, 0.02, 1),
}
"""Of a preset: the kind of file, its fields, the start deviation, and by how much the file's MLP counts gate and up together."""


def written(use: str, folder: Path, std: float) -> list[Path]:
    """Write a config for each model of a source, and return the files."""
    kind, text, _, doubled = FILES[use]
    paths: list[Path] = []
    for index, table in enumerate(SOURCES[use]()):
        sizes = table.config.base_sizes()
        fields = {"width": sizes["embed"], "layers": sizes["layers"], "heads": sizes["heads"]}
        path = folder / f"{index}.{kind}"
        path.write_text(text.format(**fields, mlp=sizes["mlp"] * doubled, std=std))
        paths.append(path)
    return paths


def differences(use: str, paths: list[Path]) -> list[str]:
    """Return every number that a reader finds and that the preset does not give."""
    tuned = find.find(use)
    preset = presets.get(use)
    wrong: list[str] = []
    for dump, table in zip(formats.read(paths), SOURCES[use](), strict=True):
        sizes = table.config.sizes()
        specs = {spec.group: spec for spec in table.config.parameters().values()}
        assert dump.attention == pytest.approx(preset.logit_scale(sizes))
        if dump.readout is not None:
            assert dump.readout == pytest.approx(table.tied_readout)
        for entry in dump.parameters.values():
            group = "block.query" if entry.role == "block.qkv" else entry.role
            own = published.values(tuned, preset, specs[group], sizes)
            gain = "norm_gain" in group
            for column in ("std", "lr", "wd", "eps", "multiplier"):
                theirs = getattr(entry, column)
                # OLMo decays gains, which the file of the preset says.
                if theirs is None or (gain and column == "wd"):
                    continue
                if not math.isclose(theirs, own[column], rel_tol=1e-9):
                    wrong.append(
                        f"{table.model} {entry.role} {column}: {theirs} and not {own[column]}"
                    )
    return wrong


@pytest.mark.parametrize("use", FILES)
def test_a_reader_finds_in_the_sources_config_what_the_preset_gives(
    use: str, tmp_path: Path
) -> None:
    std = FILES[use][2]
    assert differences(use, written(use, tmp_path, std)) == []
    # The control: the config says something else.
    assert differences(use, written(use, tmp_path, 2 * std))


def test_verify_holds_the_sources_configs_against_the_preset(tmp_path: Path) -> None:
    first, *_, last = map(str, written("mup:cerebras-gpt", tmp_path, 0.08))
    assert command("verify", first, last, "--preset mup:cerebras-gpt").code == 0
    assert command("verify", first, last, "--preset sp").code == 1
