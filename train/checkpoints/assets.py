"""Files that a model needs besides its weights: tokenizer, chat template, preprocessing, names.

A run writes them into `WORKDIR/assets/` before its first step, so that a copy of the workdir can be
used without the training data and without the cache. The manifest of every checkpoint lists them
with size and digest.

    assets.json           format of the data, see below; written last
    tokenizer.json        copy of the file of data.tokenizer bpe:SIZE or FILE, byte for byte;
                          none for bytes and ids:SIZE
    chat_template.jinja   template that made text of conversations, or the one beside FILE
    from-step-N/          all of these again, if a resumed run changed one of them at step N

Fields of assets.json, which `files_of` makes of the data. A field that does not apply is left out.

    format         "mupax-assets-1"
    tokenizer      name (data.tokenizer as the user wrote it), key (identifies its content),
                   vocab_size, separator {text, id},
                   begin and end (tokens that the tokenizer puts around a text: [{text, id}, ...]),
                   ends (ids that end a text: the separator, and eos of the files beside FILE)
    chat_template  tokens (special tokens by the names that a template may use, such as bos_token)
    class_names    a name per label
    pixels         the fields of data.pixels
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from mupax import disk
from mupax.disk import JsonError, path_of
from mupax.train.checkpoints import layout
from mupax.train.checkpoints.folder import CHECKPOINTS, WorkdirError, steps
from mupax.train.checkpoints.layout import ASSETS as FOLDER
from mupax.train.checkpoints.layout import ASSETS_RECORD as RECORD
from mupax.train.checkpoints.layout import DamagedError, ForeignError
from mupax.train.config.data import DataConfig
from mupax.train.data import cache
from mupax.train.data.interface import Data, DataError

TOKENIZER = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"
FORMAT = "mupax-assets-1"

Entries = dict[str, list[Any]]
"""Mapping from a file's path inside the workdir to its `[size in bytes, xxh3_128 digest]`.

