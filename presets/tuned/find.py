"""Tuned presets: a preset with the base, constants and optimizer that a study found best, and the study's evidence.

The study is one of this project or of its user, or others have published it (`mupax.presets.tuned.published`).

A file PRESET.NAME.json that comes with mupax, or lies in the folder `tuned` where the command runs or in the user's own
folder (`user_folder`); `--preset PRESET:NAME` uses it, and PRESET:PATH.json takes any file.
`mupax transfer ... --save-tuned NAME` writes one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mupax import disk, spellings, terminal
from mupax.disk import user_folder as settings_folder
from mupax.presets.roles import PresetError
from mupax.presets.rule import Form
from mupax.presets.tuned import published, schema
from mupax.presets.tuned.judgement import Verdict, judge

FOLDER = Path(__file__).parent
PUBLISHED = FOLDER / "published"
"""Tuned presets that come with mupax and whose numbers others have published."""
OWN_FOLDER = Path("tuned")
"""Where a user's own are written and looked for, relative to where the command runs."""
MOVED = {
    "depth-mup:lm-python-half-v1": "its best learning rate drifts as the model grows",
    "mup:vit-endless-v1": "it was tuned at one size and never tried at another",
}
"""Tuned presets that came with mupax once, and why they no longer do. docs/evidence/ of the source has their files."""
FAR = 3.0
"""Doublings of an axis beyond the studied sizes from which on training warns: studies themselves span about as many."""


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """One file.

    Attributes:
        name: without the preset's.
        preset: in `presets.PRESETS`.
        constants: of the preset.
        form: where its multipliers sit; the preset's own unless given.
        base: size of each axis at which the rate holds as it stands; None for a preset without a base.
        optimizer: `name`, `peak_lr`, `b1`, `b2`, `eps`, `weight_decay`, `decay`, `momentum`, `clip_norm`, `schedule`,
            `warmup_fraction` (of all steps) and `final_lr_fraction`, as `mupax.train.config.run.OptimizerConfig` has them.
        provenance: `recipe`, `data`, `unit` (token or image), `seen` (units by one run), `steps`, `batch`, `sizes` (of every
            model in the study, by axis), `seeds`, `log2_lr` and `loss` (the curve at the base: each rate, the mean loss;
            null where a seed diverged), `log2_optimum` (value, low, high), `transfer` (per axis grown: axis, sizes, verdict
            and drift with its interval), `versions`, `command`, `date`; of a search over constants also `search`: each constant
            with its range, start, winner and importance, what it cost, and the loss of the winner less that of the start on
            seeds that it did not use; `log2_lr` and `loss` are then its points.
    """

    name: str
    preset: str
    constants: Mapping[str, float | str]
    form: Form | None
    base: Mapping[str, int] | None
    optimizer: Mapping[str, Any]
    provenance: Mapping[str, Any]

    @property
    def use(self) -> str:
        """What `--preset` takes."""
        return f"{self.preset}:{self.name}"

    @property
    def is_published(self) -> bool:
        """Return whether others have published the numbers and nothing of it was measured here."""
        return "evidence" in self.provenance

    def distance(self, sizes: Mapping[str, int]) -> dict[str, float]:
        """Doublings from the nearest studied size, per axis beyond them; negative where the model is smaller."""
        doublings = {}
        for axis, size in sizes.items():
            studied = [model[axis] for model in self.provenance["sizes"] if axis in model]
            if studied and not min(studied) <= size <= max(studied):
                doublings[axis] = math.log2(
                    size / (max(studied) if size > max(studied) else min(studied))
                )
        return doublings

    @property
    def evidence(self) -> str:
        """The verdict of its study on all axes together: `drifts` before `undecided` before `transfers`; else `one size`.

        `published` where others have published it.
        """
        if self.is_published:
            return "published"
        verdicts = {_verdict(grown) for grown in self.provenance["transfer"]}
        for verdict in ("drifts", "undecided", "transfers"):
            if verdict in verdicts:
                return verdict
        return "one size"


