"""Folder of a run: claiming and locking it, and config.json, which records how the run was made.

Folders that other commands make (`making.py`) have a mark, `MARK`, so that nothing is read from a
folder that is not complete. The mark is written first, as not complete, and written again when
everything else is on the disk. A folder without a mark is of an older version or of another
program, and is read as it is.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import secrets
import shlex
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mupax import MupaxError, __version__, disk, terminal
from mupax.config_fields import config_fields, declared
from mupax.disk import is_remote, path_of, remove_tree
from mupax.train.checkpoints import folder
from mupax.train.checkpoints.folder import CHECKPOINTS, WorkdirError, newest_record, wrong_entry
from mupax.train.checkpoints.layout import PROBES, locks_files, missing_capabilities
from mupax.train.config import record as config_record
from mupax.train.config.data import DataConfig
from mupax.train.config.record import completed, differences, text_of, to_json
from mupax.train.config.run import Config
from mupax.train.parallel.hardware import VARIABLES
from mupax.train.parallel.processes import Processes

MARK = ".mupax-made.json"
"""File in a folder that a command makes. It says whether the folder is complete."""
RECORD = "config.json"
"""File with the resolved config, versions, data facts and earlier parts of a run."""
_SHARED = ".shared"
_LOCK = ".lock"
_OWNER = ".owner"
_PROBE = ".writable"
_PARTIAL = f".{RECORD}.partial"
_STORAGE = ".storage"
_FIRST = (_SHARED, _LOCK, _OWNER, _PROBE, _STORAGE, _PARTIAL, *PROBES, "attempts*.jsonl")
"""Glob patterns of the files that a run writes before config.json.

