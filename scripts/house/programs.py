"""Digests of lowered programs: train step, evaluation step and logits of 140 odd-sized configs."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax

from mupax.train.config.data import TransformsConfig
from mupax.train.config.run import (
    Config,
    DataConfig,
    EmaConfig,
    MeshConfig,
    OptimizerConfig,
    PresetConfig,
)
from mupax.train.core import loss, step
from mupax.train.core.program import Program, assemble
from mupax.train.core.step import _unplaced
from mupax.train.parallel.sharding import abstract_batch
from mupax.zoo.configs import DecoderConfig, ViTConfig
from mupax.zoo.encoder_decoder.config import EncoderDecoderConfig
from mupax.zoo.transformer import RoutingConfig
from scripts.house.digests import digest

DECODER = DecoderConfig(
    width=24,
    depth=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=4,
    mlp_ratio=2,
    vocab_size=16,
    seq_len=8,
    qk_norm=True,
)
VIT = ViTConfig(
    width=20,
    depth=2,
    num_heads=5,
    mlp_ratio=1.3,
    image_size=9,
    patch_size=3,
    channels=2,
    num_classes=7,
)
ENCODER_DECODER = EncoderDecoderConfig(
    width=24, depth=2, num_heads=6, mlp_ratio=2, vocab_size=16, seq_len=8
)
TEXT = Config(
    recipe="tiny",
    model=DECODER,
    data=DataConfig(name="text:x", batch_size=16),
    mesh=MeshConfig(data=1),
    steps=7,
    preset=PresetConfig(name="mup", base="lm-proxy"),
    optimizer=OptimizerConfig(peak_lr=0.02, warmup_steps=3),
)
IMAGES = dataclasses.replace(
    TEXT,
    model=VIT,
    data=DataConfig(name="images:x", batch_size=16),
    preset=PresetConfig(name="mup", base="vit-proxy"),
)
SPANS = dataclasses.replace(
    TEXT,
    model=ENCODER_DECODER,
    data=DataConfig(name="text:x", batch_size=16, noise="infilling"),
    preset=PresetConfig(name="mup", base="ed-proxy"),
)
MESHES = {
    "data 8": MeshConfig(data=8),
    "fsdp 8": MeshConfig(data=1, fsdp=8),
    "data 2 fsdp 4": MeshConfig(data=2, fsdp=4),
    "tensor 2": MeshConfig(data=4, tensor=2),
    "fsdp 2 tensor 2": MeshConfig(data=2, fsdp=2, tensor=2),
    "sequence 2": MeshConfig(data=4, sequence=2),
    "fsdp 2 sequence 2 tensor 2": MeshConfig(data=1, fsdp=2, sequence=2, tensor=2),
}
SMALL_CHUNKS = {"LEAST_ROWS": 5, "PART_LOGITS": 100, "LANES": 5}
"""Constants of `loss`, so small that the cross-entropy of tiny models is computed in chunks."""
NOT_CONTEXT = ("inputs", "targets", "weights", "labels")
"""Entries of a batch that are not passed to the model as further arguments."""


def record() -> dict[str, Any]:
    """Lower the program of each config, and return a digest of its StableHLO text."""
    with_small_chunks()
    digests: dict[str, Any] = {}
    for name, config in cases().items():
        digests[name] = digest(lowered(program_of(config)))
        # Otherwise the programs of all cases stay in memory.
        jax.clear_caches()
    return digests


def with_small_chunks() -> None:
    """Let the loss be computed in small chunks (`SMALL_CHUNKS`) for the rest of this process."""
    loss.CHUNK_LOGITS["cpu"] = 1
    for name, value in SMALL_CHUNKS.items():
        setattr(loss, name, value)


def program_of(config: Config) -> Program:
    """Return the assembled program of a config, on as many devices as its mesh needs."""
    mesh = config.mesh
    return assemble(config, jax.devices()[: mesh.data * mesh.fsdp * mesh.sequence * mesh.tensor])


def lowered(program: Program) -> str:
    """Return the StableHLO text of the training step, the evaluation step and the logits."""

    def evaluate(params: Any, inputs: Any, batch: Any) -> Any:
        return step.batch_sums(program.definition, params, inputs, batch, layout=program.layout)

    def logits(params: Any, inputs: Any, batch: Any) -> Any:
        context = {name: value for name, value in batch.items() if name not in NOT_CONTEXT}
        return step.logits_of(
            program.definition, params, inputs, batch["inputs"], layout=program.layout, **context
        )

    config = program.config
    batch = abstract_batch(config.model, config.eval_batch_size, config.data)
    arguments = (_unplaced(program.abstract.evaluated), program.abstract_inputs(), batch)
    texts = [program.trace_train().lower().as_text()]
    texts += [jax.jit(function).lower(*arguments).as_text() for function in (evaluate, logits)]
    return "\n".join(texts)


def with_model(config: Config, **fields: Any) -> Config:
    """Return the config with fields of its model replaced."""
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **fields))


def with_compute(config: Config, **fields: Any) -> Config:
    """Return the config with fields of its model's `compute` replaced."""
    return with_model(config, compute=dataclasses.replace(config.model.compute, **fields))


