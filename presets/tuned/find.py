"""Tuned presets: a preset with the base, constants and optimizer of the best runs of a study.

The study is one of mupax, of its user, or one that others have published
(`mupax.presets.tuned.published`). `--preset PRESET:NAME` uses a file PRESET.NAME.json that comes
with mupax, is in the folder `tuned` of the working directory, or is in the user's own folder
(`user_folder`). `--preset PRESET:PATH.json` uses any file. `mupax transfer ... --save-tuned NAME`
writes a file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mupax import disk, terminal
from mupax.disk import user_folder as settings_folder
from mupax.mappings import drop_keys
from mupax.presets.roles import PresetError
from mupax.presets.rule import Form
from mupax.presets.tuned import published, schema
from mupax.presets.tuned.judgement import Verdict, judge

FOLDER = Path(__file__).parent
"""Folder of the tuned presets that come with mupax and that mupax measured."""
PUBLISHED = FOLDER / "published"
"""Folder of the tuned presets that come with mupax and that others have published."""
OWN_FOLDER = Path("tuned")
"""Folder of a user's own tuned presets, relative to the working directory."""
MOVED = {
    "depth-mup:lm-python-half-v1": "its best learning rate drifts as the model grows",
    "mup:lm-laptop-v1": "mup:lm-laptop-v2 has more tuned constants and ends lower",
    "mup:vit-endless-v1": "it was tuned at one size and never tried at another",
}
"""Tuned presets that no longer come with mupax, each with the reason.

Their files are in docs/evidence/tuned/.
"""
FAR = 3.0
"""Distance from the studied sizes, in doublings, above which training warns.

Most studies span about as many doublings.
"""


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """Tuned preset: a preset with its constants, optimizer settings and the study that found them.

    It has the contents of one file.

    Attributes:
        name: Name without that of the preset, such as "lm-laptop-v2".
        preset: Key of `presets.PRESETS`.
        constants: Constants of the preset and of parameter groups.
        form: Placement of the multipliers. `None` is the preset's native form.
        base: Size of each axis at which the learning rate holds unscaled. `None` for a preset
            without a base.
        optimizer: Settings by name: `name`, `peak_lr`, `b1`, `b2`, `eps`, `weight_decay`, `decay`,
            `momentum`, `clip_norm`, `schedule`, `warmup_fraction` (of all steps) and
            `final_lr_fraction`, as in `mupax.train.config.run.OptimizerConfig`.
        provenance: Description of the study: `recipe`, `data`, `unit` (token or image), `seen`
            (units that one run reads), `steps`, `batch`, `sizes` (of every model, by axis),
            `seeds`, `log2_lr` and `loss` (mean loss at the base for each learning rate, null where
            a seed diverged), `log2_optimum` (value, low, high), `transfer` (per grown axis: axis,
            sizes, verdict, and drift with its interval), `versions`, `command` and `date`. A search
            over constants also has `search`: for each constant its range, its starting value, its
            best value and its importance, then the cost, and the loss of the best point minus that
            of the starting point on new seeds. `log2_lr` and `loss` are then the points of the
            search. A publication has other entries (`mupax.presets.tuned.published`).
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
        """Argument of `--preset` for this tuned preset: PRESET:NAME."""
        return f"{self.preset}:{self.name}"

    @property
    def is_published(self) -> bool:
        """True if others have published the values and mupax has measured none of them."""
        return "evidence" in self.provenance

    def distance(self, sizes: Mapping[str, int]) -> dict[str, float]:
        """Return how far a model is from the studied sizes, in doublings per axis.

        Only axes beyond the studied sizes have an entry. It is positive if the model is larger than
        all studied models, and negative if it is smaller.

        Args:
            sizes: Size of every logical axis of the model.
        """
        doublings = {}
        for axis, size in sizes.items():
            studied = [model[axis] for model in self.provenance["sizes"] if axis in model]
            if not studied:
                continue
            smallest = min(studied)
            largest = max(studied)
            if size > largest:
                doublings[axis] = math.log2(size / largest)
            elif size < smallest:
                doublings[axis] = math.log2(size / smallest)
        return doublings

    @property
    def evidence(self) -> str:
        """Worst verdict on learning rate transfer over all grown axes.

        It is `drifts`, else `undecided`, else `transfers`. It is `one size` if the study grew no
        axis, and `published` if others have published the values.
        """
        if self.is_published:
            return "published"
        verdicts = {_verdict(growth) for growth in self.provenance["transfer"]}
        for verdict in ("drifts", "undecided", "transfers"):
            if verdict in verdicts:
                return verdict
        return "one size"


def user_folder() -> Path:
    """Return the folder of tuned presets that all projects of this user share.

    It is `tuned` in `mupax.disk.user_folder`.
    """
    return settings_folder() / "tuned"


def files() -> dict[str, Path]:
    """Return the files of all tuned presets by PRESET:NAME, sorted.

    If several files have one name, mupax's takes precedence, then the one in `tuned` of the working
    directory, then the one in the user's folder.
    """
    paths: dict[str, Path] = {}
    # Folders in rising order of precedence: a later one replaces the files of an earlier one.
    for folder in (user_folder(), OWN_FOLDER, PUBLISHED, FOLDER):
        for path in folder.glob("*.json"):
            is_hidden = path.name.startswith(".")
            # A file of another kind may lie there, and editors leave hidden copies.
            if "." in path.stem and not is_hidden:
                # Some systems allow no colon in the name of a file, so a dot stands for it.
                name = path.stem.replace(".", ":", 1)
                paths[name] = path
    return dict(sorted(paths.items()))


def origin(path: Path) -> str:
    """Return the origin of a tuned preset's file as text: "mupax", "user, PATH" or "project, PATH".

    A file counts as the project's if it is neither in mupax's folders nor in `user_folder`.
    """
    if path.parent in (FOLDER, PUBLISHED):
        return "mupax"
    if path.parent == user_folder():
        return f"user, {path}"
    return f"project, {path}"


def find(word: str) -> Tuned:
    """Load the tuned preset that an argument of `--preset` names.

    Args:
        word: Argument of `--preset`: PRESET:NAME or PRESET:PATH.json.

    Raises:
        PresetError: No tuned preset has the name, the tuned preset no longer comes with mupax, its
            file cannot be used, or a file at a path is tuned for another preset.
    """
    preset, _, name = word.partition(":")
    if not name:
        near = [use for use in files() if word in use.split(":")]
        examples = ", ".join(near or files())
        raise PresetError(
            f"{word} is no tuned preset; write PRESET:NAME, such as {examples} "
            "(`mupax presets tuned` lists them)"
        )
    if name.endswith(".json"):
        tuned = load(name)
        # The constants in the file belong to its own preset and may mean something else in another.
        if tuned.preset != preset:
            raise PresetError(f"{name} is tuned for {tuned.preset}; write {tuned.preset}:{name}")
        return tuned

    paths = files()
    if word in paths:
        return load(paths[word])
    if word in MOVED:
        raise PresetError(
            f"{word} no longer comes with mupax: {MOVED[word]}. "
            f"Its data are docs/evidence/tuned/{preset}.{name}.json in the source; "
            f"write {preset} and tune it, or copy that file to {OWN_FOLDER.absolute()}, "
            f"where {word} is found. "
            "A run that it began goes on with `mupax train --resume --workdir FOLDER`"
        )
    same_preset = [use for use in paths if use.startswith(f"{preset}:")]
    choices = ", ".join([preset, *same_preset])
    raise PresetError(
        f"the preset {preset} has no tuned constants named {name!r}; write {choices} "
        f"(`mupax presets tuned` lists them). A file {preset}.{name}.json is looked for in "
        f"{OWN_FOLDER.absolute()} and in {user_folder()}"
    )


def load(path: str | Path) -> Tuned:
    """Read and check the file of a tuned preset.

    Raises:
        PresetError: The file cannot be read, or an entry is missing, unknown or invalid. The
            message names file and entry.
    """
    hint = "no tuned preset ({error}); `mupax transfer ... --save-tuned` writes one"
    fields = schema.load(path, schema.checked, hint)
    return Tuned(**drop_keys(fields, ("format",)))


def save(tuned: Tuned, path: Path) -> None:
    """Check a tuned preset and write it to `path` as JSON. A missing folder is made.

    An existing file is replaced.

    Raises:
        PresetError: `load` would refuse the file.
        DiskError: The file cannot be written.
    """
    fields = {"format": schema.FORMAT, **asdict(tuned)}
    # The schema describes what JSON gives back, which has no tuples.
    as_json = json.loads(json.dumps(fields))
    # Checked before the write, so that no file is left that `load` refuses.
    schema.checked(as_json)
    path.parent.mkdir(parents=True, exist_ok=True)
    disk.write_whole(path, json.dumps(fields, indent=1) + "\n")


def check_name(name: str) -> None:
    """Raise `PresetError` unless a name is small letters, digits and single hyphens."""
    if not schema.NAME.fullmatch(name):
        raise PresetError(
            f"the name {name!r}: write small letters, digits and single hyphens, "
            "such as lm-python-v1"
        )


def summary(tuned: Tuned) -> str:
    """Return one line on a tuned preset: learning rate, data, and the verdict for each grown axis.

    The result of a search over constants follows, if there was one. A published preset gets the
    line of `published.summary`.
    """
    if tuned.is_published:
        return published.summary(tuned)
    study = tuned.provenance
    optimizer = tuned.optimizer
    verdicts = []
    for growth in study["transfer"]:
        verdicts.append(f"{growth['axis']} {verdict(growth)}")
    evidence = "; ".join(verdicts) or "one size"
    rate = f"{optimizer['name']} {optimizer['peak_lr']:.3g}"
    data = f"{study['data']}, {study['seen']:,} {study['unit']}s"
    return f"{rate} on {data}; {evidence}{_search_summary(study)}"


def described(tuned: Tuned) -> str:
    """Return the full description of a tuned preset as text no wider than the terminal.

    The text has the summary, then a table of base, constants, optimizer, best learning rate, its
    curve, grown axes, run, command, versions and searched constants. A published preset is
    described by `published.described`.
    """
    if tuned.is_published:
        return published.described(tuned)
    study = tuned.provenance
    optimum = study["log2_optimum"]
    seeds = "one seed" if study["seeds"] == 1 else f"{study['seeds']} paired seeds"
    lines = [
        ("base", _pairs(tuned.base) if tuned.base else "none"),
        ("constants", f"{_pairs(tuned.constants) or 'none'}; form {tuned.form or 'its own'}"),
        ("optimizer", _pairs(tuned.optimizer)),
        ("optimum", f"2^{optimum['value']:.2f} {bounds(optimum)}, from {seeds}"),
    ]
    search = study.get("search")
    # The points of a search differ in more than the learning rate, so they make no curve.
    if not search:
        lines.append(("curve", _curve(study)))
    for growth in study["transfer"]:
        sizes = ", ".join(str(size) for size in growth["sizes"])
        lines.append(("grown", f"{growth['axis']} {sizes}: {verdict(growth)}"))
    lines += [
        ("run", f"{study['recipe']}, {study['steps']} steps of batch {study['batch']}"),
        ("command", terminal.current_spelling(study["command"])),
        ("versions", f"{_pairs(study['versions'])}, {study['date']}"),
    ]
    if search:
        lines += [("searched", _constant(constant)) for constant in search["constants"]]
    head = terminal.wrapped(f"{tuned.use}, {tuned.evidence}: {summary(tuned)}")
    return f"{head}\n{terminal.table(lines)}"


def _curve(study: Mapping[str, Any]) -> str:
    """Return the mean loss at each learning rate of a study as text.

    A loss of null is written as "diverged".

    Args:
        study: Provenance of a tuned preset, `Tuned.provenance`.
    """
    points = []
    for log2_lr, loss in zip(study["log2_lr"], study["loss"], strict=True):
        result = "diverged" if loss is None else f"{loss:.4f}"
        points.append(f"2^{log2_lr:g} {result}")
    return f"of {study.get('judged', 'training')} loss: {', '.join(points)}"


def verdict(grown: Mapping[str, Any]) -> str:
    """Return the verdict on learning rate transfer along one axis, with the measured drift.

    The drift is that of the best learning rate, in octaves per doubling, with its interval. The
    text is "undecided" if the file has no drift.

    Args:
        grown: Entry of the provenance's `transfer`.
    """
    drift = grown["drift"]
    if drift["value"] is None:
        return "undecided"
    return f"{_verdict(grown)}, drift {drift['value']:+.2f} {bounds(drift)} octaves per doubling"


def _verdict(grown: Mapping[str, Any]) -> Verdict:
    """Return the verdict on learning rate transfer along one axis.

    It is recomputed from the drift by `judge`, and so may differ from the file's. If the file does
    not say "transfers", that verdict becomes "undecided".

    Args:
        grown: Entry of the provenance's `transfer`.
    """
    drift = grown["drift"]
    verdict = judge(drift["value"], drift["low"], drift["high"])
    # Another verdict in the file may be that of a study without an optimum at one end.
    if verdict == "transfers" and grown["verdict"] != "transfers":
        return "undecided"
    return verdict


def bounds(interval: Mapping[str, float | None], digits: int = 2) -> str:
    """Return an interval in brackets, or "(no interval)".

    Args:
        interval: Entries `low` and `high`. `None` if there is no bound.
        digits: Digits after the decimal point, 2 by default.
    """
    low = interval["low"]
    high = interval["high"]
    if low is None or high is None:
        return "(no interval)"
    return f"[{low:.{digits}f}, {high:.{digits}f}]"


def _search_summary(study: Mapping[str, Any]) -> str:
    """Return the result of a study's search over constants as text, empty if there was none.

    The text has the number of constants and the loss of the best point minus that of the starting
    point.
    """
    search = study.get("search")
    if not search:
        return ""
    difference = search["winner_less_start"]
    if difference["value"] is None:
        gain = "not compared"
    else:
        gain = f"{difference['value']:+.4f} {bounds(difference, 4)} nats"
    count = len(search["constants"])
    seeds = f"{search['fresh_seeds']} fresh seeds"
    return f"; {count} constants searched, {gain} against the start on {seeds}"


def _constant(constant: Mapping[str, Any]) -> str:
    """Return one searched constant as text: best value, range, starting value and importance."""
    span = f"from {constant['low']:.4g} to {constant['high']:.4g}, start {constant['start']:.4g}"
    importance = f"importance {constant['importance']:.0%}"
    return f"{constant['word']} = {constant['winner']:.4g} ({span}, {importance})"


def _pairs(values: Mapping[str, Any]) -> str:
    """Return a mapping as "NAME=VALUE NAME=VALUE"."""
    return " ".join(f"{name}={value}" for name, value in values.items())