A folder that holds only such files counts as empty: a killed run may have left them."""
_BEFORE_STEPS = (RECORD, "metrics.jsonl", "tensorboard", "assets", CHECKPOINTS)
"""Names of the files and folders that a run writes after `_FIRST`, before its first step ends."""
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


class HalfMadeError(MupaxError):
    """Folder that a command has begun to make and not finished. The text names the command."""


def write_mark(
    folder: Path, command: Sequence[str], names: Sequence[str] = (), *, complete: bool
) -> None:
    """Write the mark of a folder: .mupax-made.json, which says whether the folder is complete.

    The file is written atomically.

    Args:
        folder: Folder that exists, or any folder of a bucket.
        command: Words of the command that makes the folder.
        names: Entries of the folder that the command makes. They may be deleted while the folder is
            not complete.
        complete: Whether everything else in the folder is on the disk.

    Raises:
        DiskError: The mark cannot be written.
    """
    content = {
        "complete": complete,
        "command": shlex.join(command),
        "names": sorted(names),
        "version": __version__,
    }
    disk.write_whole(folder / MARK, json.dumps(content, indent=2) + "\n")


def read_mark(folder: Path) -> dict[str, Any] | None:
    """Return the content of a folder's mark (.mupax-made.json), or `None` if it has none.

    The keys are `complete`, `command` (one text, quoted for a shell), `names` and `version`, as
    `write_mark` wrote them. Flags in `command` are changed to their current spelling.

    Raises:
        JsonError: The mark is damaged.
        DiskError: The disk cannot be read.
    """
    path = folder / MARK
    if disk.status(path) is None:
        return None
    content = disk.read_json(path)
    names = content.get("names")
    has_names = isinstance(names, list) and all(isinstance(name, str) for name in names)
    has_complete = isinstance(content.get("complete"), bool)
    has_command = isinstance(content.get("command"), str)
    if not (has_names and has_complete and has_command):
        raise disk.JsonError(
            f"{path}: not the mark of a folder; delete it if the folder is as it should be"
        )
    # A command that an earlier version began is finished by the same command, which may have
    # another spelling now.
    return {**content, "command": terminal.current_spelling(content["command"])}


def check_complete(folder: Path) -> None:
    """Refuse a folder that a command has not finished, before anything is read from it.

    A folder without a mark (.mupax-made.json) is not refused.

    Raises:
        HalfMadeError: The mark says that the folder is not complete.
        JsonError, DiskError: The mark is damaged or cannot be read.
    """
    mark = read_mark(folder)
    if mark is not None and not mark["complete"]:
        raise HalfMadeError(
            f"{folder} is not complete: it was not finished by `{mark['command']}`; write that "
            "command again, or wait for it where it still runs"
        )


def claim(config: Config, processes: Processes) -> tuple[Path, bool]:
    """Make the folder of a run, or check that the run may go on in the folder that is there.

    Process 0 does this. It also tests that the storage works, and restores a damaged config.json
    from the newest checkpoint. The other processes wait up to 10 seconds until they see the folder.

    Args:
        config: Config of the run: its `workdir`, and whether to `resume` in it.
        processes: All processes of the run, which call this together.

    Returns:
        Folder, and whether an earlier part of the run is in it.

    Raises:
        WorkdirError: The folder cannot be used. It holds something and `resume` is off, it holds no
            run or a run with another model or data, it cannot be written, or this process does not
            see the folder of process 0.
        HalfMadeError: Another command has not finished the folder.
    """
    name, resumed = processes.broadcast("workdir", lambda: _claim(config))
    path = path_of(name)
    if processes.count == 1 or is_remote(path):
        return path, resumed

    # All processes write into one folder. A file of process 0 shows that it is the same one.
    if processes.leader:
        (path / _SHARED).touch()
    # Up to 10 seconds: a network file system may remember for a while that a file was missing.
    for _ in range(20):
        if (path / _SHARED).exists():
            break
        time.sleep(0.5)
    else:
        raise WorkdirError(
            f"process {processes.index} does not see the workdir {path} of process 0, where all "
            "processes save their part of a checkpoint; give --workdir a bucket (gs://...) or a "
            "folder that all hosts share"
        )
    # The file must stay until all processes have seen it.
    processes.barrier("workdir")
    if processes.leader:
        (path / _SHARED).unlink()
    return path, resumed


def _claim(config: Config) -> tuple[str, bool]:
    """Check on process 0 that a run may use its folder, make the folder, and test its storage.

    Print cautions. Write a damaged config.json again from the newest checkpoint.

    Returns:
        Absolute path, and whether an earlier part of the run is in the folder.

    Raises:
        WorkdirError, HalfMadeError: The folder cannot be used (`claim`).
    """
    name = config.workdir if config.workdir is not None else f"runs/{config.recipe}"
    path = path_of(name).absolute()
    if path.exists() and not path.is_dir():
        raise WorkdirError(f"{_shown(path)} is a file; write --workdir with the name of a folder")
    check_complete(path)

    occupied = not all(_matches(name, _FIRST) for name in disk.names(path))
    if occupied and not config.resume and _unstarted(path):
        occupied = False  # `start_anew` empties the folder as soon as it is locked
    if occupied and not config.resume:
        raise WorkdirError(
            f"the workdir {_shown(path)} is not empty; add --resume to continue the run in it, "
            "or give --workdir another folder for a new one"
        )
    previous: dict[str, Any] = {}
    problem = ""
    if occupied:
        previous, problem = _recorded(path)
        if not previous:
            raise WorkdirError(
                f"the workdir {_shown(path)} holds files but no run ({problem}); give --workdir "
                "another folder"
            )

    # Nothing is written above this line, so a folder that was refused there is unchanged.
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / _PROBE).touch()
        (path / _PROBE).unlink()
    except OSError as error:
        raise WorkdirError(
            f"cannot write into the workdir {_shown(path)}: {error.strerror}; give --workdir "
            "another folder"
        ) from error
    _check_storage(path)
    missing = missing_capabilities(path, path / _LOCK)
    if missing:
        terminal.note(f"caution: {_shown(path)} does without {' and without '.join(missing)}")

    if occupied:
        _check_same_run(config, path, previous)
        if problem:
            terminal.note(f"caution: {problem}; written again as the newest checkpoint has it")
            disk.write_whole(path / RECORD, json.dumps(previous, indent=2) + "\n")
    return str(path), occupied


def _matches(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a name matches one of some glob patterns."""
    return any(Path(name).match(pattern) for pattern in patterns)


