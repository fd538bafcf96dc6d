"""Sizes of the code and of what a user meets: tokens, packages, commands, flags, modules.

How the numbers of 17b5398, which later trees are held to, come about:

* **Tokens**, 410,972 of the product and 151,079 of all else but tests: tokens of `tokenize` in
  every Python file of a folder. Comments, newlines, indentation and the end marker do not count,
  nor do strings that stand as statements, which are docstrings of modules, classes, functions and
  fields. The links `mupax/presets`, `mupax/zoo` and `mupax/train` are not followed. Notebooks and
  shell scripts do not count. An f-string is one token on every Python.
* **Files with one importer**, 58: modules of presets, zoo and train that exactly one other module
  imports, from the same folder. Imports inside functions and those for the type checker count.
  Package files and entry points (`__init__.py`, `__main__.py`) count neither as importer nor as
  imported, and neither do scripts and tests.
* **Packages**, 102: pinned lines of requirements.txt. Some packages are pinned twice, for two
  ranges of Python.
* **Commands**, 34 in four places: words that the help of `mupax train`, `mupax presets` and
  `mupax zoo` lists as commands (32), and the two that `python -m train.data` had then.
* **Flags**, 184: entries of `mupax train lm-tiny --help` but `--help` itself. Another spelling in
  the same entry does not count.
* **Modules**, 92: modules named `mupax.*` that `mupax train vit-digits` with `PLAIN` loads. Files
  of one line do not count.
"""

from __future__ import annotations

import ast
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import token
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
PRODUCT = ("mupax", "presets", "train", "zoo")
"""Folders of what users install."""
NON_PRODUCT = ("docs", "examples", "packaging", "scripts")
"""Folders of Python files that are neither product nor tests."""
MODULES = ("presets", "train", "zoo")
"""Folders in which files with a single importer are counted."""
RECIPES = ("lm-tiny", "vit-digits", "ed-tiny")
"""Recipes whose help is read: one of each family of models."""
PLAIN = (
    "vit-digits --steps 2 --optimizer.warmup-steps 1 --data.batch-size 8 --data.eval-examples 8 "
    "--log.no-progress --log.no-samples --log.no-tensorboard --workdir"
)
"""Words of a plain run, as `tests/train/run/test_modules_loaded.py` has them."""
TIMEOUT_S = 900
"""Time for a command on a busy machine."""

_NO_CODE = frozenset(
    (
        *(token.NEWLINE, token.INDENT, token.DEDENT, token.ENDMARKER),
        *(tokenize.COMMENT, tokenize.NL, tokenize.ENCODING),
    )
)
# Before Python 3.12 an f-string is one token.
_F_START = getattr(token, "FSTRING_START", -1)
_F_END = getattr(token, "FSTRING_END", -1)
_PIN = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==", re.MULTILINE)
_ENTRY = re.compile(r"^ *│? *(--[a-z](?:[a-z0-9.-]*[a-z0-9])?)(?![\w.*-])", re.MULTILINE)
"""A flag that begins a line of help, inside of a box or not."""
_LISTED = re.compile(r"^  ([a-z][a-z0-9-]*)(?:  +\S.*)?$")
"""A word that a help page lists, with its description."""
_LOADED = """
import atexit, json, runpy, sys

def write():
    lines = {}
    for name, module in sys.modules.items():
        path = getattr(module, "__file__", None)
        if name.startswith("mupax.") and path:
            lines[name] = len(open(path, encoding="utf-8").read().splitlines())
    open("loaded.json", "w").write(json.dumps(lines))

atexit.register(write)
sys.argv = ["mupax", "train", *sys.argv[1:]]
runpy.run_module("mupax", run_name="__main__")
"""


def record(root: Path = ROOT) -> dict[str, Any]:
    """Measure all sizes of a checkout, from its files and by running its commands.

    The module's docstring says how each is counted.
    """
    by_folder = tokens_by_folder(root)
    product = sum(by_folder.get(folder, 0) for folder in PRODUCT)
    non_product = sum(by_folder.get(folder, 0) for folder in NON_PRODUCT)
    single = single_importers(root)
    pins = _PIN.findall((root / "requirements.txt").read_text(encoding="utf-8"))
    commands = commands_by_place(root)
    modules = loaded_modules(root)
    return {
        "tokens": {
            "by folder": by_folder,
            "product": product,
            "scripts, examples, packaging, docs": non_product,
        },
        "single importers": {"count": len(single), "files": single},
        "packages": {"pins": len(pins), "names": len(set(pins))},
        "commands": {
            "first level": len(commands[""]),
            "below it": sum(len(words) for place, words in commands.items() if place),
            "places below it": len(commands) - 1,
            "by place": commands,
        },
        "flags": {recipe: len(flags(root, recipe)) for recipe in RECIPES},
        "modules": {"count": len(modules), "names": modules},
    }


