"""Tuned presets made of a study: the smallest size's best learning rate, and evidence for it."""

from __future__ import annotations

import datetime
import inspect
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mupax import MupaxFailure, terminal
from mupax.presets import PRESETS
from mupax.presets.optimizers import OPTIMIZERS
from mupax.presets.tuned import find
from mupax.train.config.preset import preset_of
from mupax.train.config.run import Config
from mupax.train.studies.report import finite
from mupax.train.studies.sweep.grids import at_rate
from mupax.train.studies.transfer.drift import Analysis
from mupax.train.studies.transfer.report import provenance
from mupax.train.studies.transfer.study import Measured
from mupax.zoo.configs import ConfigError

LONGEST_WARMUP = 0.2
"""Greatest warm-up that is saved without a caution, as a share of a run's steps.

It is that of the project's own transfer studies.
"""


class NoMinimum(MupaxFailure):
    """Error of a finished study whose losses have no minimum, so that no rate can be saved."""


def check_name(name: str, preset: str) -> str:
    """Check a name under which a tuned preset is to be saved, and return the bare name.

    The bare name of a path FOLDER/PRESET.NAME.json is NAME.

    Args:
        name: Name, or path of a file PRESET.NAME.json.
        preset: Name of the preset that is tuned.

    Raises:
        PresetError: The name has characters that no name may have.
        ConfigError: A tuned preset of this name comes or came with mupax, or the path is no
            PRESET.NAME.json.
    """
    path = Path(name)
    if path.suffix == ".json" and not path.name.startswith(f"{preset}."):
        raise ConfigError(f"--save-tuned {name}: write a file name {preset}.NAME.json")
    bare = name
    if path.suffix == ".json":
        bare = path.stem.removeprefix(f"{preset}.")
    find.check_name(bare)
    comes_with_mupax = (find.FOLDER / f"{preset}.{name}.json").exists()
    if bare == name and (comes_with_mupax or f"{preset}:{name}" in find.MOVED):
        raise ConfigError(
            f"--save-tuned {name}: {preset}:{name} comes or came with the project; "
            f"write another name"
        )
    return bare


def check_before_training(name: str, config: Config) -> None:
    """Refuse a name that cannot be saved, and print a caution if the warm-up to be saved is long.

    Args:
        name: Name or path, as for `check_name`.
        config: Any point of the study. Its warm-up is saved as a share of its steps.

    Raises:
        PresetError: The name has characters that no name may have.
        ConfigError: The name is taken, or the path is no PRESET.NAME.json.
    """
    check_name(name, config.preset.name)
    share = _warmup_share(config)
    if share > LONGEST_WARMUP:
        steps = int(LONGEST_WARMUP * config.steps)
        warmup_steps = min(config.scaled_optimizer.warmup_steps, config.steps)
        terminal.note(
            f"caution: {warmup_steps} of {config.steps} steps are warm-up, so --save-tuned {name} "
            f"saves a warm-up of {share:.0%} of every later run; write --optimizer.warmup-steps "
            f"{steps} or fewer, or more --steps"
        )


def _warmup_share(config: Config) -> float:
    """Return the warm-up as a share of a run's steps, at most 1, rounded to four digits."""
    # Under a joint rule `optimizer` counts its warm-up in steps of the base's run.
    return round(min(1.0, config.scaled_optimizer.warmup_steps / config.steps), 4)


def save(
    name: str,
    label: str,
    judged: Sequence[tuple[Measured, Analysis]],
    command: str,
    loss: str = "training",
    *,
    takes_rates: bool = True,
) -> tuple[Path, str]:
    """Write a tuned preset with the best learning rate of the smallest size of a study.

    The study is the first with the label `label`. The file also has the evidence for the rate: the
    smallest size's losses, and the verdicts of the studies. An existing file is replaced.

    Args:
        name: Name of a file in `mupax.presets.tuned.find.OWN_FOLDER`, or path of a file
            PRESET.NAME.json.
        label: Label of the preset whose studies are used.
        judged: All studies. The evidence is from those with the label `label` whose preset has the
            same base as that of the first one.
        command: Command line of the studies, which the file records.
        loss: Loss of the studies, "training" or "evaluation".
        takes_rates: True if a flag of the command names the rates. Otherwise a study looks for them
            around the recipe's peak rate.

    Returns:
        Path of the file, and the argument of `--preset` that uses it.

    Raises:
        NoMinimum: The smallest size has no fitted best rate, or no study has the label.
        PresetError, ConfigError: The name is refused by `check_name`.
    """
    studies = []
    for measured, analysis in judged:
        if measured.study.label == label:
            studies.append((measured, analysis))
    if not studies:
        raise NoMinimum(
            f"there is no rate of {label} to save: its points are not all trained; "
            "the same command with more --minutes goes on"
        )
    measured, analysis = studies[0]
    fitted = analysis.fits[0]
    config = measured.study.configs[0]
    if fitted.trouble:
        where = f"at {measured.study.axis} {analysis.sizes[0]}"
        why = fitted.why
        if fitted.missing and not takes_rates:
            end = 2.0 ** fitted.missing[-1]
            why = f"{fitted.trouble}; --optimizer.peak-lr {end:.6g} searches from there on"
        raise NoMinimum(f"every point is trained, but there is no rate to save: {where}, {why}")

    models = set()
    transfer = []
    for other_measured, other_analysis in studies:
        study = other_measured.study
        # A rate relative to another base is another rate.
        if study.configs[0].preset.base != config.preset.base:
            continue
        for run in study.configs:
            # Several axes share their smallest size, which is listed once.
            models.add(tuple(run.model.base_sizes().items()))
        if len(other_analysis.sizes) > 1:
            transfer.append({
                "axis": study.axis,
                "sizes": list(other_analysis.sizes),
                "verdict": other_analysis.verdict,
                "drift": other_analysis.drift.to_json(5),
            })  # fmt: skip

    curve = measured.curve(0)
    evidence = {
        "sizes": [dict(model) for model in sorted(models)],
        "seeds": analysis.seeds,
        "log2_lr": [float(x) for x in curve.x],
        "loss": [finite(mean, 5) for mean in curve.mean],
        "log2_optimum": analysis.optima[0].to_json(5),
        "transfer": transfer,
    }
    if loss != "training":
        evidence["judged"] = loss
    peak_lr = float(f"{2.0**fitted.optimum:.4g}")
    return write(name, config, peak_lr, evidence, command)