def _check_storage(path: Path) -> None:
    """Refuse a folder if tensorstore cannot write a small array there and read it back.

    Raises:
        WorkdirError: The array cannot be written, or is read back with other values.
    """
    try:
        folder.check_storage(path, _STORAGE)
    except Exception as error:  # tensorstore raises many types if the disk or network fails
        raise WorkdirError(
            f"checkpoints cannot be saved in the workdir {_shown(path)}: "
            f"{folder.reason(error, path)}; give --workdir another folder"
        ) from error


def _unstarted(path: Path) -> bool:
    """Return whether a folder holds only a run that ended before its first step was done.

    It then has a config.json, no checkpoint, no row of metrics, and no file of another program.
    """
    written_early = (*_FIRST, *_BEFORE_STEPS)
    if not all(_matches(name, written_early) for name in disk.names(path)):
        return False
    saves = [name for name in disk.names(path / CHECKPOINTS) if not _matches(name, PROBES)]
    metrics = disk.status(path / "metrics.jsonl")
    has_rows = metrics is not None and metrics.st_size > 0
    return not saves and not has_rows and disk.status(path / RECORD) is not None


def start_anew(path: Path) -> None:
    """Delete the files of a run that ended before its first step, from a locked folder.

    Print a line about the deletion. Do nothing if there are no such files.

    Raises:
        WorkdirError: Another run has done steps in the folder since it was claimed.
    """
    if not any(name in _BEFORE_STEPS for name in disk.names(path)):
        return
    # Check again: the folder was not locked when `claim` checked it.
    if not _unstarted(path):
        raise WorkdirError(
            f"another run has begun in the workdir {_shown(path)} meanwhile; add --resume to go on "
            "with it, or give --workdir another folder"
        )
    terminal.note(f"{_shown(path)} holds a run that ended before its first step; starting it anew")
    for name in _BEFORE_STEPS:
        remove_tree(path / name)


@contextlib.contextmanager
def locked(path: Path, processes: Processes) -> Iterator[None]:
    """Lock the folder of a run against other runs while the block runs.

    Process 0 holds the lock, the others do nothing. The system releases the lock when process 0
    ends, even by a kill. Where files cannot be locked, `lock.workdir_lock` is used.

    Args:
        path: Folder as `claim` returns it.

    Raises:
        WorkdirError: Another run has the folder.
    """
    if not processes.leader:
        yield
        return
    if not locks_files(path / _LOCK):
        from mupax.train.checkpoints import lock

        with lock.workdir_lock(path, _LOCK if is_remote(path) else _OWNER):
            yield
        return
    # "a+" does not empty the file: until this process has the lock, its content is the owner's.
    with (path / _LOCK).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            owner = file.read(200).strip() or "unknown"
            raise WorkdirError(
                f"the workdir {_shown(path)} is in use by another run ({owner}); "
                "wait for it or stop it, or give --workdir another folder"
            ) from error
        # For the message of a process that is refused; the lock itself is not in the content.
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def _check_same_run(config: Config, path: Path, previous: dict[str, Any]) -> None:
    """Refuse to resume a run with a config whose changes do not fit its saved arrays or batches.

    Args:
        previous: Content of config.json as the run has recorded it.

    Raises:
        WorkdirError: A field differs that must not change. The text names the flag.
    """
    current = with_tokenizer_of_source(to_json(config), previous["config"])
    effects = {field.path: field.affects for field in config_fields(config)}
    for field, old, new in differences(completed(previous["config"], current), current):
        affects = effects.get(field)
        if affects is None:
            # A plugin's model declares no effects; each of its fields may change the arrays.
            is_refused = field.startswith("model.")
        else:
            is_refused = affects.consequence.on_resume == "refused"
        if is_refused:
            flag = f"--{field.replace('_', '-')}"
            old_text = text_of(old)
            advice = f"with {flag} {old_text}"
            if old_text == "nothing":
                advice = f"without {flag}"
            raise WorkdirError(
                f"the run in {_shown(path)} has {field} {old_text}, not {text_of(new)}; continue "
                f"it {advice}, or start another with --workdir; "
                f"`mupax train --resume --workdir {_shown(path)}` continues it as it was"
            )


