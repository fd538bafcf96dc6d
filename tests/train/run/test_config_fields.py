"""No field of a config is dead: a changed value changes the program, its numbers, the data, the run's files, or what a test shows.

`FIELDS` says of every field how that is decided and with which value. A field without an entry fails.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import io
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from mupax.train import data as data_sources
from mupax.train.config.run import (
    CheckpointConfig,
    Config,
    DataConfig,
    DistributedConfig,
    LogConfig,
    MeshConfig,
    OptimizerConfig,
    PresetConfig,
)
from mupax.train.core.program import Program, assemble
from mupax.train.data.text.batches import TokenData
from mupax.train.parallel import distributed
from mupax.train.parallel.processes import place
from mupax.train.run import loop
from mupax.zoo.configs import ComputeConfig, DecoderConfig, ViTConfig
from mupax.zoo.lora.config import LoraConfig
from tests.fixtures.programs import shared_programs
from tests.train.run.test_loop import folder

__all__ = ["folder", "shared_programs"]  # fixtures

TESTS = next(path for path in Path(__file__).resolve().parents if path.name == "tests")

TOKENS = Config(
    recipe="lm-tiny",
    model=DecoderConfig(
        width=16, depth=2, num_heads=2, mlp_ratio=2, vocab_size=256, seq_len=16, compute=ComputeConfig(layers="scan")
    ),
    data=DataConfig(name="text:text.txt", batch_size=8, eval_batch_size=16, eval_examples=30, tokenizer="bytes"),
    preset=PresetConfig(name="depth-mup", base="lm-proxy"),
    optimizer=OptimizerConfig(peak_lr=0.01, weight_decay=0.1, eps=1e-4, warmup_steps=1, schedule="cosine"),
    checkpoint=CheckpointConfig(every_steps=2),
    steps=6,
)  # fmt: skip
RUN = dataclasses.replace(TOKENS, model=dataclasses.replace(TOKENS.model, depth=1), log=LogConfig(samples=False))
WSD = dataclasses.replace(TOKENS, optimizer=OptimizerConfig(schedule="wsd", decay_steps=2))
MUON = dataclasses.replace(TOKENS, optimizer=OptimizerConfig(name="muon"))
ROTARY = dataclasses.replace(TOKENS, model=dataclasses.replace(TOKENS.model, positions="rotary"))
LONG = dataclasses.replace(ROTARY, model=dataclasses.replace(ROTARY.model, rope_scaling="llama3", rope_original_len=16))
EXPERTS = dataclasses.replace(RUN, model=dataclasses.replace(RUN.model, experts=4))
FROZEN = dataclasses.replace(RUN, freeze=("bias",))
ADAPTERS = dataclasses.replace(FROZEN, model=dataclasses.replace(RUN.model, lora=LoraConfig(rank=2)))
IMAGES = dataclasses.replace(
    TOKENS,
    recipe="vit-digits",
    model=ViTConfig(
        width=16, depth=2, num_heads=2, mlp_ratio=2, image_size=8, patch_size=4, channels=1, num_classes=10
    ),
    data=DataConfig(name="digits", batch_size=8),
    preset=PresetConfig(name="mup", base="vit-proxy"),
)  # fmt: skip


def changed(config: Any, path: str, value: Any) -> Any:
    """The config with another value of the field at a dotted path."""
    name, _, rest = path.partition(".")
    return dataclasses.replace(config, **{name: changed(getattr(config, name), rest, value) if rest else value})


# What shows a field. Each gives something that is compared between two configs.


@functools.cache
def program(config: Config) -> Program:
    """The step's program; `same` says whether two are one."""
    return assemble(config)


@functools.cache
def numbers(config: Config) -> str:
    """Digest of the abstract state with its shardings, all numbers the step is given, the mesh and how batches lie on it."""
    run_program = program(config)
    leaves, shape = jax.tree.flatten(run_program.abstract)
    values = [
        (np.asarray(leaf).tobytes(), np.shape(leaf)) for leaf in jax.tree.leaves((run_program.inputs, run_program.stds))
    ]
    mesh = [device.id for device in run_program.mesh.devices.flat], run_program.mesh.shape
    feed = run_program.eval_feed().rows
    parts = [(leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves], shape, values, mesh, feed
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@functools.cache
def jaxpr(config: Config) -> str:
    """The step itself, which takes longest to make."""
    return re.sub(r"0x[0-9a-f]+", "", str(program(config).trace_train().jaxpr))


def same(observe: Callable[[Config], Any], one: Config, other: Config) -> bool:
    """Whether two configs show the same. Steps are traced only where all that they are given is equal."""
    if observe is program:
        return numbers(one) == numbers(other) and jaxpr(one) == jaxpr(other)
    return observe(one) == observe(other)


def start(config: Config) -> bytes:
    """The initial parameters."""
    return b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(assemble(config).initial_state().params))


def data(config: Config) -> str:
    """Digest of the first training batch and of all evaluation batches, and where prepared data lie."""
    source = data_sources.load(config.data, config.model, seed=config.data_seed, note=lambda _: None)
    batches = [source.train_batch(0), *source.eval_batches()]
    base = config.data.data_dir
    prepared = sorted(path.name for path in Path(base).iterdir()) if base else ()
    parts = [
        [(name, array.shape, array.tobytes()) for name, array in sorted(batch.items())] for batch in batches
    ], prepared  # fmt: skip
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@functools.cache
def run(config: Config) -> tuple[list[str], dict[str, Any]]:
    """The files of a run by name, checkpoints among them, and what it prints of its course."""
    text, out = Path("text.txt").absolute(), io.StringIO()
    with tempfile.TemporaryDirectory() as here, contextlib.chdir(here):
        shutil.copy(text, here)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            assert loop.run(config) == 0
        files = {re.sub(r"(/events\.|/checkpoints/\d+/).*", r"\1", str(path)) for path in Path().rglob("*.*")}
        folders = {str(path) for path in Path().rglob("checkpoints/*") if path.name.isdigit()}
        rows = [path.read_text().count("eval_loss") for path in Path().rglob("metrics.jsonl")]
    course = {
        "evaluations": rows,
        "hangs": "watchdog:" in out.getvalue(),
        "lines": bool(re.search(r"(?m)^step +\d", out.getvalue())),
    }
    return sorted(files | folders), course


def slow_run(config: Config) -> Any:
    """`run` where the data take their time."""
    read = TokenData.train_batch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            TokenData, "train_batch", lambda *arguments: time.sleep(2.5 * (arguments[1] == 3)) or read(*arguments)
        )
        return run.__wrapped__(config)


def joined(config: Config) -> Any:
    """What JAX is told of the other processes."""
    told: list[Any] = []

    class Ended(Exception):
        pass

    def initialize(**options: Any) -> None:
        told.append(options)
        raise Ended

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.distributed, "initialize", initialize)
        with contextlib.suppress(Ended), distributed.joined(place(config.distributed) or {}, config.distributed):
            pass
    return told


@dataclasses.dataclass(frozen=True)
class Shown:
    """A test that shows a field on a user's way, by its file in tests/ and words of it."""

    file: str
    words: str


Way = tuple[Callable[[Config], Any], Config, Any] | Shown
TWO = changed(TOKENS, "distributed", DistributedConfig(coordinator="localhost:1", processes=2, process=1))


def on(way: Callable[[Config], Any], config: Config, owner: str = "", **values: Any) -> dict[str, Way]:
    """Entries for fields of one owner: the way, the config, and the other value of each."""
    return {f"{owner}{name}": (way, config, value) for name, value in values.items()}