def write(
    name: str, config: Config, peak_lr: float, evidence: Mapping[str, Any], command: str
) -> tuple[Path, str]:
    """Write the file of a tuned preset from a run's config and evidence for its learning rate.

    Under a joint rule the file has the optimizer as the rule scales it to the batch and tokens of
    the run, which the file names. An existing file is replaced.

    Args:
        name: Name or path, as for `save`.
        config: Run whose preset, optimizer, warm-up share and data are saved.
        peak_lr: Peak learning rate to save in place of the run's. A joint rule scales it.
        evidence: `sizes`, `seeds`, `log2_lr`, `loss`, `log2_optimum` and `transfer` of the
            provenance, and `search` if one was made.
        command: Command line that led to the rate, which the file records.

    Returns:
        Path of the file, and the argument of `--preset` that uses it: PRESET:NAME if its folder is
        searched, otherwise PRESET:PATH.

    Raises:
        PresetError, ConfigError: The name is refused by `check_name`.
    """
    preset = preset_of(config)
    # `choices` also holds what the preset fixes. Only arguments of the preset are constants.
    parameters = inspect.signature(PRESETS[config.preset.name]).parameters
    constants = {}
    for constant, value in preset.choices.items():
        # A dotted constant, such as rates.readout, is of one group and no argument of a preset.
        if constant in parameters or "." in constant:
            constants[constant] = value

    # A joint rule starts from the base's values, and the file is about the run's batch and tokens.
    settings = at_rate(config, peak_lr).scaled_optimizer
    if settings.peak_lr != peak_lr:
        evidence = _scaled_evidence(evidence, math.log2(settings.peak_lr / peak_lr))
        peak_lr = float(f"{settings.peak_lr:.4g}")
    fields = ("name", "b1", "b2", "eps", "weight_decay", "decay", "momentum", "clip_norm")
    optimizer = {field: getattr(settings, field) for field in fields}
    optimizer |= {
        "peak_lr": peak_lr,
        "schedule": settings.schedule,
        "warmup_fraction": _warmup_share(config),
        "final_lr_fraction": settings.final_lr_fraction,
    }
    # Only files of Muon have these, and only if they are not the defaults.
    if settings.adam_peak is not None:
        optimizer["adam_lr"] = settings.adam_peak
    reads = OPTIMIZERS[settings.name].reads
    if "orthogonalizer" in reads and settings.orthogonalizer != "newton_schulz":
        optimizer["orthogonalizer"] = settings.orthogonalizer
    tuned = find.Tuned(
        name=check_name(name, config.preset.name),
        preset=config.preset.name,
        constants=constants,
        form=config.preset.form,
        base=None if preset.base is None else dict(preset.base),
        optimizer=optimizer,
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

    path = find.OWN_FOLDER / f"{tuned.preset}.{name}.json"
    if name.endswith(".json"):
        path = Path(name).expanduser()
    find.save(tuned, path)
    searched_folders = [find.FOLDER, find.OWN_FOLDER, find.user_folder()]
    if path.parent.resolve() in [folder.resolve() for folder in searched_folders]:
        return path, tuned.use
    # Elsewhere a bare name is not found, so the word has the path.
    return path, f"{tuned.preset}:{path}"


def _scaled_evidence(evidence: Mapping[str, Any], octaves: float) -> dict[str, Any]:
    """Return the evidence for a learning rate with all its rates moved by some octaves."""
    optimum = {}
    for name, log2_lr in evidence["log2_optimum"].items():
        optimum[name] = None if log2_lr is None else round(log2_lr + octaves, 5)
    rates = [round(log2_lr + octaves, 5) for log2_lr in evidence["log2_lr"]]
    return {**evidence, "log2_lr": rates, "log2_optimum": optimum}


def saved_message(path: Path, word: str) -> str:
    """Return a message with the path of a tuned preset and the flag that uses it.

    The file is read. A caution is added if its warm-up is longer than `LONGEST_WARMUP`.

    Args:
        path: File that `save` or `write` wrote.
        word: Word for `--preset`, from `save` or `write`.
    """
    text = f"tuned preset in {path.absolute()}; use it with --preset {shlex.quote(word)}"
    if path.parent.resolve() == find.OWN_FOLDER.resolve():
        text = (
            f"{text} in this folder, or from any folder once the file lies in {find.user_folder()}"
        )
    share = find.load(path).optimizer["warmup_fraction"]
    if share > LONGEST_WARMUP:
        text = (
            f"{text}\ncaution: it warms up for {share:.0%} of every run that uses it; "
            f"write --optimizer.warmup-steps there to have less"
        )
    return text
