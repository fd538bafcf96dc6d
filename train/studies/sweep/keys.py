"""The names of a sweep's points: what a config trains, as it was named before configs had more fields."""

from __future__ import annotations

import dataclasses
import hashlib
import json

from mupax.train.config.data import PixelsConfig, TransformsConfig, source
from mupax.train.config.record import OLDER_PIXELS, to_json
from mupax.train.config.run import CheckpointConfig, Config, DistributedConfig, LogConfig, MeshConfig, StopConfig
from mupax.zoo.experts.config import RoutingConfig
from mupax.zoo.lora.config import LoraConfig

_NEWER = {
    "value_dim": None, "qk_norm_kind": "rmsnorm", "branch_activation": "none", "readout_bias": False, "qkv_bias": False,
    "rope_scaling": "none", "rope_factor": 8.0, "rope_low_freq_factor": 1.0, "rope_high_freq_factor": 4.0,
    "rope_original_len": 8192, "window": None, "parallel": False, "rotary_fraction": 1.0, "registers": None,
    "layer_scale": None, "drop_path": 0.0, "sincos": False, "full_every": None, "window_theta": None,
    "distribution": "normal", "pre_logits": False, "stem": None,
    "post_norm": False, "attention_softcap": None, "logit_softcap": None,
    "experts": None, "active_experts": None, "expert_dim": None, "shared_experts": None, "routing": dataclasses.asdict(RoutingConfig()),
    "lora": json.loads(json.dumps(dataclasses.asdict(LoraConfig()))),
}  # fmt: skip
"""Fields of models that rows were named without, and what those models had."""
_NEWER_DATA = {
    "noise": None, "noise_rate": None, "noise_span": None, "separator": None, "field": "text", "on_broken": "stop",
    "pixels": OLDER_PIXELS, "mix": (), "document_mask": False, "reset_positions": False, "chat_template": None, "loss_on": "answers",
    "transforms": TransformsConfig(), "stream": False, "train_percent": 100, "special_tokens": "parse",
}  # fmt: skip
"""The same of data."""


def key_of(config: Config, data_digest: str) -> str:
    """Name of what a config trains: the same for configs that differ in where they run and what they report.

    Args:
        config: of the point.
        data_digest: of the data it sees.
    """
    bare = dataclasses.replace(
        without_reports(config.resolved()),
        mesh=MeshConfig(gradient_dtype=config.mesh.gradient_dtype),
        distributed=DistributedConfig(),
    )
    fields = to_json(bare)
    del fields["preset"]["noise_scale"]  # decides whether a run is refused, and changes none
    # As rows were named before there were such fields.
    if bare.preset.joint == "none":
        del fields["preset"]["joint"]
    for name, default in _NEWER_DATA.items():
        if getattr(bare.data, name) == default:
            del fields["data"][name]
    if "pixels" not in source(bare.data.name).reads and bare.data.pixels == PixelsConfig():
        fields["data"].pop("pixels", None)
    elif bare.data.pixels.background == OLDER_PIXELS.background or not bare.data.name.startswith("images:"):
        fields["data"].get("pixels", {}).pop("background", None)
    transforms = fields["data"].get("transforms", {})
    for name, default in {"mix_group": None, "jitter": None, "mirror": True}.items():
        if getattr(bare.data.transforms, name) == default:
            transforms.pop(name, None)
    # A point has none of these.
    del fields["stop"], fields["resume_from"], fields["resume_exact"], fields["data"]["evaluate"]
    del fields["data"]["limits"]  # decide whether data are refused, and change none
    for section, names in {
        "checkpoint": ("keep_best", "best_metric"),
        "log": ("trackio", "images", "histograms"),
    }.items():
        for name in names:
            del fields[section][name]
    if bare.vmem_kib is None:
        del fields["vmem_kib"]
    if not bare.z_loss:
        del fields["z_loss"]
    for name in ("attention_block", "product_dtype"):
        if getattr(bare.model.compute, name) is None:
            del fields["model"]["compute"][name]
    del fields["mesh"]["experts"]  # where experts lie
    del fields["faults"]["memory_check"]  # decides whether a run starts, and changes none
    del fields["faults"]["collective_seconds"]  # is of several processes
    if bare.mesh.gradient_dtype is None:
        del fields["mesh"]["gradient_dtype"]
    for name, default in {"moment_dtype": None, "layer_decay": 1.0, "warmup_from_zero": False}.items():
        if getattr(bare.optimizer, name) == default:
            del fields["optimizer"][name]
    for name, default in _NEWER.items():
        if fields["model"].get(name, ...) == default:
            del fields["model"][name]
    return hashlib.sha256(json.dumps([fields, data_digest], sort_keys=True).encode()).hexdigest()[:16]


def without_reports(config: Config) -> Config:
    """The config without where it is kept and what it reports."""
    bare = dataclasses.replace(
        config, workdir=None, resume=False, resume_from=None, resume_exact=False, stop=StopConfig()
    )
    return dataclasses.replace(
        bare, checkpoint=CheckpointConfig(), log=LogConfig(), data=dataclasses.replace(config.data, evaluate=())
    )