FIELDS: dict[str, Way] = {
    **on(program, TOKENS, "model.", width=32, depth=3, num_heads=4, head_dim=6, num_kv_heads=1, mlp_ratio=3.0),
    **on(program, TOKENS, "model.", activation="relu", norm="rmsnorm", norm_eps=1e-3, norm_gain=False, bias=False),
    **on(
        program,
        TOKENS,
        "model.",
        qk_norm=True,
        centered=True,
        vocab_size=257,
        seq_len=12,
        positions="rotary",
        tied=True,
    ),
    **on(program, TOKENS, "model.", branch_activation="gelu", readout_bias=True, value_dim=3),
    "model.qk_norm_kind": (program, changed(TOKENS, "model.qk_norm", True), "layernorm"),
    "model.rope_theta": (program, ROTARY, 100.0),
    "model.rope_scaling": (program, ROTARY, "linear"),
    **on(
        program,
        LONG,
        "model.",
        rope_factor=4.0,
        rope_low_freq_factor=2.0,
        rope_high_freq_factor=8.0,
        rope_original_len=12,
    ),
    "model.rotary_fraction": (program, ROTARY, 0.5),
    **on(program, EXPERTS, "model.", experts=2, active_experts=1, expert_dim=8, shared_experts=1),
    **on(program, FROZEN, "model.lora.", rank=2),
    **on(program, ADAPTERS, "model.lora.", alpha=16.0, on=("mlp",)),
    **on(program, EXPERTS, "model.routing.", gate="softmax", capacity_factor=1.0, balance="bias"),
    **on(program, EXPERTS, "model.routing.", balance_weight=0.1, z_weight=0.1),
    **on(program, TOKENS, "model.", window=5, parallel=True, post_norm=True, attention_softcap=2.0, logit_softcap=2.0),
    "model.window_theta": (program, changed(ROTARY, "model.window", 5), 7.0),
    "model.full_every": (program, changed(TOKENS, "model.window", 5), 2),
    "model.qkv_bias": (program, changed(TOKENS, "model.bias", False), True),
    **on(program, IMAGES, "model.", image_size=12, patch_size=2, channels=3, num_classes=9, pool="cls"),
    **on(program, IMAGES, "model.", registers=2, layer_scale=0.5, drop_path=0.1, sincos=True, pre_logits=True),
    **on(program, IMAGES, "model.", stem=2),
    "model.distribution": (start, IMAGES, "flax"),
    **on(program, TOKENS, "model.compute.", layers="unrolled", remat="block", projections="fused"),
    **on(program, TOKENS, "model.compute.", cross_entropy="chunked", param_dtype="bfloat16", dtype="bfloat16"),
    "model.compute.product_dtype": Shown("zoo/layers/test_layers.py", "product_dtype="),
    "model.compute.attention_block": Shown("zoo/layers/test_kernels.py", "attention_block="),
    "model.compute.attention": Shown("zoo/layers/test_kernels.py", 'attention="splash"'),
    **on(program, TOKENS, "preset.", name="sp", base=None, form="mean-field", alpha_a=0.75, gamma0=0.5),
    **on(program, TOKENS, "preset.", beta0=0.5, constants=("beta0=0.25",), zero_readout=True),
    **on(
        program, TOKENS, "optimizer.", name="sgd", peak_lr=0.02, weight_decay=0.2, decay="independent", b1=0.8, b2=0.9
    ),
    **on(
        program, TOKENS, "optimizer.", eps=1e-5, clip_norm=1.0, schedule="linear", warmup_steps=2, final_lr_fraction=0.1
    ),
    "data.mix": Shown("train/data/text/test_mixture.py", "mix=words"),
    "data.noise": Shown("train/data/text/test_denoising.py", 'noise="infilling"'),
    "data.noise_rate": Shown("train/data/text/test_denoising.py", "noise_rate=0.2"),
    "data.noise_span": Shown("train/config/test_cli_errors.py", '"--data.noise-span", "4"'),
    "preset.joint": (program, changed(TOKENS, "preset.base", "lm-proxy,batch=4,tokens=768"), "sde"),
    "preset.noise_scale": Shown("train/config/test_joint.py", "--noise-scale"),
    "preset.alpha_l": (program, changed(TOKENS, "model.depth", 5), 0.75),
    "optimizer.layer_decay": (program, TOKENS, 0.5),
    "optimizer.warmup_from_zero": (program, TOKENS, True),
    "optimizer.moment_dtype": (program, TOKENS, "bfloat16"),
    "optimizer.momentum": (program, MUON, 0.8),
    "optimizer.decay_steps": (program, WSD, 3),
    "ema.decay": (program, TOKENS, 0.9),
    **on(program, TOKENS, "mesh.", fsdp=2, sequence=2, tensor=2),
    "mesh.data": (program, changed(TOKENS, "mesh", MeshConfig(data=1, fsdp=-1)), 2),
    "mesh.gradient_dtype": (program, changed(TOKENS, "mesh", MeshConfig(data=1, fsdp=-1)), "bfloat16"),
    "mesh.rules": (program, changed(TOKENS, "mesh.tensor", 2), ("mlp=none",)),
    "mesh.experts": Shown("train/parallel/test_mesh_experts.py", "experts=2"),
    "mesh.sweep": Shown("train/run/test_loop_errors.py", "--mesh.sweep 2"),
    "mesh.slices": Shown("train/parallel/test_mesh_islands.py", "slices"),
    **on(data, TOKENS, "data.", name="python_corpus", batch_size=4, seed=5, eval_batch_size=8, eval_examples=20),
    "data.document_mask": (data, TOKENS, True),
    "data.reset_positions": (data, changed(TOKENS, "data.document_mask", True), True),
    "data.tokenizer": (data, changed(TOKENS, "model.vocab_size", 300), "bpe:300"),
    "data.separator": Shown("train/data/sources/test_records.py", 'separator="<|eot|>"'),
    "data.special_tokens": Shown("train/data/text/test_special_tokens.py", 'special_tokens="text"'),
    "data.stream": Shown("train/data/streams/test_streams.py", '"stream": True'),
    "data.chat_template": Shown("train/data/chats/test_chats.py", '"chat_template": None'),
    "data.loss_on": Shown("train/data/chats/test_chats.py", 'loss_on="all"'),
    "data.on_broken": Shown("train/data/sources/test_folders.py", 'on_broken="skip"'),
    "data.limits.record_mib": Shown("train/data/records/test_limits.py", '"--limits.record-mib"'),
    "data.limits.ratio": Shown("train/data/records/test_limits.py", '"--limits.ratio"'),
    "data.limits.megapixels": Shown("train/data/records/test_limits.py", "LimitsConfig(megapixels=2)"),
    "data.pixels.fit": Shown("train/data/sources/test_folders.py", 'fit="squash"'),
    "data.pixels.resize": Shown("train/data/sources/test_folders.py", "resize=32"),
    "data.pixels.background": Shown("train/data/sources/test_folders.py", 'background="black"'),
    "data.pixels.interpolation": Shown("train/data/sources/test_folders.py", 'interpolation="bicubic"'),
    "data.pixels.mean": Shown("train/data/sources/test_folders.py", "mean=(0.1, 0.2, 0.3)"),
    "data.pixels.std": Shown("train/data/sources/test_folders.py", "std=(0.5, 0.25, 1.0)"),
    "data.field": Shown("train/data/sources/test_records.py", "--data.field"),
    **on(data, IMAGES, "data.", augment=False, split="writer"),
    **on(data, IMAGES, "data.transforms.", randaug_layers=1, mixup=0.2, cutmix=1.0, label_smoothing=0.1, repeats=2),
    "data.transforms.mix_group": (data, changed(IMAGES, "data.transforms.mixup", 0.2), 4),
    "data.train_percent": Shown("train/data/sources/test_published.py", "train_percent=50"),
    "data.transforms.jitter": Shown("train/data/sources/test_folders.py", "TransformsConfig(jitter="),
    "data.transforms.mirror": Shown("train/data/sources/test_folders.py", "mirror=False"),
    "data.transforms.crop": Shown("train/data/test_crops.py", 'crop="inception"'),
    "data.transforms.randaug_magnitude": (data, changed(IMAGES, "data.transforms.randaug_layers", 2), 5.0),
    "data.data_dir": Shown("train/data/sources/test_published.py", "data_dir"),
    "init.init_from": Shown("train/reuse/start/test_init_from_run.py", "--init-from"),
    "init.init_optimizer": Shown("train/reuse/start/test_init_from_run.py", "--init-optimizer"),
    "init.init_ema": Shown("train/reuse/start/test_init_from_run.py", "--init-ema"),
    "init.init_new": Shown("train/reuse/start/test_init_from_run.py", "--init-new"),
    "init.init_resize": Shown("train/reuse/start/test_init_from_run.py", "--init-resize"),
    "init.init_drop": Shown("train/reuse/start/test_init_from_run.py", "--init-drop"),
    "init.init_change": Shown("train/reuse/start/test_init_from.py", "--init-change"),
    **on(joined, TWO, "distributed.", coordinator="localhost:2", processes=3, process=0),
    **on(joined, TWO, "distributed.", timeout_seconds=77, heartbeat_seconds=66),
    **on(run, RUN, "checkpoint.", every_steps=3, keep=1),
    "checkpoint.keep_best": Shown("train/run/saves/test_best_checkpoint.py", "--checkpoint.keep-best"),
    "checkpoint.best_metric": Shown("train/run/saves/test_best_checkpoint.py", "--checkpoint.best-metric"),
    "stop.patience": Shown("train/run/report/test_early_stop.py", "--stop.patience"),
    "stop.min_delta": Shown("train/run/report/test_early_stop.py", "--stop.min-delta"),
    "stop.metric": Shown("train/run/report/test_early_stop.py", '"metric": "eval_accuracy"'),
    "data.evaluate": Shown("train/run/evaluation/test_evaluation_sets.py", "--data.evaluate"),
    "resume_from": Shown("train/run/saves/test_best_checkpoint.py", "--resume-from"),
    "faults.bad_numbers": Shown("train/core/test_nonfinite.py", "--bad-numbers"),
    "faults.most_in_a_row": Shown("train/core/test_nonfinite.py", "--faults.most-in-a-row"),
    **on(program, TOKENS, "faults.", spike_deviations=4.0, skip_spikes=True),
    "faults.memory_check": Shown("train/run/test_memory.py", "--faults.no-memory-check"),
    "faults.collective_seconds": Shown("train/parallel/test_distributed.py", "--faults.collective-seconds"),
    "faults.watchdog_seconds": (slow_run, changed(RUN, "faults.watchdog_seconds", 100.0), 1.0),
    **on(run, RUN, "log.", eval_every_steps=2, tensorboard=False, samples=True, profile="3:5", progress=False),
    **on(program, TOKENS, steps=9, z_loss=0.1, freeze=("bias",), train_only=("bias",)),
    "log.wandb": Shown("train/run/report/mirrors/test_trackers.py", '"wandb"'),
    "log.images": Shown("train/run/report/mirrors/test_media.py", "--log.images"),
    "log.histograms": Shown("train/run/report/mirrors/test_media.py", "--log.histograms"),
    "log.trackio": Shown("train/run/report/mirrors/test_trackers.py", '"trackio"'),
    **on(run, RUN, recipe="mine", workdir="there"),
    "accumulation_steps": (program, changed(TOKENS, "data.batch_size", 16), 2),
    "seed": (start, TOKENS, 1),
    "resume": Shown("train/checkpoints/test_checkpointer.py", "--resume"),
    "resume_change": Shown("train/run/saves/test_resume.py", "--resume-change"),
    "resume_exact": Shown("train/run/saves/test_resume.py", "--resume-exact"),
    "vmem_kib": Shown("train/parallel/test_hardware_flags.py", "vmem_kib"),
    "xla_flags": Shown("train/parallel/test_hardware_flags.py", "xla_flags"),
}