def count_tokens(source: str) -> int:
    """Count the tokens of Python source without comments, line breaks, indentation and docstrings.

    An f-string is one token.
    """
    statements = list(_string_statements(source))
    count = 0
    depth = 0  # of f-strings, which are many tokens from Python 3.12 on
    for item in tokenize.generate_tokens(io.StringIO(source).readline):
        if item.type == _F_END:
            depth -= 1
        elif item.type not in _NO_CODE and depth == 0:
            position = item.start
            count += not any(start <= position < end for start, end in statements)
        if item.type == _F_START:
            depth += 1
    return count


def _string_statements(source: str) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield start and end of every string that is a statement of its own, as (line, column)."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
            continue
        if isinstance(node.value.value, str):
            value = node.value
            start = value.lineno, value.col_offset
            yield start, (value.end_lineno or 0, value.end_col_offset or 0)


def python_files(folder: Path) -> Iterator[Path]:
    """Yield the Python files below a folder, in order, without those behind links."""
    # `Path.rglob` follows links to folders on some versions of Python and not on others.
    for place, folders, names in os.walk(folder):
        # `os.walk` goes into the folders that stay in this list.
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted(names):
            if name.endswith(".py"):
                yield Path(place) / name


def tokens_by_folder(root: Path) -> dict[str, int]:
    """Count the tokens of code in each folder, tests included."""
    counts: dict[str, int] = {}
    for folder in sorted((*PRODUCT, *NON_PRODUCT, "tests")):
        paths = python_files(root / folder)
        counts[folder] = sum(count_tokens(path.read_text(encoding="utf-8")) for path in paths)
    return counts


def imported_modules(source: str) -> set[str]:
    """Return the names of all modules that source may import; `from a import b` gives a.b and a."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def single_importers(root: Path) -> dict[str, str]:
    """Return files that only one other file imports, each to this importer.

    Only pairs in the same folder are returned.
    """
    paths: list[Path] = []
    for folder in MODULES:
        paths += python_files(root / folder)
    modules: dict[str, Path] = {}
    for path in paths:
        if path.stem not in ("__init__", "__main__"):
            name = ".".join(path.relative_to(root).with_suffix("").parts)
            modules[f"mupax.{name}"] = path
    importers: dict[Path, list[Path]] = {}
    for path in modules.values():
        names = imported_modules(path.read_text(encoding="utf-8"))
        targets = {modules[name] for name in names & modules.keys()}
        for target in targets - {path}:
            importers.setdefault(target, []).append(path)
    single: dict[str, str] = {}
    for target, sources in sorted(importers.items()):
        if len(sources) == 1 and sources[0].parent == target.parent:
            single[target.relative_to(root).as_posix()] = sources[0].relative_to(root).as_posix()
    return single


def commands_by_place(root: Path) -> dict[str, list[str]]:
    """Return the commands that help pages list.

    Returns:
        Word to the commands that `mupax WORD --help` lists, if there are any, and "" to those of
        `mupax --help`. Recipes do not count.
    """
    places = {"": listed_commands(_help(root))}
    for word in places[""]:
        below = listed_commands(_help(root, word))
        if below:
            places[word] = below
    return places


def listed_commands(text: str) -> list[str]:
    """Return the commands that a help page lists: all listed words except those under "Recipes:".

    Args:
        text: Page with headings that end in a colon and words indented by two spaces.
    """
    words: list[str] = []
    heading = ""
    for line in text.splitlines():
        if line and not line.startswith(" "):
            heading = line
        elif heading.endswith(":") and heading.casefold() != "recipes:":
            words += _LISTED.findall(line)
    return words


def flags(root: Path, recipe: str) -> list[str]:
    """Return the flags that a recipe's help shows, each by its first spelling."""
    return sorted(listed_flags(_help(root, "train", recipe)))


def listed_flags(text: str) -> set[str]:
    """Return the flags that begin a line of a help page."""
    return set(_ENTRY.findall(text)) - {"--help"}


def loaded_modules(root: Path) -> list[str]:
    """Return the modules of mupax that the run of `PLAIN` has loaded, without one-line modules."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", _LOADED, *PLAIN.split(), str(Path(folder) / "run")]
        _run(command, Path(folder), environment(root))
        lines = json.loads((Path(folder) / "loaded.json").read_text(encoding="utf-8"))
    return sorted(name for name, count in lines.items() if count > 1)


def environment(root: Path) -> dict[str, str]:
    """Return an environment in which Python finds a checkout's modules, and JAX one CPU device."""
    # Neither the caller's devices nor the width of a terminal may change the counts.
    variables = {"PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "COLUMNS": "80"}
    return {**os.environ, **variables}


def _help(root: Path, *words: str) -> str:
    """Return the help page of `mupax WORDS`."""
    with tempfile.TemporaryDirectory() as folder:  # no file of the present folder may hide a module
        command = [sys.executable, "-m", "mupax", *words, "--help"]
        return _run(command, Path(folder), environment(root))


def _run(command: Sequence[str], folder: Path, variables: Mapping[str, str]) -> str:
    """Return what a command prints.

    Raises:
        RuntimeError: The command failed; the text ends with its last lines.
    """
    done = subprocess.run(
        command,
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        words = " ".join(command[-6:])
        raise RuntimeError(f"{words} ended with code {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout
