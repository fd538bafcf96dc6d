"""Files that a model needs besides its weights: tokenizer, chat template, class names and preprocessing.

A run writes them into `WORKDIR/assets/` before its first step, so that a copy of the workdir can be used where neither the
training data nor the cache is. The manifest of every checkpoint names them with size and digest.

    assets.json           what the run knows about its data's format, below; written last
    tokenizer.json        of data.tokenizer bpe:SIZE or FILE, byte for byte; none for bytes and ids:SIZE
    chat_template.jinja   the template that made text of conversations, or the one that lay beside FILE
    from-step-N/          all of these again, if a resumed run changed one of them at step N

The fields of assets.json (`mupax.train.data.assets` makes them; a field is left out where it does not apply):

    format         "mupax-assets-1"
    tokenizer      name (data.tokenizer as the run was given it), key (names its content), vocab_size,
                   separator {text, id}, begin and end (what the tokenizer puts around a text: [{text, id}, ...]),
                   ends (ids that end a text: the separator, and eos of the files that lay beside FILE)
    chat_template  tokens (special tokens by the names that a template may use, such as bos_token)
    class_names    a name per label
    pixels         the fields of data.pixels
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from mupax import disk
from mupax.disk import JsonError
from mupax.train.checkpoints import layout
from mupax.train.checkpoints.folder import CHECKPOINTS, WorkdirError, steps
from mupax.train.checkpoints.layout import ASSETS as FOLDER
from mupax.train.checkpoints.layout import ASSETS_RECORD as RECORD
from mupax.train.checkpoints.layout import DamagedError, ForeignError
from mupax.train.config.data import DataConfig

TOKENIZER = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"
FORMAT = "mupax-assets-1"

Entries = dict[str, list[Any]]
"""Path inside the workdir to size in bytes and digest."""

_MEND = f"copy the folder {FOLDER} of the run, or of a copy of it, there again"


class AssetsError(WorkdirError):
    """An asset that is missing or damaged. The text names the file and says how to go on."""


@dataclasses.dataclass(frozen=True)
class Assets:
    """The assets of one checkpoint, found by `find`. A file is verified when it is asked for."""

    workdir: Path
    entries: Entries
    """The files. Size and digest are missing if the checkpoint is of a version that named none."""

    @property
    def tokenizer(self) -> Path | None:
        """Verified path of tokenizer.json; None for a run without one.

        Raises:
            AssetsError: it is missing or damaged.
        """
        return self._verified(TOKENIZER)

    @property
    def chat_template(self) -> Path | None:
        """Verified path of chat_template.jinja; None for a run without one.

        Raises:
            AssetsError: it is missing or damaged.
        """
        return self._verified(CHAT_TEMPLATE)

    @property
    def record(self) -> dict[str, Any]:
        """Verified content of assets.json.

        Raises:
            AssetsError: it is missing or damaged, or of a newer version.
        """
        path = next((path for path in self.entries if _name(path) == RECORD), f"{FOLDER}/{RECORD}")
        content = _content(self.workdir, path, self.entries.get(path, []))
        try:
            record = disk.json_object(content, str(self.workdir / path))
        except JsonError as error:
            raise AssetsError(f"{error}; {_MEND}") from error
        if record.get("format") != FORMAT:
            raise AssetsError(
                f"{self.workdir / path} has the format {disk.shown(record.get('format'))}, and this version reads "
                f"{FORMAT}; use the version that wrote it, or a newer one"
            )
        return record

    @property
    def facts(self) -> dict[str, Any]:
        """Class names and preprocessing, by the names that config.json's `data` has for them.

        Empty where assets.json is missing, since config.json and manifests have them too.

        Raises:
            AssetsError: assets.json is damaged.
        """
        path = self._path(RECORD)
        if path is None or disk.status(path) is None:
            return {}
        record = self.record
        facts = {}
        for name, kind in (("class_names", list), ("pixels", dict)):
            if name in record and not isinstance(record[name], kind):
                raise AssetsError(f"{path} has {name} {disk.shown(record[name])}; {_MEND}")
            if name in record:
                facts[name] = record[name]
        return facts

    def files(self) -> dict[str, bytes]:
        """Return the content of every file by its name, for a run that is made of this one.

        Raises:
            AssetsError: one is missing or damaged.
        """
        return {
            _name(path): _content(self.workdir, path, entry) for path, entry in self.entries.items()
        }

    def in_place_of(self, recorded: DataConfig, current: DataConfig | None = None) -> DataConfig:
        """Return settings that name the run's own tokenizer and chat template instead of what they were made from.

        Args:
            recorded: settings of the run.
            current: settings to change; those of the run unless given. What they have otherwise than the run stays.

        Raises:
            AssetsError: a file is missing or damaged.
        """
        data = recorded if current is None else current
        changed: dict[str, str] = {}
        if data.tokenizer == recorded.tokenizer and self.tokenizer is not None:
            changed["tokenizer"] = str(self.tokenizer)
        if data.chat_template == recorded.chat_template:
            # A missing one is an error only of what renders conversations, and that reads the path.
            template = self._path(CHAT_TEMPLATE)
            missing = template is not None and disk.status(template) is None
            template = template if missing else self.chat_template
            if template is not None:
                changed["chat_template"] = str(template)
        return dataclasses.replace(data, **changed)

    def _path(self, name: str) -> Path | None:
        return next((self.workdir / path for path in self.entries if _name(path) == name), None)

    def _verified(self, name: str) -> Path | None:
        for path, entry in self.entries.items():
            if _name(path) == name:
                _content(self.workdir, path, entry)
        return self._path(name)


def find(workdir: Path, step: int | None = None) -> Assets | None:
    """Return the assets of a run's checkpoint, or None if the run has none since an older version wrote it.

    Files that somebody put into the folder of such a run count, too.

    Args:
        workdir: folder of the run.
        step: the checkpoint; the newest one unless given.

    Raises:
        DiskError: the disk cannot be read.
    """
    entries = _named(workdir, step)
    if not entries:
        names = disk.names(workdir / FOLDER)
        entries = {
            f"{FOLDER}/{name}": [] for name in (TOKENIZER, CHAT_TEMPLATE, RECORD) if name in names
        }
    return Assets(workdir, entries) if entries else None


def problems(workdir: Path, entries: Entries) -> list[str]:
    """Return a line for each asset that is missing or damaged.

    Args:
        workdir: folder of the run.
        entries: assets that a manifest names.
    """
    lines: list[str] = []
    for path, entry in entries.items():
        if (problem := _problem(workdir / path, entry)) is not None:
            lines.append(f"{path} {problem}")
    return lines


def write(workdir: Path, files: Mapping[str, bytes], step: int = 0) -> Entries:
    """Write a run's assets and return the entries that its manifests hold. Process 0 alone calls this.

    A resumed run keeps its files, and what is missing or damaged is written again. If the content has changed, it goes
    into a folder of its own, because earlier checkpoints need the earlier files.

    Args:
        workdir: folder of the run.
        files: content by name, assets.json among them.
        step: at which this part of the run begins.

    Raises:
        DiskError: the disk does not take them.
    """
    entries = _named(workdir, None)
    if not entries or not _agrees(workdir, entries, files):
        folder = f"{FOLDER}/from-step-{step}" if entries else FOLDER
        last = sorted(
            files, key=lambda name: name == RECORD
        )  # assets.json says that all others are there
        entries = {f"{folder}/{name}": _entry(files[name]) for name in last}
        for name in {
            RECORD,
            TOKENIZER,
            CHAT_TEMPLATE,
        } - files.keys():  # left by a run that never saved
            (workdir / folder / name).unlink(missing_ok=True)
    for path, entry in entries.items():
        content = files[_name(path)]
        if entry != _entry(content) or _problem(workdir / path, entry) is None:
            continue
        (workdir / path).parent.mkdir(parents=True, exist_ok=True)
        disk.write_whole(workdir / path, content)
    return entries


def copy(workdir: Path, target: Path) -> None:
    """Copy every file of a workdir's assets, for checkpoints that move to another workdir.

    Raises:
        DiskError: a file cannot be read or written.
    """
    folders = [
        "",
        *(name for name in disk.names(workdir / FOLDER) if name.startswith("from-step-")),
    ]
    for folder in folders:
        for name in (TOKENIZER, CHAT_TEMPLATE, RECORD):
            source = workdir / FOLDER / folder / name
            if disk.status(source) is None:
                continue
            copied = target / FOLDER / folder / name
            copied.parent.mkdir(parents=True, exist_ok=True)
            disk.write_whole(copied, disk.read_bytes(source))


def _named(workdir: Path, step: int | None) -> Entries:
    """Return what the manifest of a step, or the newest one that can be read, says of assets; empty if it says nothing."""
    candidates = list(reversed(steps(workdir / CHECKPOINTS))) if step is None else [step]
    for candidate in candidates:
        try:
            return layout.read(workdir / CHECKPOINTS / str(candidate)).assets
        except (DamagedError, ForeignError):  # whoever reads the checkpoint says so
            continue
    return {}


def _agrees(workdir: Path, entries: Entries, files: Mapping[str, bytes]) -> bool:
    """Return whether files have the content that a checkpoint names.

    Another version may write more fields into assets.json: only those that are there already count.
    """
    if {_name(path) for path in entries} != files.keys():
        return False
    for path, entry in entries.items():
        content = files[_name(path)]
        if entry == _entry(content):
            continue
        if _name(path) != RECORD or _problem(workdir / path, entry) is not None:
            return False
        there = disk.read_json(workdir / path)
        now = disk.json_object(content, RECORD)
        if not _holds(now, there):
            return False
    return True


def _holds(now: Any, there: Any) -> bool:
    """Return whether JSON has all fields of other JSON with the same values. It may have more."""
    if isinstance(there, dict) and isinstance(now, dict):
        return all(name in now and _holds(now[name], value) for name, value in there.items())
    return now == there


def _content(workdir: Path, path: str, entry: list[Any]) -> bytes:
    """Return the content of a file as it was written; raises AssetsError if it is missing or damaged."""
    if (problem := _problem(workdir / path, entry)) is not None:
        raise AssetsError(f"{workdir / path} {problem}; {_MEND}")
    return disk.read_bytes(workdir / path)


def _problem(path: Path, entry: list[Any]) -> str | None:
    """Return what is wrong with a file at two reads, or None."""
    problem = None
    for _ in range(2):
        try:
            content = disk.read_bytes(path)
        except disk.ABSENT:
            problem = "is missing"
            continue
        if not entry or entry == _entry(content):
            return None
        size = entry[0]
        problem = "has other content than the run wrote"
        if len(content) != size:
            problem = f"has {len(content)} bytes, and the run wrote {size}"
    return problem


def _entry(content: bytes) -> list[Any]:
    return [len(content), xxhash.xxh3_128_hexdigest(content)]


def _name(path: str) -> str:
    return path.rpartition("/")[2]