The list is empty for a file whose digest is not known."""

_MEND = f"copy the folder {FOLDER} of the run, or of a copy of it, there again"


class AssetsError(WorkdirError):
    """Error for a missing or damaged asset of a run, such as its tokenizer.json.

    The text names the file and says how to go on.
    """


@dataclasses.dataclass(frozen=True)
class Assets:
    """Files that the model of a checkpoint needs besides its weights, such as the tokenizer.

    `find` returns them. A file is compared with its recorded size and digest each time a property
    or method reads it.
    """

    workdir: Path
    entries: Entries
    """Size in bytes and digest of each file, by its path inside the workdir.

    The list of a file is empty if the manifest does not list it. The file is then not verified.
    """

    @property
    def tokenizer(self) -> Path | None:
        """Verified path of tokenizer.json, or `None` for a run without one.

        Raises:
            AssetsError: The file is missing or damaged.
        """
        return self._verified(TOKENIZER)

    @property
    def chat_template(self) -> Path | None:
        """Verified path of chat_template.jinja, or `None` for a run without one.

        Raises:
            AssetsError: The file is missing or damaged.
        """
        return self._verified(CHAT_TEMPLATE)

    @property
    def record(self) -> dict[str, Any]:
        """Verified content of assets.json.

        Raises:
            AssetsError: The file is missing or damaged, or has the format of another version.
        """
        path = f"{FOLDER}/{RECORD}"
        for listed in self.entries:
            if _name(listed) == RECORD:
                path = listed
                break
        content = _content(self.workdir, path, self.entries.get(path, []))
        try:
            record = disk.json_object(content, str(self.workdir / path))
        except JsonError as error:
            raise AssetsError(f"{error}; {_MEND}") from error
        if record.get("format") != FORMAT:
            raise AssetsError(
                f"{self.workdir / path} has the format {disk.shown(record.get('format'))}, and "
                f"this version reads {FORMAT}; use the version that wrote it, or a newer one"
            )
        return record

    @property
    def facts(self) -> dict[str, Any]:
        """Entries `class_names` and `pixels` (image preprocessing) of assets.json, if it has them.

        A missing assets.json gives an empty dictionary and no error, because config.json and the
        manifests of checkpoints hold both entries, too.

        Raises:
            AssetsError: The file assets.json is damaged, or has the format of another version.
        """
        path = self._path(RECORD)
        if path is None or disk.status(path) is None:
            return {}
        record = self.record
        facts = {}
        for name, json_type in (("class_names", list), ("pixels", dict)):
            if name not in record:
                continue
            if not isinstance(record[name], json_type):
                raise AssetsError(f"{path} has {name} {disk.shown(record[name])}; {_MEND}")
            facts[name] = record[name]
        return facts

    def files(self) -> dict[str, bytes]:
        """Return the content of every file by its name, for a run that is made from this one.

        Raises:
            AssetsError: A file is missing or damaged.
        """
        contents: dict[str, bytes] = {}
        for path, entry in self.entries.items():
            contents[_name(path)] = _content(self.workdir, path, entry)
        return contents

    def in_place_of(self, recorded: DataConfig, current: DataConfig | None = None) -> DataConfig:
        """Return data settings with the paths of the tokenizer and chat template the run keeps.

        The recorded names may lead to other files by now. The run's own copies are those that it
        was trained with. They are verified, except for a missing chat template: its path is
        returned, and reading it fails later.

        Args:
            recorded: Data settings in the config.json of the run.
            current: Settings to change; by default `recorded`. A tokenizer or template that differs
                from the recorded one is not replaced.

        Raises:
            AssetsError: The tokenizer is missing or damaged, or the template is damaged.
        """
        data = recorded if current is None else current
        changed: dict[str, str] = {}
        # The name in the config may lead to another file by now. The copy in the workdir is the
        # tokenizer that the run was trained with.
        if data.tokenizer == recorded.tokenizer and self.tokenizer is not None:
            changed["tokenizer"] = str(self.tokenizer)
        if data.chat_template == recorded.chat_template:
            template = self._path(CHAT_TEMPLATE)
            # A missing template is an error only for a command that renders conversations. The
            # command fails when it reads the path.
            is_missing = template is not None and disk.status(template) is None
            if not is_missing:
                template = self.chat_template
            if template is not None:
                changed["chat_template"] = str(template)
        return dataclasses.replace(data, **changed)

    def _path(self, name: str) -> Path | None:
        """Return the path of a file, not verified, or `None` if the run has no such file."""
        for path in self.entries:
            if _name(path) == name:
                return self.workdir / path
        return None

    def _verified(self, name: str) -> Path | None:
        """Return the path of a file after verifying it, or `None` if the run has no such file.

        Raises:
            AssetsError: The file is missing or damaged.
        """
        for path, entry in self.entries.items():
            if _name(path) == name:
                _content(self.workdir, path, entry)
        return self._path(name)


def find(workdir: Path, step: int | None = None) -> Assets | None:
    """Return the assets (tokenizer and others) that a checkpoint's manifest lists.

    No asset is read. If the manifest lists none, as in older versions, or cannot be read, the
    result has the tokenizer.json, chat_template.jinja and assets.json in WORKDIR/assets, without
    digests. They are not verified later.

    Args:
        step: Step of the checkpoint; by default the newest one with a readable manifest.

    Returns:
        Assets, or `None` if the manifest lists none and WORKDIR/assets holds none of these files.

    Raises:
        DiskError: The disk cannot be read.
    """
    entries = _named(workdir, step)
    # If the manifests list no assets, a user may still have copied files into the folder.
    if not entries:
        names = disk.names(workdir / FOLDER)
        for name in (TOKENIZER, CHAT_TEMPLATE, RECORD):
            if name in names:
                entries[f"{FOLDER}/{name}"] = []  # no digest: the file is not verified
    return Assets(workdir, entries) if entries else None


def problems(workdir: Path, entries: Entries) -> list[str]:
    """Return a line for each asset of a run (tokenizer and others) that is missing or damaged.

    Args:
        entries: Size and digest by path inside `workdir`, as a manifest lists the assets.
    """
    lines: list[str] = []
    for path, entry in entries.items():
        problem = _problem(workdir / path, entry)
        if problem is not None:
            lines.append(f"{path} {problem}")
    return lines


def write(workdir: Path, files: Mapping[str, bytes], step: int = 0) -> Entries:
    """Write a run's assets (tokenizer and others). Return their sizes and digests by path.

    The manifests of the run's checkpoints list these entries. Process 0 alone calls this. A resumed
    run keeps its files, and those that are missing or damaged are written again. Changed content
    goes into assets/from-step-N, because earlier checkpoints need the earlier files. Assets that a
    run without checkpoints left there, and that are not in `files`, are deleted.

    Args:
        files: Content by name. One of them is `assets.json`.
        step: Steps done when this part of the run begins.

    Raises:
        DiskError: A file cannot be written.
    """
    entries = _named(workdir, None)
    if not entries or not _agrees(workdir, entries, files):
        folder = f"{FOLDER}/from-step-{step}" if entries else FOLDER
        # assets.json is written last: once it exists, all other files exist, too.
        names = sorted(files, key=lambda name: name == RECORD)
        entries = {f"{folder}/{name}": _entry(files[name]) for name in names}
        # A run that never saved a checkpoint may have left files that this run does not have.
        for name in {RECORD, TOKENIZER, CHAT_TEMPLATE} - files.keys():
            (workdir / folder / name).unlink(missing_ok=True)
    for path, entry in entries.items():
        content = files[_name(path)]
        # An assets.json that another version wrote differs from `content`, and is kept.
        if entry != _entry(content) or _problem(workdir / path, entry) is None:
            continue
        (workdir / path).parent.mkdir(parents=True, exist_ok=True)
        disk.write_whole(workdir / path, content)
    return entries


def copy(workdir: Path, target: Path) -> None:
    """Copy every file of a workdir's assets, for checkpoints that move to another workdir.

    Raises:
        DiskError: A file cannot be read or written.
    """
    names = disk.names(workdir / FOLDER)
    subfolders = [name for name in names if name.startswith("from-step-")]
    for folder in ("", *subfolders):
        for name in (TOKENIZER, CHAT_TEMPLATE, RECORD):
            source = workdir / FOLDER / folder / name
            if disk.status(source) is None:
                continue
            copied = target / FOLDER / folder / name
            copied.parent.mkdir(parents=True, exist_ok=True)
            disk.write_whole(copied, disk.read_bytes(source))


def _named(workdir: Path, step: int | None) -> Entries:
    """Return size and digest, by path, of the assets that a checkpoint's manifest lists.

    Empty if the manifest lists none or cannot be read.

    Args:
        step: Step of the checkpoint, or `None` for the newest one whose manifest can be read.
    """
    candidates = steps(workdir / CHECKPOINTS)[::-1] if step is None else [step]
    for candidate in candidates:
        try:
            return layout.read(workdir / CHECKPOINTS / str(candidate)).assets
        except (DamagedError, ForeignError):  # reported when the checkpoint itself is read
            continue
    return {}


def _agrees(workdir: Path, entries: Entries, files: Mapping[str, bytes]) -> bool:
    """Return whether new files have the names and contents that a checkpoint lists.

    A differing assets.json agrees, too, if the file on disk is undamaged and the new one has all of
    its fields with the same values: another version may write more fields.

    Args:
        entries: Size and digest by path, as the manifest of the checkpoint has them.
    """
    if {_name(path) for path in entries} != files.keys():
        return False
    for path, entry in entries.items():
        content = files[_name(path)]
        if entry == _entry(content):
            continue
        if _name(path) != RECORD or _problem(workdir / path, entry) is not None:
            return False
        stored = disk.read_json(workdir / path)
        new = disk.json_object(content, RECORD)
        if not _includes(new, stored):
            return False
    return True


def _includes(new: Any, stored: Any) -> bool:
    """Return whether `new` has all fields of `stored` with the same values, at every depth."""
    if isinstance(stored, dict) and isinstance(new, dict):
        return all(name in new and _includes(new[name], value) for name, value in stored.items())
    return new == stored


def _content(workdir: Path, path: str, entry: list[Any]) -> bytes:
    """Return the content of a file after verifying it.

    Args:
        path: Path of the file inside the workdir.
        entry: Size and digest. If empty, the file only has to be there.

    Raises:
        AssetsError: The file is missing or damaged.
    """
    problem = _problem(workdir / path, entry)
    if problem is not None:
        raise AssetsError(f"{workdir / path} {problem}; {_MEND}")
    return disk.read_bytes(workdir / path)


def _problem(path: Path, entry: list[Any]) -> str | None:
    """Read a file up to twice. Return what is wrong with it, or `None` if one read is good.

    Args:
        entry: Size and digest. If empty, the file only has to be there.
    """
    problem = None
    for _ in range(2):  # a single bad read may be a passing failure of the disk
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
    """Return size in bytes and digest of a file's content."""
    return [len(content), xxhash.xxh3_128_hexdigest(content)]