def user_folder() -> Path:
    """Return the folder of tuned presets that every project of this user finds: `tuned` in `mupax.disk.user_folder`."""
    return settings_folder() / "tuned"


def files() -> dict[str, Path]:
    """Return PRESET:NAME to file. Of equal names mupax's own comes first, then the project's, then the user's."""
    paths: dict[str, Path] = {}
    for folder in (user_folder(), OWN_FOLDER, PUBLISHED, FOLDER):  # a later one replaces
        for path in folder.glob("*.json"):
            if "." in path.stem and not path.name.startswith("."):
                paths[path.stem.replace(".", ":", 1)] = path
    return dict(sorted(paths.items()))


def origin(path: Path) -> str:
    """Return where the file of a tuned preset comes from, in words."""
    if path.parent in (FOLDER, PUBLISHED):
        return "mupax"
    return f"user, {path}" if path.parent == user_folder() else f"project, {path}"


def find(word: str) -> Tuned:
    """The tuned preset that PRESET:NAME or PRESET:PATH.json names.

    Raises:
        PresetError: there is none, it no longer comes with mupax, or its file is not one.
    """
    preset, _, name = word.partition(":")
    if not name:
        ends = [other for other in files() if word in other.split(":")]
        raise PresetError(
            f"{word} is no tuned preset; write PRESET:NAME, such as {', '.join(ends or files())} (`mupax presets tuned` lists them)"
        )
    if name.endswith(".json"):
        tuned = load(name)
        if tuned.preset != preset:
            raise PresetError(f"{name} is tuned for {tuned.preset}; write {tuned.preset}:{name}")
        return tuned
    paths = files()
    if word in paths:
        return load(paths[word])
    if word in MOVED:
        raise PresetError(
            f"{word} no longer comes with mupax: {MOVED[word]}. Its data are docs/evidence/tuned/{preset}.{name}.json in the "
            f"source; write {preset} and tune it, or copy that file to {OWN_FOLDER.absolute()}, where {word} is found. "
            "A run that it began goes on with `mupax train --resume --workdir FOLDER`"
        )
    own = [other for other in paths if other.startswith(f"{preset}:")]
    raise PresetError(
        f"the preset {preset} has no tuned constants named {name!r}; write {', '.join([preset, *own])} "
        f"(`mupax presets tuned` lists them). A file {preset}.{name}.json is looked for in {OWN_FOLDER.absolute()} and in "
        f"{user_folder()}"
    )


def load(path: str | Path) -> Tuned:
    """Read and check a file.

    Raises:
        PresetError: the file cannot be read, or an entry is missing, unknown or not what it must be; names file and entry.
    """
    hint = "no tuned preset ({error}); `mupax transfer ... --save-tuned` writes one"
    fields = schema.load(path, schema.checked, hint)
    return Tuned(**{name: value for name, value in fields.items() if name != "format"})


def save(tuned: Tuned, path: Path) -> None:
    """Check and write it.

    Args:
        tuned: what to write.
        path: of the file; its folder is made.

    Raises:
        PresetError: what `load` would refuse.
    """
    fields = {"format": schema.FORMAT, **asdict(tuned)}
    schema.checked(json.loads(json.dumps(fields)))
    path.parent.mkdir(parents=True, exist_ok=True)
    disk.write_whole(path, json.dumps(fields, indent=1) + "\n")


def check_name(name: str) -> None:
    """Raises PresetError where the name cannot be one."""
    if not schema.NAME.fullmatch(name):
        raise PresetError(
            f"the name {name!r}: write small letters, digits and single hyphens, such as lm-python-v1"
        )


def summary(tuned: Tuned) -> str:
    """One line: the rate, what it was found on, and how it transferred."""
    if tuned.is_published:
        return published.summary(tuned)
    study, optimizer = tuned.provenance, tuned.optimizer
    evidence = (
        "; ".join(f"{grown['axis']} {verdict(grown)}" for grown in study["transfer"]) or "one size"
    )
    run = f"{optimizer['name']} {optimizer['peak_lr']:.3g} on {study['data']}, {study['seen']:,} {study['unit']}s"
    return f"{run}; {evidence}{_searched(study)}"


