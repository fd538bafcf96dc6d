"""A study's result as a tuned preset: the smallest size's best rate, and what the study knows about it."""

from __future__ import annotations

import datetime
import inspect
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mupax import terminal
from mupax.errors import MupaxFailure
from mupax.presets import PRESETS
from mupax.presets.tuned import find
from mupax.train.config.preset import preset_of
from mupax.train.config.run import Config
from mupax.train.studies.report import finite
from mupax.train.studies.transfer.drift import Analysis
from mupax.train.studies.transfer.report import provenance
from mupax.train.studies.transfer.study import Measured
from mupax.zoo.configs import ConfigError

LONGEST_WARMUP = 0.2
"""Share of a run's steps up to which a warm-up is saved without a caution: that of the project's own transfer studies."""


class NoMinimum(MupaxFailure):
    """A study that is trained, and whose losses have no minimum to save."""


def check_name(name: str, preset: str) -> str:
    """The name to save a tuned preset by, without folder and ending; refused before anything is trained.

    Args:
        name: or the path of a file PRESET.NAME.json.
        preset: that is tuned.

    Raises:
        PresetError: it is no name.
        ConfigError: the project itself has a tuned preset of that name, or the path is no PRESET.NAME.json.
    """
    path = Path(name)
    if path.suffix == ".json" and not path.name.startswith(f"{preset}."):
        raise ConfigError(f"--save-tuned {name}: write a file name {preset}.NAME.json")
    bare = path.stem.removeprefix(f"{preset}.") if path.suffix == ".json" else name
    find.check_name(bare)
    comes_with_mupax = (find.FOLDER / f"{preset}.{name}.json").exists()
    if bare == name and (comes_with_mupax or f"{preset}:{name}" in find.MOVED):
        raise ConfigError(
            f"--save-tuned {name}: {preset}:{name} comes or came with the project; write another name"
        )
    return bare


def check_before_training(name: str, config: Config) -> None:
    """Refuse a name that cannot be saved, and print a caution where the warm-up to be saved is long.

    Args:
        name: as `check_name` takes it.
        config: a point of the study. Its warm-up is saved as a share of its steps.

    Raises:
        PresetError, ConfigError: as `check_name`.
    """
    check_name(name, config.preset.name)
    share = _warmup_share(config)
    if share > LONGEST_WARMUP:
        steps = int(LONGEST_WARMUP * config.steps)
        terminal.note(
            f"caution: {min(config.optimizer.warmup_steps, config.steps)} of {config.steps} steps are warm-up, so "
            f"--save-tuned {name} saves a warm-up of {share:.0%} of every later run; write --optimizer.warmup-steps {steps} "
            f"or fewer, or more --steps"
        )


def _warmup_share(config: Config) -> float:
    """Return the warm-up as a share of a run's steps."""
    return round(min(1.0, config.optimizer.warmup_steps / config.steps), 4)


def save(
    name: str,
    label: str,
    judged: Sequence[tuple[Measured, Analysis]],
    command: str,
    loss: str = "training",
) -> tuple[Path, str]:
    """Write the tuned preset, and give its path and what `--preset` takes.

    Args:
        name: its name, to be found in `mupax.presets.tuned.find.OWN_FOLDER`; or the path of a file PRESET.NAME.json.
        label: of the studies that it is of.
        judged: all studies; those relative to the same base as the first are its evidence.
        command: that was written.
        loss: that the studies are of, training or evaluation.

    Raises:
        NoMinimum: the smallest size has no fitted best rate.
    """
    judged = [
        (measured, analysis) for measured, analysis in judged if measured.study.label == label
    ]
    measured, analysis = judged[0]
    fitted, config = analysis.fits[0], measured.study.configs[0]
    if fitted.trouble:
        where = f"at {measured.study.axis} {analysis.sizes[0]}"
        raise NoMinimum(
            f"every point is trained, but there is no rate to save: {where}, {fitted.why}"
        )
    of_base = [(m, a) for m, a in judged if m.study.configs[0].preset.base == config.preset.base]
    curve = measured.curve(0)
    models = {tuple(c.model.base_sizes().items()) for m, _ in of_base for c in m.study.configs}
    evidence = {
        "sizes": [dict(model) for model in sorted(models)],
        "seeds": analysis.seeds,
        "log2_lr": [float(x) for x in curve.x],
        "loss": [finite(loss, 5) for loss in curve.mean],
        "log2_optimum": analysis.optima[0].to_json(5),
        "transfer": [
            {
                "axis": m.study.axis,
                "sizes": list(a.sizes),
                "verdict": a.verdict,
                "drift": a.drift.to_json(5),
            }
            for m, a in of_base
            if len(a.sizes) > 1
        ],
        **({} if loss == "training" else {"judged": loss}),
    }
    return write(name, config, float(f"{2.0**fitted.optimum:.4g}"), evidence, command)