def _name(path: str) -> str:
    """Return the part of a path after its last slash."""
    return path.rpartition("/")[2]


_NEAR = ("generation_config.json", "config.json", "tokenizer_config.json")
"""Files next to a tokenizer that name the tokens which end a text."""


def files_of(data: Data, config: DataConfig, note: cache.Note = print) -> dict[str, bytes]:
    """Return the content of a new run's assets by file name. Nothing is written.

    assets.json is always among them. tokenizer.json and chat_template.jinja are there if the run
    uses such files.

    Args:
        config: Data settings of the run. Their tokenizer may have another name than the file that
            `data` was opened with.
        note: Function that takes one line of text if the chat template cannot be used.

    Raises:
        DataError: The tokenizer's file has changed since the data was opened, or the data is
            chat:PATH and its chat template cannot be used.
    """
    record: dict[str, Any] = {"format": FORMAT}
    files: dict[str, bytes] = {}
    if data.tokenizer is not None:
        record["tokenizer"] = _described(data, config)
        content = _tokenizer_content(data.tokenizer)
        if content:
            files[TOKENIZER] = content
        files |= _chat_files(data, record, note)
    if data.class_names is not None:
        record["class_names"] = list(data.class_names)
    pixels = data.facts.get("pixels")
    if pixels is None and data.kind == "images":
        pixels = dataclasses.asdict(data.pixels)  # pyright: ignore[reportAttributeAccessIssue]
    if pixels is not None:
        record["pixels"] = pixels
    files[RECORD] = (json.dumps(record, indent=2) + "\n").encode()
    return files