def described(tuned: Tuned) -> str:
    """Everything about one, in lines no wider than the terminal."""
    if tuned.is_published:
        return published.described(tuned)
    study, curve = (
        tuned.provenance,
        zip(tuned.provenance["log2_lr"], tuned.provenance["loss"], strict=True),
    )
    optimum = study["log2_optimum"]
    points = ", ".join(f"2^{x:g} {'diverged' if y is None else f'{y:.4f}'}" for x, y in curve)
    lines = [
        ("base", _pairs(tuned.base) if tuned.base else "none"),
        ("constants", f"{_pairs(tuned.constants) or 'none'}; form {tuned.form or 'its own'}"),
        ("optimizer", _pairs(tuned.optimizer)),
        ("optimum", f"2^{optimum['value']:.2f} {bounds(optimum)}, from {_seeds(study['seeds'])}"),
        ("curve", f"of {study.get('judged', 'training')} loss: {points}"),
        *(
            ("grown", f"{g['axis']} {', '.join(map(str, g['sizes']))}: {verdict(g)}")
            for g in study["transfer"]
        ),
        ("run", f"{study['recipe']}, {study['steps']} steps of batch {study['batch']}"),
        ("command", spellings.current(study["command"])),
        ("versions", f"{_pairs(study['versions'])}, {study['date']}"),
    ]
    if search := study.get("search"):
        lines = [line for line in lines if line[0] != "curve"]
        lines += [("searched", _constant(each)) for each in search["constants"]]
    head = terminal.wrapped(f"{tuned.use}, {tuned.evidence}: {summary(tuned)}")
    return f"{head}\n{terminal.table(lines)}"


def _seeds(count: int) -> str:
    return "one seed" if count == 1 else f"{count} paired seeds"


def verdict(grown: Mapping[str, Any]) -> str:
    """What a study says of one axis: `transfers`, `drifts` or `undecided`, and the drift with its interval.

    Args:
        grown: an entry of provenance's `transfer`.
    """
    drift = grown["drift"]
    if drift["value"] is None:
        return "undecided"
    return f"{_verdict(grown)}, drift {drift['value']:+.2f} {bounds(drift)} octaves per doubling"


def _verdict(grown: Mapping[str, Any]) -> Verdict:
    """Return the verdict of one axis by today's definition, whatever the definition was when the file was written.

    A file that said something else than `transfers` may be of a study without an optimum at one end, so it stays undecided.
    """
    drift = grown["drift"]
    verdict = judge(drift["value"], drift["low"], drift["high"])
    if verdict == "transfers" and grown["verdict"] != "transfers":
        return "undecided"
    return verdict


def bounds(interval: Mapping[str, float | None], digits: int = 2) -> str:
    """An interval in brackets.

    Args:
        interval: `low` and `high`; None where there is none.
        digits: after the point.
    """
    low, high = interval["low"], interval["high"]
    return (
        "(no interval)" if low is None or high is None else f"[{low:.{digits}f}, {high:.{digits}f}]"
    )


def _searched(study: Mapping[str, Any]) -> str:
    if not (search := study.get("search")):
        return ""
    apart = search["winner_less_start"]
    gain = (
        "not compared"
        if apart["value"] is None
        else f"{apart['value']:+.4f} {bounds(apart, 4)} nats"
    )
    return f"; {len(search['constants'])} constants searched, {gain} against the start on {search['fresh_seeds']} fresh seeds"


def _constant(each: Mapping[str, Any]) -> str:
    span = f"from {each['low']:.4g} to {each['high']:.4g}, start {each['start']:.4g}"
    return f"{each['word']} = {each['winner']:.4g} ({span}, importance {each['importance']:.0%})"


def _pairs(values: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())
