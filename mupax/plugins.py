"""Modules of a user's own that extend mupax: importing them, telling whether they changed, and remembering whose they are.

Importing a module runs its code. A run records the modules that it needs, but a record may be a stranger's. So a folder of
the user's own, outside every run, remembers which runs were trained on this account and where their modules lie.
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

from mupax import disk
from mupax.disk import user_folder
from mupax.errors import MupaxError

FLAG = "--plugin"
_importing: list[str] = []
"""Modules whose import is under way, the innermost last."""


class PluginError(MupaxError):
    """A module of the user's own that cannot be imported or may not be. The text says what to write."""


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the modules that `--plugin MODULE` names, and the other words of a command line.

    Raises:
        PluginError: the flag is the last word.
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
        module: `__name__` of the module. That of a script is `__main__`, and its file's name is returned.

    Returns:
        `None` for a notebook or an interactive session, which no other process can import.
    """
    if module != "__main__":
        return module
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return spec.name.removesuffix(".__main__")
    file = getattr(main, "__file__", None)
    return Path(file).stem if file and file.endswith(".py") else None


def loaded_module(name: str) -> ModuleType | None:
    """Return a module that this process has imported already, the script itself included."""
    if name in sys.modules:
        return sys.modules[name]
    main = sys.modules.get("__main__")
    return main if main is not None and importable_name("__main__") == name else None


def import_plugin(name: str, folder: str | None = None) -> ModuleType:
    """Import a module of the user's own.

    Args:
        name: such as `my_optimizer` or `my_package.presets`.
        folder: the folder to import it from. Without one, the working folder comes after all other places, so that a
            `random.py` of the user's own hides no library.

    Raises:
        PluginError: there is no such module, or its code failed.
    """
    if not all(part.isidentifier() for part in name.split(".")):
        hint = f"; write --plugin {Path(name).stem} in its folder" if name.endswith(".py") else ""
        raise PluginError(f"--plugin {name} is no name of a Python module{hint}")
    source = str(Path.cwd()) if folder is None else folder
    known = source in sys.path
    if folder is not None:
        sys.path.insert(0, folder)
    elif not known:
        sys.path.append(source)
    _importing.append(name)
    try:
        importlib.invalidate_caches()
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise PluginError(_failure(name, error)) from error
        raise PluginError(
            f"--plugin {name}: no module of this name is in {source} or among the installed packages; "
            "run the command in its folder, or put its folder on PYTHONPATH"
        ) from error
    except MupaxError:
        raise
    except (Exception, SystemExit) as error:
        raise PluginError(_failure(name, error)) from error
    finally:
        _importing.pop()
        if folder is not None:
            sys.path.remove(folder)
            if not known:
                sys.path.append(folder)  # its functions are imported by name later on


def refuse_while_importing() -> None:
    """Refuse to start a run from a module that is only being imported.

    Raises:
        PluginError: naming the module and the line that it lacks.
    """
    if _importing:
        raise PluginError(
            f'importing {_importing[-1]} starts a run; put that part of the module below `if __name__ == "__main__":`'
        )


def digest(module: ModuleType) -> str:
    """Return a digest of a module's source, of a package that of all its Python files."""
    file = getattr(module, "__file__", None)
    content = hashlib.sha256()
    if file:
        path = Path(file)
        files = sorted(path.parent.rglob("*.py")) if path.name == "__init__.py" else [path]
        for source in files:
            with contextlib.suppress(OSError):
                content.update(os.fsencode(source.relative_to(path.parent).as_posix()))
                content.update(source.read_bytes())
    return content.hexdigest()[:16]


def import_folder(module: ModuleType) -> str | None:
    """Return the folder that has to be on the path for a module to be imported, or `None` for a module without a file."""
    file = getattr(module, "__file__", None)
    if not file:
        return None
    name = importable_name(module.__name__) or ""
    path = Path(os.path.abspath(file))
    above = name.count(".") + (path.name == "__init__.py")
    return str(path.parents[above])


def remember(run: str, modules: Mapping[str, str]) -> None:
    """Remember that this account trained a run with modules of its own.

    A home folder that cannot be written costs nothing but a `--plugin` later on.

    Args:
        run: the random name of the run.
        modules: module to the folder that it is imported from.
    """
    with contextlib.suppress(OSError):
        place = _remembered(run)
        place.parent.mkdir(parents=True, exist_ok=True)
        before = _read(place)
        disk.write_whole(place, json.dumps({**before, **modules}, indent=2) + "\n")


def trusted(run: object) -> dict[str, str]:
    """Return the modules that this account trained a run with, and their folders.

    Args:
        run: the name of the run, as its record has it. The record may be a stranger's.
    """
    if not isinstance(run, str) or not run.isalnum():
        return {}
    return _read(_remembered(run))


def _remembered(run: str) -> Path:
    return user_folder() / "runs" / f"{run}.json"


def _read(place: Path) -> dict[str, str]:
    try:
        content: Any = json.loads(place.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(content, dict):
        return {}
    return {name: folder for name, folder in content.items() if isinstance(folder, str)}


def _failure(name: str, error: BaseException) -> str:
    """Return what went wrong inside a module, with the last line of it that ran."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "importlib" not in frame.filename
    ]
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"--plugin {name} cannot be imported: {type(error).__name__}: {error}{where}"