def end_ids(name: str, tokenizer: Any) -> frozenset[int]:
    """Return the token ids that end a text: the tokenizer's separator, and ids in files beside it.

    The files next to the tokenizer are generation_config.json, config.json, tokenizer_config.json
    and assets.json.

    Args:
        name: Value of data.tokenizer. Files next to it count if it is the path of a tokenizer.json.

    Raises:
        JsonError: Such a file is damaged.
    """
    ends = {int(tokenizer.separator)}
    if not name.endswith(".json"):
        return frozenset(ends)

    folder = path_of(name).parent
    for file in (*_NEAR, RECORD):
        if not (folder / file).is_file():
            continue
        fields = disk.read_json(folder / file)
        if file == RECORD:
            described = fields.get("tokenizer")
            ids = described.get("ends") if isinstance(described, dict) else None
            ends.update(_whole_numbers(ids if isinstance(ids, list) else []))
            continue

        ids = fields.get("eos_token_id")
        ends.update(_whole_numbers(ids if isinstance(ids, list) else [ids]))
        token = fields.get("eos_token")
        if isinstance(token, dict):
            token = token.get("content")
        number = tokenizer.find(token) if isinstance(token, str) else None
        if number is not None:
            ends.add(number)
    return frozenset(ends)


def _whole_numbers(values: list[Any]) -> list[int]:
    """Return the integers among values of JSON. Booleans are left out."""
    return [value for value in values if type(value) is int]


def _described(data: Data, config: DataConfig) -> dict[str, Any]:
    """Return the tokenizer's entry in assets.json: name, key, vocabulary size and special tokens.

    The ids that end a text include those of files next to the tokenizer, unless one is damaged.
    """
    tokenizer = data.tokenizer
    try:
        ends = end_ids(data.config.tokenizer, tokenizer)
    except disk.JsonError:
        # Training does not read the files next to the tokenizer, so a damaged one must not stop it.
        ends = {int(tokenizer.separator)}

    def token(number: int) -> dict[str, Any]:
        return {"text": tokenizer.token(number), "id": number}

    return {
        "name": config.tokenizer,
        "key": tokenizer.key,
        "vocab_size": tokenizer.vocab_size,
        "separator": token(int(tokenizer.separator)),
        "begin": [token(number) for number in tokenizer.start.tolist()],
        "end": [token(number) for number in tokenizer.end.tolist()],
        "ends": sorted(ends),
    }


def _tokenizer_content(tokenizer: Any) -> bytes | None:
    """Return the content of a tokenizer's file, or None for a tokenizer without one (bytes, ids).

    Raises:
        DataError: The file is gone or has changed since the tokenizer was opened.
    """
    path = getattr(tokenizer, "path", None)
    if path is None:
        return None
    try:
        content = disk.read_bytes(path)
    except disk.ABSENT:
        content = b""
    if not tokenizer.is_of(content):
        raise DataError(
            f"the tokenizer {path} has changed while the run started; write the same command again"
        )
    return content


def _chat_files(data: Data, record: dict[str, Any], note: cache.Note) -> dict[str, bytes]:
    """Return the content of chat_template.jinja under this name, or an empty dictionary.

    Special tokens that the template may use are added to `record` (`chat_template.tokens`). If the
    template cannot be used, `note` gets a caution and the result is empty.

    Raises:
        DataError: The data is chat:PATH and its template cannot be used.
    """
    config = data.config
    if not config.tokenizer.endswith(".json") and config.chat_template is None:
        return {}
    from mupax.train.data.chats import templates

    try:
        tokens = templates.special_tokens(config.tokenizer)
        template = templates.find(config.tokenizer, config.chat_template)
    except DataError as error:
        # Only a run on conversations needs the template for its training.
        if config.name.startswith("chat:"):
            raise
        note(f"caution: this run keeps no chat template: {error}")
        return {}
    if tokens:
        record["chat_template"] = {"tokens": tokens}
    if template is None:
        return {}
    return {CHAT_TEMPLATE: template.source.encode()}