def with_data(config: Config, **fields: Any) -> Config:
    """Return the config with fields of its data replaced."""
    return dataclasses.replace(config, data=dataclasses.replace(config.data, **fields))


def cases() -> dict[str, Config]:
    """Return every config by name."""
    return {**on_one_device(), **ways_of_the_loss(), **on_meshes()}


def on_one_device() -> dict[str, Config]:
    """Return configs for one device that differ in model, step, data, remat and optimizer."""
    replace = dataclasses.replace
    experts = with_model(TEXT, experts=4, qk_norm=False, num_kv_heads=None, head_dim=None)
    window = with_model(TEXT, window=3, full_every=3, depth=7)
    short_window = with_model(TEXT, window=3, full_every=3, depth=2)
    even_window = with_model(TEXT, window=3, full_every=2, depth=4)
    centered = with_model(TEXT, centered=True)
    dropping = with_model(IMAGES, drop_path=0.2)
    smooth = with_data(IMAGES, transforms=TransformsConfig(label_smoothing=0.1))
    averaged = EmaConfig(decay=0.9)
    configs = {
        "plain": TEXT,
        "accumulated": replace(TEXT, accumulation_steps=4),
        "z-loss": replace(TEXT, z_loss=0.5),
        "z-loss, accumulated": replace(TEXT, z_loss=0.5, accumulation_steps=2),
        "centred": centered,
        "centred, z-loss, accumulated": replace(centered, z_loss=0.1, accumulation_steps=2),
        "tied": with_model(TEXT, tied=True),
        "tied, centred": with_model(TEXT, tied=True, centered=True),
        "averaged": replace(TEXT, ema=averaged),
        "frozen norms": replace(TEXT, freeze=("norm.*",)),
        "scanned": with_compute(TEXT, layers="scan"),
        "unrolled": with_compute(TEXT, layers="unrolled"),
        "deep": with_model(TEXT, depth=17),
        "window": window,
        "window, scanned": with_compute(window, layers="scan"),
        "window, scanned, short": with_compute(short_window, layers="scan"),
        "window, scanned, even": with_compute(even_window, layers="scan"),
        "window, scanned, remat": with_compute(window, layers="scan", remat="dots"),
        "window, unrolled, remat": with_compute(window, layers="unrolled", remat="dots"),
        "bfloat16": with_compute(TEXT, dtype="bfloat16", param_dtype="bfloat16"),
        "bfloat16 products": with_compute(TEXT, dtype="bfloat16"),
        "softcaps": with_model(TEXT, logit_softcap=3.0, attention_softcap=5.0),
        "documents": with_data(TEXT, document_mask=True),
        "documents, scanned": with_compute(with_data(TEXT, document_mask=True), layers="scan"),
        "experts": experts,
        "experts, scanned": with_compute(experts, layers="scan"),
        "experts, z-loss, accumulated": replace(experts, accumulation_steps=2, z_loss=0.1),
        "experts, balanced by a bias": with_model(experts, routing=RoutingConfig(balance="bias")),
        "experts, window, scanned": with_compute(
            with_model(experts, window=3, full_every=3, depth=7), layers="scan"
        ),
        "experts, centred": with_model(experts, centered=True),
        "images": IMAGES,
        "images, accumulated": replace(IMAGES, accumulation_steps=4),
        "images, drop path": dropping,
        "images, drop path, accumulated, averaged": replace(
            dropping, accumulation_steps=2, ema=averaged
        ),
        "images, drop path, scanned, centred": with_compute(
            with_model(dropping, centered=True), layers="scan"
        ),
        "images, smoothed": smooth,
        "images, smoothed, z-loss, drop path": replace(
            with_model(smooth, drop_path=0.2), z_loss=0.1
        ),
        "encoder-decoder": SPANS,
        "encoder-decoder, scanned": with_compute(SPANS, layers="scan"),
    }
    for remat, layers in itertools.product(
        ("none", "dots", "attention", "block", "offload"), ("scan", "unrolled")
    ):
        configs[f"remat {remat}, {layers}"] = with_compute(TEXT, remat=remat, layers=layers)
    for optimizer in ("sgd", "momentum", "adam", "lion", "muon"):
        changed = replace(TEXT.optimizer, name=optimizer, weight_decay=0.01, clip_norm=1.0)
        configs[f"optimizer {optimizer}"] = replace(TEXT, optimizer=changed)
    return configs