def paths(config: Any, prefix: str = "") -> Iterator[str]:
    """Dotted paths of all fields of a config."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from paths(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}"


def is_dead(path: str, way: Way) -> bool:
    """Whether another value of a field changes nothing."""
    if isinstance(way, Shown):
        return way.words not in (TESTS / way.file).read_text()
    observe, config, value = way
    return same(observe, config, changed(config, path, value))


def test_every_field_says_how_it_is_decided() -> None:
    assert set(FIELDS) == {*paths(TOKENS), *paths(IMAGES)}


@pytest.mark.parametrize("path", FIELDS)
def test_a_field_is_not_dead(path: str) -> None:
    assert not is_dead(path, FIELDS[path])


@pytest.mark.parametrize("way", [run.__wrapped__, data, joined, start])
def test_control_nothing_changed_is_nothing_seen(way: Callable[[Config], Any]) -> None:
    config = TWO if way is joined else RUN
    assert way(config) == way(changed(config, "recipe", config.recipe))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planted(OptimizerConfig):
    """Two fields that nobody reads; one has the name of a field that is read of another owner."""

    forgotten: float = 0.0
    depth: int = 1


def test_control_planted_dead_fields_are_seen() -> None:
    config = changed(TOKENS, "optimizer", Planted(**dataclasses.asdict(TOKENS.optimizer)))
    planted = {"optimizer.forgotten", "optimizer.depth"}
    assert set(paths(config)) - set(FIELDS) == planted, "a field without an entry"
    assert [name for name in sorted(planted) if is_dead(name, (program, config, 2))] == sorted(planted)
    assert not is_dead("optimizer.peak_lr", (program, config, 2.0))
    assert is_dead("log.wandb", Shown("train/run/report/mirrors/test_trackers.py", "no such words " + "in it"))