def with_tokenizer_of_source(
    current: dict[str, Any], previous: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a resumed run's config with the tokenizer of the weights that the run started from.

    A run without `data.tokenizer` that starts from weights uses their tokenizer
    (`init_from.settled`). The flags of a resume do not name it either, so the recorded tokenizer
    and separator replace the default. `current` itself is returned if it names another tokenizer,
    or if the recorded one is not in the folder of the weights.

    Args:
        current: Config from the flags of the resume, as JSON.
        previous: Config that the run has recorded, as JSON.
    """
    data = previous.get("data") or {}
    source = (previous.get("init") or {}).get("init_from")
    name = data.get("tokenizer")
    if source is None or name is None or Path(name).parent != Path(source):
        return current
    if current["data"]["tokenizer"] != DataConfig.tokenizer:
        return current
    tokenizer = {
        "tokenizer": name,
        "separator": current["data"]["separator"] or data.get("separator"),
    }
    return {**current, "data": {**current["data"], **tokenizer}}


def surroundings(
    flags: Mapping[str, Any], environment: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the part of config.json about the machine, the packages and the compiler.

    Args:
        flags: XLA options of the training step, by name (`Program.compiler_options`).
        environment: Facts of the process that trains (`parallel.environment`), or `None` for a
            command that trains nothing.
    """
    versions = {"python": platform.python_version(), "mupax": __version__}
    for package in _PACKAGES:
        versions[package] = version(package)
    variables = {name: os.environ.get(name, "") for name in VARIABLES}
    content: dict[str, Any] = {
        "xla": {"options": dict(flags), **variables},
        "versions": versions,
        "platform": f"{platform.system()} {platform.machine()}",
    }
    if environment is not None:
        content["environment"] = dict(environment)
    return content


def record(
    path: Path,
    config: Config,
    data_facts: dict[str, Any],
    preset: str,
    flags: dict[str, Any],
    step: int = 0,
    environment: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Write config.json, and return its content.

    The file has the resolved config, the data's facts, versions, the environment, the git commit
    and the run's name. The name, `run`, is random and stays when the run goes on. Earlier parts of
    the run stay under `segments` (`with_earlier_parts`).

    Args:
        config: Config of this part of the run.
        preset: Description of the preset for a reader (`Preset.describe`).
        flags: XLA options of the training step, by name.
        step: Steps done when this part of the run begins. Default 0.
        environment: Facts of the process, as `surroundings` takes them.

    Raises:
        DiskError: The file cannot be written.
    """
    content = {
        "config": to_json(config),
        "data": data_facts,
        "preset": preset,
        **surroundings(flags, environment),
        "git": _git_commit(),
    }
    modules = config_record.record(config)
    if modules:
        content["plugins"] = modules
    previous = recorded(path)
    content = with_earlier_parts(content, previous, step)
    # Random, so that checkpoints of another run are told apart whatever their config is.
    run = previous.get("run") or secrets.token_hex(8)
    content = {"run": run, **content}
    config_record.remember_run(run, modules)
    disk.write_whole(path / RECORD, json.dumps(content, indent=2) + "\n")
    return content


def with_earlier_parts(
    content: Mapping[str, Any], previous: Mapping[str, Any], step: int
) -> dict[str, Any]:
    """Return config.json for a resumed run, with the records of its earlier parts as `segments`.

    A part is what ran between two starts or resumes. The segments are listed oldest first, and each
    has `until_step`, the step at which the next part began. The last part is not listed if it
    differs from the new one only in how it was started.

    Args:
        content: Record of the new part, with `config`. JSON must be able to hold it.
        previous: Content of config.json before the new part. Empty for a new run.
        step: Steps done when the new part begins.
    """
    part = {name: value for name, value in previous.items() if name not in ("run", "segments")}
    segments = list(previous.get("segments", ()))
    # Convert through JSON, which turns tuples into lists. `previous` was read from JSON.
    as_json = json.loads(json.dumps(content))
    if part and _lasting(part) != _lasting(as_json):
        segments.append({"until_step": step, **part})
    return {**content, "segments": segments} if segments else dict(content)


def read_record(path: Path) -> dict[str, Any]:
    """Return the content of a run's config.json.

    If the file is lost or damaged, the copy in the newest checkpoint is returned, and a caution is
    printed.

    Raises:
        WorkdirError: The folder holds no run.
        HalfMadeError: The command that makes the run has not finished it.
        DiskError: The disk cannot be read.
    """
    check_complete(path)
    return _read_record(path)


def _read_record(path: Path) -> dict[str, Any]:
    """Return the content of a run's config.json, or of the copy in the newest checkpoint.

    If the copy is used, a caution is printed. A folder that a command is still making is accepted.

    Raises:
        WorkdirError: The folder holds no run.
    """
    content, problem = _recorded(path)
    if not content:
        raise WorkdirError(f"{_shown(path)} holds no run ({problem}); write the workdir of one")
    if problem:
        terminal.note(f"caution: {problem}; going by what the newest checkpoint kept of it")
    return content


def recorded(path: Path) -> dict[str, Any]:
    """Return the content of a run's config.json, even if a command is still making its folder.

    Returns:
        Content of config.json or, with a printed caution, of the copy in the newest checkpoint.
        Empty if there is neither.

    Raises:
        WorkdirError: config.json is damaged and no checkpoint has a copy.
    """
    if disk.status(path / RECORD) or newest_record(path / CHECKPOINTS):
        return _read_record(path)
    return {}


def _recorded(path: Path) -> tuple[dict[str, Any], str]:
    """Return the content of a run's config.json, and what is wrong with the file, or "".

    If something is wrong, the content is the copy in the newest checkpoint, or empty.
    """
    try:
        content = disk.read_json(path / RECORD)
        entry = wrong_entry(content)
        if entry is None:
            return content, ""
        reason = "is of another kind" if entry in content else "is missing"
        problem = f"{RECORD} is not one of a run: its entry {entry} {reason}"
    except disk.JsonError as error:
        if disk.status(path / RECORD) is None:
            problem = f"{RECORD} is missing"
        else:
            problem = str(error).removeprefix(f"{path}/")
    return newest_record(path / CHECKPOINTS), problem


def _lasting(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record without the settings that only say how the run was started (or resumed).

    `with_earlier_parts` compares two parts of a run by it.
    """
    session = {name for name, affects in declared(Config).items() if affects.effect == "session"}
    config = {name: value for name, value in record["config"].items() if name not in session}
    return {**record, "config": config}


def _git_commit() -> str | None:
    """Return the commit of this source checkout, with "-dirty" if a file differs from it.

    Returns:
        Commit of 40 digits, or `None` outside of a checkout.
    """
    source_folder = str(Path(__file__).resolve().parent)
    describe = ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    command = ["git", "-C", source_folder, *describe]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _shown(path: Path) -> str:
    """Return a path for messages, relative to the working directory if it is below it."""
    if is_remote(path):
        return str(path)
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
