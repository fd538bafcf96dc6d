"""The folder of a run: whether it may be used, and what it records about how the run was made.

A folder that a command makes has a mark, `MARK`: it says whether the folder is complete, so that half of one is never read.

The mark is written first, as not complete, and written again when everything else is on the disk. A folder without a mark is of an
older version or of another program, and is read as it is. `mupax/train/checkpoints/making.py` makes such folders.
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

from mupax import __version__, disk, spellings, terminal
from mupax.config_fields import config_fields, declared
from mupax.disk import is_remote, path_of, remove_tree
from mupax.errors import MupaxError
from mupax.train.checkpoints import folder
from mupax.train.checkpoints.folder import CHECKPOINTS, WorkdirError, newest_record
from mupax.train.checkpoints.layout import PROBES, locks_files, missing_capabilities
from mupax.train.config import record as config_record
from mupax.train.config.data import DataConfig
from mupax.train.config.record import completed, differences, text_of, to_json
from mupax.train.config.run import Config
from mupax.train.parallel.hardware import VARIABLES
from mupax.train.parallel.processes import Processes

MARK = ".mupax-made.json"

RECORD = "config.json"
_SHARED, _LOCK, _OWNER, _PROBE, _PARTIAL = (
    ".shared",
    ".lock",
    ".owner",
    ".writable",
    f".{RECORD}.partial",
)
_STORAGE = ".storage"
_FIRST = (_SHARED, _LOCK, _OWNER, _PROBE, _STORAGE, _PARTIAL, *PROBES, "attempts*.jsonl")
"""What a run writes before its record: a kill leaves some of them in a folder that is still free."""
_BEFORE_STEPS = (RECORD, "metrics.jsonl", "tensorboard", "assets", CHECKPOINTS)
"""Everything else that a run writes before its first step is done."""
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


class HalfMadeError(MupaxError):
    """A folder that no command has finished. The text names the command to write again."""


def write_mark(
    folder: Path, command: Sequence[str], names: Sequence[str] = (), *, complete: bool
) -> None:
    """Write the mark of a folder, whole or not at all.

    Args:
        folder: exists, unless it is in a bucket.
        command: words of the command that makes the folder.
        names: entries of the folder that the command makes, which may be deleted while it is not complete.
        complete: whether everything else in the folder is on the disk.

    Raises:
        DiskError: the disk does not take it.
    """
    content = {
        "complete": complete,
        "command": shlex.join(command),
        "names": sorted(names),
        "version": __version__,
    }
    disk.write_whole(folder / MARK, json.dumps(content, indent=2) + "\n")


def read_mark(folder: Path) -> dict[str, Any] | None:
    """Return what the mark of a folder says, or None if the folder has none.

    Raises:
        JsonError: the mark is damaged.
        DiskError: the disk cannot read it.
    """
    if disk.status(folder / MARK) is None:
        return None
    content = disk.read_json(folder / MARK)
    names = content.get("names")
    has_names = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if (
        not has_names
        or not isinstance(content.get("complete"), bool)
        or not isinstance(content.get("command"), str)
    ):
        raise disk.JsonError(
            f"{folder / MARK}: not the mark of a folder; delete it if the folder is as it should be"
        )
    # One that an earlier version began is finished by the same command, however it is spelled now.
    return {**content, "command": spellings.current(content["command"])}


def check_complete(folder: Path) -> None:
    """Refuse a folder that a command has not finished, before anything is read from it.

    Raises:
        HalfMadeError: the mark says so.
        JsonError, DiskError: the mark is damaged or cannot be read.
    """
    mark = read_mark(folder)
    if mark is not None and not mark["complete"]:
        raise HalfMadeError(
            f"{folder} is not complete: it was not finished by `{mark['command']}`; write that command again, or wait "
            "for it where it still runs"
        )


def claim(config: Config, processes: Processes) -> tuple[Path, bool]:
    """The run's folder, made by process 0 if missing, and whether an earlier part of the run lies in it.

    Args:
        config, processes: of the run; its `workdir`, and whether to `resume` in it.

    Raises:
        WorkdirError: the folder holds something and `resume` was not asked for, holds no run, or cannot be written, or this
            process does not see the folder that process 0 has.
    """
    where, resumed = processes.broadcast("workdir", lambda: _claim(config))
    path = path_of(where)
    if processes.count == 1 or is_remote(path):
        return path, resumed
    if processes.leader:
        (path / _SHARED).touch()
    for _ in range(
        20
    ):  # a network file system may remember for some seconds that a file was missing
        if (path / _SHARED).exists():
            break
        time.sleep(0.5)
    else:
        raise WorkdirError(
            f"process {processes.index} does not see the workdir {path} of process 0, where all processes save their part "
            "of a checkpoint; give --workdir a bucket (gs://...) or a folder that all hosts share"
        )
    processes.barrier("workdir")
    if processes.leader:
        (path / _SHARED).unlink()
    return path, resumed


def _claim(config: Config) -> tuple[str, bool]:
    path = path_of(
        config.workdir if config.workdir is not None else f"runs/{config.recipe}"
    ).absolute()
    if path.exists() and not path.is_dir():
        raise WorkdirError(f"{_shown(path)} is a file; write --workdir with the name of a folder")
    check_complete(path)
    occupied = not all(any(map(Path(name).match, _FIRST)) for name in disk.names(path))
    if occupied and not config.resume and _unstarted(path):
        occupied = False  # `start_anew` empties the folder as soon as it is locked
    if occupied and not config.resume:
        raise WorkdirError(
            f"the workdir {_shown(path)} is not empty; add --resume to continue the run in it, "
            "or give --workdir another folder for a new one"
        )
    before = _recorded(path) if occupied else ({}, "")
    if occupied and not before[0]:
        raise WorkdirError(
            f"the workdir {_shown(path)} holds files but no run ({before[1]}); give --workdir another folder"
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / _PROBE).touch()
        (path / _PROBE).unlink()
    except OSError as error:
        raise WorkdirError(
            f"cannot write into the workdir {_shown(path)}: {error.strerror}; give --workdir another folder"
        ) from error
    _check_storage(path)
    if without := missing_capabilities(path, path / _LOCK):
        terminal.note(f"caution: {_shown(path)} does without {' and without '.join(without)}")
    if occupied:
        _check_same_run(config, path, before[0])
        if before[1]:
            terminal.note(f"caution: {before[1]}; written again as the newest checkpoint has it")
            disk.write_whole(path / RECORD, json.dumps(before[0], indent=2) + "\n")
    return str(path), occupied


def _check_storage(path: Path) -> None:
    """Raise WorkdirError where the libraries that save checkpoints cannot write into a folder, or read what they wrote."""
    try:
        folder.check_storage(path, _STORAGE)
    except Exception as error:  # whatever tensorstore makes of a disk or a network
        raise WorkdirError(
            f"checkpoints cannot be saved in the workdir {_shown(path)}: {folder.reason(error, path)}; "
            "give --workdir another folder"
        ) from error


def _unstarted(path: Path) -> bool:
    """Return whether a folder holds nothing but a run that failed or was stopped before its first step was done."""
    written_early = (*_FIRST, *_BEFORE_STEPS)
    if not all(any(map(Path(name).match, written_early)) for name in disk.names(path)):
        return False
    saves = [
        name for name in disk.names(path / CHECKPOINTS) if not any(map(Path(name).match, PROBES))
    ]
    metrics = disk.status(path / "metrics.jsonl")
    has_rows = metrics is not None and metrics.st_size > 0
    return not saves and not has_rows and disk.status(path / RECORD) is not None


def start_anew(path: Path) -> None:
    """Empty a locked folder of what a run has left that failed or was stopped before its first step was done.

    Raises:
        WorkdirError: another run has done steps in the folder since it was claimed.
    """
    if not any(name in _BEFORE_STEPS for name in disk.names(path)):
        return
    if not _unstarted(path):
        raise WorkdirError(
            f"another run has begun in the workdir {_shown(path)} meanwhile; add --resume to go on with it, or give "
            "--workdir another folder"
        )
    terminal.note(f"{_shown(path)} holds a run that ended before its first step; starting it anew")
    for name in _BEFORE_STEPS:
        remove_tree(path / name)


@contextlib.contextmanager
def locked(path: Path, processes: Processes) -> Iterator[None]:
    """Keep the folder for this run alone while entered. Process 0 holds the lock, which ends with it however it ends.

    Args:
        path, processes: of the run; the folder as `claim` gives it.

    Raises:
        WorkdirError: another run has it.
    """
    if not processes.leader:
        yield
        return
    if not locks_files(path / _LOCK):
        from mupax.train.checkpoints import lock

        with lock.workdir_lock(path, _LOCK if is_remote(path) else _OWNER):
            yield
        return
    with (path / _LOCK).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise WorkdirError(
                f"the workdir {_shown(path)} is in use by another run ({file.read(200).strip() or 'unknown'}); "
                "wait for it or stop it, or give --workdir another folder"
            ) from error
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def _check_same_run(config: Config, path: Path, before: dict[str, Any]) -> None:
    """Refuse to continue a run whose arrays or batches would no longer mean the same."""
    now = with_tokenizer_of_source(to_json(config), before["config"])
    effects = {field.path: field.affects for field in config_fields(config)}
    for field, *values in differences(completed(before["config"], now), now):
        affects = effects.get(field)
        # A model of a plugin declares nothing of its fields; every one may change what arrays mean.
        refused = (
            field.startswith("model.")
            if affects is None
            else affects.consequence.on_resume == "refused"
        )
        if refused:
            flag, (was, now_is) = f"--{field.replace('_', '-')}", map(text_of, values)
            how = f"without {flag}" if was == "nothing" else f"with {flag} {was}"
            raise WorkdirError(
                f"the run in {_shown(path)} has {field} {was}, not {now_is}; continue it {how}, or start another with --workdir"
            )


def with_tokenizer_of_source(now: dict[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return a resumed run's config with the tokenizer that it took from the weights it started from.

    A run that names no tokenizer takes the one beside such weights at its start (`init_from.settled`).

    Args:
        now: the config as it was asked for, as JSON.
        before: the recorded one.
    """
    data = before.get("data") or {}
    source = (before.get("init") or {}).get("init_from")
    name = data.get("tokenizer")
    if source is None or name is None or Path(name).parent != Path(source):
        return now
    if now["data"]["tokenizer"] != DataConfig.tokenizer:
        return now
    tokenizer = {"tokenizer": name, "separator": now["data"]["separator"] or data.get("separator")}
    return {**now, "data": {**now["data"], **tokenizer}}


