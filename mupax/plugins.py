"""Plug-ins: modules of a user that extend mupax (`--plugin`), their import, digest and trust.

Importing a module runs its code. A run records the modules that it needs, but the record may be a
stranger's. The user's own folder therefore holds a list, outside of every run, of the runs that
were trained on this account and the folders of their modules.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from mupax import MupaxError, disk
from mupax.disk import user_folder

FLAG = "--plugin"
_importing: list[str] = []
"""Names of modules that are being imported, the innermost last."""


class PluginError(MupaxError):
    """Error about a plug-in that cannot be imported or must not be. The text says what to write."""


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the modules that `--plugin MODULE` names, and the other words of a command line.

    Raises:
        PluginError: No name follows the flag.
    """
    modules: list[str] = []
    words: list[str] = []
    remaining = iter(argv)
    for word in remaining:
        flag, equals, value = word.partition("=")
        if flag != FLAG:
            words.append(word)
            continue
        name = value if equals else next(remaining, "")
        if not name or name.startswith("-"):
            raise PluginError(
                f"{FLAG} needs the name of a module after it, such as {FLAG} my_optimizer"
            )
        modules.append(name)
    return modules, words


def importable_name(module: str) -> str | None:
    """Return the name by which another process can import a module.

    Args:
        module: `__name__` of the module. For `__main__`, the name of the script's file is returned.

    Returns:
        The name, or `None` for a notebook, an interactive session, or a script whose file does
        not end in .py.
    """
    if module != "__main__":
        return module
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return spec.name.removesuffix(".__main__")
    file = getattr(main, "__file__", None)
    if file and file.endswith(".py"):
        return Path(file).stem
    return None


def loaded_module(name: str) -> ModuleType | None:
    """Return a module that is imported already, or `None`. The running script counts, too."""
    if name in sys.modules:
        return sys.modules[name]
    main = sys.modules.get("__main__")
    if main is not None and importable_name("__main__") == name:
        return main
    return None


def import_plugin(name: str, folder: str | None = None) -> ModuleType:
    """Import a module of the user and return it.

    The folder that was searched is appended to `sys.path`, if it is not on it, and stays there.

    Args:
        name: Dotted name, such as `my_optimizer` or `my_package.presets`.
        folder: Folder that has the module. The default is to search all of `sys.path` and then the
            working folder.

    Raises:
        PluginError: The name is no name of a module, there is no such module, or its code failed.
        MupaxError: The module's code raised this error, which is raised unchanged.
    """
    if not all(part.isidentifier() for part in name.split(".")):
        hint = f"; write --plugin {Path(name).stem} in its folder" if name.endswith(".py") else ""
        raise PluginError(f"--plugin {name} is no name of a Python module{hint}")
    source = str(Path.cwd()) if folder is None else folder
    was_on_path = source in sys.path
    if folder is not None:
        sys.path.insert(0, folder)
    elif not was_on_path:
        sys.path.append(source)  # last, so that a random.py in the working folder hides no library
    _importing.append(name)
    try:
        # Python remembers the files of a folder, and a module may have been written since.
        importlib.invalidate_caches()
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # The absent module may be one that the plug-in imports, and not the plug-in itself.
        absent = error.name
        is_plugin = absent is not None and (name == absent or name.startswith(f"{absent}."))
        if not is_plugin:
            raise PluginError(_failure(name, error)) from error
        raise PluginError(
            f"--plugin {name}: no module of this name is in {source} or among the installed "
            "packages; run the command in its folder, or put its folder on PYTHONPATH"
        ) from error
    except MupaxError:
        raise
    except (Exception, SystemExit) as error:
        # SystemExit: a script that is imported as a module may call `sys.exit`.
        raise PluginError(_failure(name, error)) from error
    finally:
        _importing.pop()
        if folder is not None:
            sys.path.remove(folder)
            if not was_on_path:
                sys.path.append(folder)  # functions of the module are imported by name later


def refuse_while_importing() -> None:
    """Raise an error if a plug-in is being imported. A run calls this before it starts.

    Raises:
        PluginError: A plug-in is being imported, and its code has started a run. The text names it
            and the line that it needs: `if __name__ == "__main__":`.
    """
    if _importing:
        raise PluginError(
            f"importing {_importing[-1]} starts a run; put that part of the module below "
            '`if __name__ == "__main__":`'
        )


def digest(module: ModuleType) -> str:
    """Return a digest of a module's source file, or of all Python files of a package.

    The digest is the first 16 hexadecimal digits of SHA-256 over file names and contents. Files
    that cannot be read are left out. All modules without a file have one digest, that of no data.
    """
    file = getattr(module, "__file__", None)
    content = hashlib.sha256()
    if not file:
        return content.hexdigest()[:16]

    path = Path(file)
    is_package = path.name == "__init__.py"
    files = sorted(path.parent.rglob("*.py")) if is_package else [path]
    for source in files:
        with contextlib.suppress(OSError):
            # The name counts, too: modules of a package import each other by it.
            content.update(os.fsencode(source.relative_to(path.parent).as_posix()))
            content.update(source.read_bytes())
    return content.hexdigest()[:16]


def import_folder(module: ModuleType) -> str | None:
    """Return the folder that must be on `sys.path` to import a module, or `None` without a file."""
    file = getattr(module, "__file__", None)
    if not file:
        return None
    name = importable_name(module.__name__) or ""
    path = Path(os.path.abspath(file))
    # The file of a package is one folder deeper than the file of a module of the same name.
    levels = name.count(".") + (path.name == "__init__.py")
    return str(path.parents[levels])


def remember(run: str, modules: Mapping[str, str]) -> None:
    """Record in the user's folder that this account trained a run with certain plug-ins.

    Later commands may then import these modules without being told to (`trusted`). Modules that are
    recorded for the run already stay in the record. If the folder cannot be written, nothing is
    recorded, and no error is raised.

    Args:
        run: Random name of the run, letters and digits.
        modules: Folder from which each module is imported, by the module's name.
    """
    # If the home folder cannot be written, the user has to write `--plugin` again later.
    with contextlib.suppress(OSError, disk.DiskError):
        path = _record_of(run)
        path.parent.mkdir(parents=True, exist_ok=True)
        recorded = _read(path)
        disk.write_whole(path, json.dumps({**recorded, **modules}, indent=2) + "\n")


def trusted(run: object) -> dict[str, str]:
    """Return the folder of each plug-in with which this account trained a run, by module name.

    Args:
        run: Name of the run in its record, which may be a stranger's. The result is `{}` for a
            value that is not a text of letters and digits, or an unknown name.
    """
    # A name with dots or slashes could lead to another file.
    if not isinstance(run, str) or not run.isalnum():
        return {}
    return _read(_record_of(run))


def _record_of(run: str) -> Path:
    """Return the path of the file in the user's folder that lists a run's plug-ins."""
    return user_folder() / "runs" / f"{run}.json"


def _read(path: Path) -> dict[str, str]:
    """Return the folders of a run's plug-ins by module, or `{}` if the file cannot be read."""
    try:
        content: Any = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(content, dict):
        return {}
    return {name: folder for name, folder in content.items() if isinstance(folder, str)}


def _failure(name: str, error: BaseException) -> str:
    """Return the message for an error in a module's own code, with its file and line."""
    frames = traceback.extract_tb(error.__traceback__)
    own_frames = [frame for frame in frames if "importlib" not in frame.filename]
    location = ""
    if own_frames:
        last = own_frames[-1]
        location = f" ({last.filename}, line {last.lineno})"
    return f"--plugin {name} cannot be imported: {type(error).__name__}: {error}{location}"