def write(
    name: str, config: Config, peak_lr: float, evidence: Mapping[str, Any], command: str
) -> tuple[Path, str]:
    """Write what a run has and evidence for it as a tuned preset, and give its path and what `--preset` takes.

    Args:
        name: as `save`.
        config: the run at the base.
        peak_lr: its best rate.
        evidence: `sizes`, `seeds`, `log2_lr`, `loss`, `log2_optimum`, `transfer` of its provenance, and `search` where one was made.
        command: that was written.
    """
    preset, opt = preset_of(config), config.optimizer
    takes = inspect.signature(
        PRESETS[config.preset.name]
    ).parameters  # `given` holds what a preset fixes, too
    fields = ("name", "b1", "b2", "eps", "weight_decay", "decay", "momentum", "clip_norm")
    tuned = find.Tuned(
        name=check_name(name, config.preset.name),
        preset=config.preset.name,
        constants={
            name: value for name, value in preset.choices.items() if name in takes or "." in name
        },
        form=config.preset.form,
        base=None if preset.base is None else dict(preset.base),
        optimizer={
            **{field: getattr(opt, field) for field in fields},
            "peak_lr": peak_lr,
            "schedule": opt.schedule,
            "warmup_fraction": _warmup_share(config),
            "final_lr_fraction": opt.final_lr_fraction,
        },
        provenance={
            "recipe": config.recipe,
            "data": config.data.name,
            "unit": config.model.unit,
            "seen": config.steps * config.data.batch_size * config.model.units,
            "steps": config.steps,
            "batch": config.data.batch_size,
            **evidence,
            "versions": provenance(),
            "command": command,
            "date": datetime.date.today().isoformat(),
        },
    )
    path = (
        Path(name).expanduser()
        if name.endswith(".json")
        else find.OWN_FOLDER / f"{tuned.preset}.{name}.json"
    )
    find.save(tuned, path)
    folders = (find.FOLDER, find.OWN_FOLDER, find.user_folder())
    by_name = path.parent.resolve() in [folder.resolve() for folder in folders]
    return path, tuned.use if by_name else f"{tuned.preset}:{path}"


def saved_message(path: Path, word: str) -> str:
    """Return where a tuned preset was written, and what to type to use it here and from any folder.

    Args:
        path: file that `save` or `write` wrote.
        word: what `--preset` takes.
    """
    text = f"tuned preset in {path.absolute()}; use it with --preset {shlex.quote(word)}"
    if path.parent.resolve() == find.OWN_FOLDER.resolve():
        text = (
            f"{text} in this folder, or from any folder once the file lies in {find.user_folder()}"
        )
    share = find.load(path).optimizer["warmup_fraction"]
    if share > LONGEST_WARMUP:
        text = (
            f"{text}\ncaution: it warms up for {share:.0%} of every run that uses it; write --optimizer.warmup-steps there to "
            "have less"
        )
    return text