def surroundings(
    flags: Mapping[str, Any], environment: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return what config.json says of the machine, the packages and the compiler.

    Args:
        environment: facts of the process that trains (`parallel.environment`); `None` for a command that trains nothing.
    """
    content: dict[str, Any] = {
        "xla": {"options": dict(flags), **{name: os.environ.get(name, "") for name in VARIABLES}},
        "versions": {
            "python": platform.python_version(),
            "mupax": __version__,
            **dict(zip(_PACKAGES, map(version, _PACKAGES), strict=True)),
        },
        "platform": f"{platform.system()} {platform.machine()}",
    }
    return content if environment is None else {**content, "environment": dict(environment)}


def record(
    path: Path,
    config: Config,
    data_facts: dict[str, Any],
    preset: str,
    flags: dict[str, Any],
    step: int = 0,
    environment: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Write config.json: the resolved config, the data's facts, versions, the environment, the git commit, the run's name.

    What it said before stays in it under `segments`, oldest first, each with the step at which the next part began. Gives
    what it holds; the name, `run`, is random, and stays as it was.

    Args:
        path: the run's folder.
        config: of this part of the run.
        data_facts: of its data.
        preset: described in words.
        flags: of the compiler.
        step: at which this part begins.
        environment: as `surroundings` takes it.
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
    before = recorded(path)
    content = with_earlier_parts(content, before, step)
    run = before.get("run") or secrets.token_hex(8)
    content = {"run": run, **content}
    config_record.remember_run(run, modules)
    disk.write_whole(path / RECORD, json.dumps(content, indent=2) + "\n")
    return content


def with_earlier_parts(
    content: Mapping[str, Any], before: Mapping[str, Any], step: int
) -> dict[str, Any]:
    """Return the record of a new part of a run with the parts before it under `segments`.

    Args:
        content: what the new part records.
        before: content of config.json so far; empty for a new run.
        step: steps done when the new part begins.
    """
    part = {name: value for name, value in before.items() if name not in ("run", "segments")}
    segments = list(before.get("segments", ()))
    if part and _lasting(part) != _lasting(json.loads(json.dumps(content))):
        segments.append({"until_step": step, **part})
    return {**content, "segments": segments} if segments else dict(content)


def read_record(path: Path) -> dict[str, Any]:
    """What config.json says of the run in this folder; where it is lost or damaged, what the newest checkpoint kept of it.

    Raises:
        WorkdirError: no run is there.
        HalfMadeError: the command that makes the run has not finished it.
        DiskError: the disk cannot read it.
    """
    check_complete(path)
    return _read_record(path)


def _read_record(path: Path) -> dict[str, Any]:
    """Return what `read_record` returns, of a folder that is being made, too."""
    content, problem = _recorded(path)
    if not content:
        raise WorkdirError(f"{_shown(path)} holds no run ({problem}); write the workdir of one")
    if problem:
        terminal.note(f"caution: {problem}; going by what the newest checkpoint kept of it")
    return content


def recorded(path: Path) -> dict[str, Any]:
    """Return the record of a run, also while its folder is being made; empty if no config.json and no checkpoint has one."""
    return (
        _read_record(path)
        if disk.status(path / RECORD) or newest_record(path / CHECKPOINTS)
        else {}
    )


def _recorded(path: Path) -> tuple[dict[str, Any], str]:
    """What is known of the run, and what is wrong with its config.json."""
    try:
        content = disk.read_json(path / RECORD)
        lists = {"segments": list, "run": str}
        if isinstance(content.get("config"), dict) and all(
            isinstance(content.get(n, k()), k) for n, k in lists.items()
        ):
            return content, ""
        problem = f"{RECORD} is not one of a run"
    except disk.JsonError as error:
        missing = disk.status(path / RECORD) is None
        problem = f"{RECORD} is missing" if missing else str(error).removeprefix(f"{path}/")
    return newest_record(path / CHECKPOINTS), problem


def _lasting(record: dict[str, Any]) -> dict[str, Any]:
    """A record without the flags that only say how this part of the run was started."""
    session = {name for name, affects in declared(Config).items() if affects.effect == "session"}
    return {
        **record,
        "config": {name: value for name, value in record["config"].items() if name not in session},
    }


def _git_commit() -> str | None:
    """Commit of the project's checkout, with -dirty where files differ from it; None outside a checkout."""
    here = Path(__file__).resolve().parent
    command = [
        "git",
        "-C",
        str(here),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=40",
        "--exclude=*",
    ]
    try:
        return (
            subprocess.run(
                command, capture_output=True, text=True, check=True, timeout=10
            ).stdout.strip()
            or None
        )
    except (OSError, subprocess.SubprocessError):
        return None


def _shown(path: Path) -> str:
    """The path as short as it can be said from here."""
    if is_remote(path):
        return str(path)
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
