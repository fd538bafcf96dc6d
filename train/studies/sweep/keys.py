"""Names of a sweep's points: digests of the config fields that decide what a point trains.

A point's name never changes, or every committed study would train again. Fields of `_FIRST` are part of every name. A newer field is
part of a name only if its effect is on what is trained (`mupax.config_fields`) and it does not have its default, so a new
field needs no entry here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from mupax.config_fields import config_fields, with_defaults
from mupax.train.config.data import PixelsConfig, TransformsConfig, source
from mupax.train.config.record import OLDER_PIXELS, to_json
from mupax.train.config.run import Config
from mupax.zoo.experts.config import RoutingConfig
from mupax.zoo.lora.config import LoraConfig

_FIRST = {
    "": "recipe steps seed freeze train_only accumulation_steps workdir resume resume_change xla_flags",
    "model": "centered width depth num_heads head_dim num_kv_heads mlp_ratio activation norm norm_eps norm_gain bias qk_norm vocab_size "
    "seq_len positions rope_theta tied image_size patch_size channels num_classes pool encoder_depth target_len distance_buckets "
    "longest_distance shared embedding_norm",
    "model.compute": "layers remat attention projections cross_entropy param_dtype dtype",
    "model.routing": "gate capacity_factor balance balance_weight z_weight",
    "model.lora": "rank alpha on",
    "data": "name batch_size seed eval_batch_size eval_examples data_dir tokenizer augment split",
    "data.transforms": "crop randaug_layers randaug_magnitude mixup cutmix label_smoothing repeats",
    "data.pixels": "fit resize interpolation mean std background",
    "preset": "name base form alpha_a alpha_l gamma0 beta0 constants zero_readout",
    "optimizer": "name peak_lr weight_decay decay b1 b2 eps momentum clip_norm schedule warmup_steps decay_steps final_lr_fraction",
    "ema": "decay",
    "init": "init_from init_optimizer init_ema init_new init_resize init_drop init_change",
    "mesh": "data fsdp sequence tensor sweep rules slices",
    "distributed": "coordinator processes process timeout_seconds heartbeat_seconds",
    "checkpoint": "every_steps keep",
    "faults": "bad_numbers most_in_a_row spike_deviations skip_spikes watchdog_seconds",
    "log": "eval_every_steps tensorboard wandb progress samples profile",
}  # fmt: skip
"""Section to its fields that were there when points got their names. This list is closed: no new field belongs here."""
_FIRST_PATHS = {f"{section}.{name}".lstrip(".") for section, names in _FIRST.items() for name in names.split()}


def key_of(config: Config, data_digest: str) -> str:
    """Return the name of what a config trains: equal for configs that differ in where they run and what they report.

    Args:
        config: of the point.
        data_digest: of the data it sees.
    """
    bare = with_defaults(without_reports(config.resolved()), ("layout", "processes"))
    fields = to_json(bare)
    for path in _unnamed_fields(bare):
        _delete(fields, path)
    for section in _unnamed_sections(bare):
        _delete(fields, section)
    return hashlib.sha256(json.dumps([fields, data_digest], sort_keys=True).encode()).hexdigest()[:16]


def without_reports(config: Config) -> Config:
    """Return the config without where it is kept and what it reports."""
    return with_defaults(config, ("session", "reports", "course"))


def _unnamed_fields(config: Config) -> Iterator[str]:
    """Yield the fields that are not part of a point's name."""
    for field in config_fields(config):
        # A model of a plugin declares nothing: all its fields are part of the name.
        if field.affects is None or field.path in _FIRST_PATHS:
            continue
        if field.value == field.default or not field.affects.consequence.names_point:
            yield field.path
    # The background became a field of its own after points of images had their names.
    if config.data.pixels.background == OLDER_PIXELS.background or not config.data.name.startswith("images:"):
        yield "data.pixels.background"


def _unnamed_sections(config: Config) -> Iterator[str]:
    """Yield the sections that are not part of a point's name, because all their fields have the values of before they existed."""
    yield from ("stop", "data.limits")
    model = config.model
    if getattr(model, "routing", None) == RoutingConfig():
        yield "model.routing"
    if getattr(model, "lora", None) == LoraConfig():
        yield "model.lora"
    if config.data.transforms == TransformsConfig():
        yield "data.transforms"
    is_unread = "pixels" not in source(config.data.name).reads and config.data.pixels == PixelsConfig()
    if is_unread or config.data.pixels == OLDER_PIXELS:
        yield "data.pixels"


def _delete(fields: dict[str, Any], path: str) -> None:
    """Delete a field or section of a config as JSON."""
    *sections, name = path.split(".")
    for section in sections:
        fields = fields.get(section, {})
    fields.pop(name, None)