def ways_of_the_loss() -> dict[str, Config]:
    """Return configs of every cross-entropy implementation, on every mesh, for two models."""
    centered = with_model(TEXT, centered=True, logit_softcap=3.0)
    models = {
        "": TEXT,
        ", centred": dataclasses.replace(centered, z_loss=0.1, accumulation_steps=2),
    }
    meshes = {"one device": MeshConfig(data=1), **MESHES}
    configs: dict[str, Config] = {}
    for way, (name, mesh), (model, config) in itertools.product(
        ("plain", "chunked", "vocab", "auto"), meshes.items(), models.items()
    ):
        chosen = with_compute(config, cross_entropy=way)
        configs[f"loss {way}, {name}{model}"] = dataclasses.replace(chosen, mesh=mesh)
    return configs


def on_meshes() -> dict[str, Config]:
    """Return configs of images, experts and variants of the decoder, on meshes of eight devices."""
    replace = dataclasses.replace
    experts = with_model(TEXT, experts=4, qk_norm=False, num_kv_heads=None, head_dim=None)
    images = with_model(
        IMAGES, width=32, mlp_ratio=2, num_classes=8, image_size=12, patch_size=3, num_heads=8
    )
    frozen = replace(TEXT, freeze=("norm.*", "readout"), accumulation_steps=2)
    configs: dict[str, Config] = {}
    for name, mesh in MESHES.items():
        configs[f"images, {name}"] = replace(images, mesh=mesh)
        if mesh.sequence == 1:  # experts are not split along positions
            configs[f"experts, {name}"] = replace(experts, mesh=mesh)
    for name in ("fsdp 8", "data 2 fsdp 4"):
        mesh = MESHES[name]
        configs[f"scanned, {name}"] = replace(with_compute(TEXT, layers="scan"), mesh=mesh)
        configs[f"bfloat16 gradients, {name}"] = replace(
            TEXT, mesh=replace(mesh, gradient_dtype="bfloat16")
        )
        configs[f"tied, {name}"] = replace(with_model(TEXT, tied=True), mesh=mesh)
        configs[f"frozen, {name}"] = replace(frozen, mesh=mesh)
        configs[f"experts, z-loss, {name}"] = replace(
            experts, z_loss=0.1, accumulation_steps=2, mesh=mesh
        )
    return configs
