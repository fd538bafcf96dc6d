"""The project's own files: packages, what git tracks, interpreters that CI finds."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

pytestmark = pytest.mark.core


def tracked() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True
    ).stdout.decode()
    files = [ROOT / name for name in listed.split("\0") if name]
    assert ROOT / "pyproject.toml" in files
    return [file for file in files if file.is_file()]


# Packages


def test_every_package_is_listed_and_importable():
    assert PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["mupax"]
    links = {path.name: path.resolve() for path in (ROOT / "mupax").iterdir() if path.is_symlink()}
    assert links == {name: ROOT / name for name in ("presets", "zoo", "train")}
    folders = {path.parent for package in links.values() for path in package.rglob("*.py")}
    assert [
        folder.relative_to(ROOT) for folder in folders if not (folder / "__init__.py").exists()
    ] == []


# What git tracks

MACHINE = re.compile(rb"/(root|work|home/\w+|Users/\w+)/|py(pi)\.org|python(hosted)\.org")


def test_no_tracked_file_is_large():
    limit_bytes = 1_000_000
    assert [path.name for path in tracked() if path.stat().st_size > limit_bytes] == []


def test_the_documentation_stays_small():
    """Raise no limit: join pages, replace a table by a sentence, or compress a record."""
    docs = [path for path in tracked() if ROOT / "docs" in path.parents]
    pages = [path for path in docs if path.suffix == ".md"]
    words = sum(len(path.read_text().split()) for path in pages)
    assert len(pages) <= 40
    assert words <= 45_000
    assert sum(path.stat().st_size for path in docs) <= 12_000_000


def test_no_tracked_file_names_a_machine():
    hits = [
        f"{path.name}: {hit.group()!r}"
        for path in tracked()
        if (hit := MACHINE.search(path.read_bytes()))
    ]
    assert hits == []


@pytest.mark.parametrize(
    "text",
    [b"see /ro" + b"ot/x", b"/wo" + b"rk/shared", b"/ho" + b"me/jo/a", b"from pyp" + b"i.org"],
)
def test_control_a_machine_path_is_found(text: bytes):
    assert MACHINE.search(text)


# .ci/run


def ci_finds(tmp_path: Path, scripts: dict[str, str]) -> str:
    """What `.ci/run --list` prints where only these programs exist beside the system's own."""
    for name, script in scripts.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}/shims:/bin:/usr/bin",
        "PYENV_ROOT": str(tmp_path),
        "HOME": str(tmp_path),
    }
    command = ["bash", str(ROOT / ".ci/run"), "--list"]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=60
    ).stdout


def test_ci_runs_an_interpreter_before_it_believes_it(tmp_path: Path):
    broken = "exit 127"
    working = "exit 0"
    scripts = {
        "shims/python3.12": broken,
        "shims/python3.13": broken,
        "versions/3.12.9/bin/python3.12": working,
    }
    listed = ci_finds(tmp_path, scripts)
    assert f"found Python 3.12: {tmp_path}/versions/3.12.9/bin/python3.12" in listed
    assert "found no Python 3.13" in listed


def stages() -> list[str]:
    """What `.ci/run` makes, in its order."""
    return re.findall(
        r'^ *(?:late_)?stage "[^"]+" \S+ (\w+)', (ROOT / ".ci/run").read_text(), re.MULTILINE
    )


def test_what_ci_runs_can_be_made_and_is_said():
    targets = re.findall(r"^(\w+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (stage_list,) = re.findall(
        r"`\.ci/run` must pass before a change lands\. In this order it makes (.*?)\. The last",
        text,
        re.DOTALL,
    )
    assert {"test", "site", "core"} < set(stages()) < set(targets)
    assert re.findall(r"`(\w+)`", stage_list) == stages()


# Tests that `make test` leaves out


MARKED_APART = re.compile(r"\bmark\.(parity|tpu|gpu|schedulers|release)\b")


def imported(source: ast.Module) -> dict[str, object]:
    """Objects that a test file imports from the project at its top, by their names there."""
    objects: dict[str, object] = {}
    for statement in source.body:
        if not isinstance(statement, ast.ImportFrom) or statement.module is None:
            continue
        if statement.module.split(".")[0] not in ("mupax", "scripts"):
            continue
        module = importlib.import_module(statement.module)
        for alias in statement.names:
            if not hasattr(module, alias.name):
                importlib.import_module(f"{statement.module}.{alias.name}")
            objects[alias.asname or alias.name] = getattr(module, alias.name)
    return objects


def missing_attributes(text: str) -> list[str]:
    """Attributes that a test file replaces by name (`monkeypatch.setattr`) and that are gone."""
    source = ast.parse(text)
    objects = imported(source)
    missing = []
    for call in ast.walk(source):
        match call:
            case ast.Call(
                func=ast.Attribute(attr="setattr" | "object"),
                args=[ast.Name(id=owner), ast.Constant(value=str(attribute)), *_],
            ) if owner in objects and not hasattr(objects[owner], attribute):
                missing.append(f"{owner}.{attribute}")
    return missing


def test_attributes_exist_that_tests_of_other_stages_replace():
    # A renamed attribute would fail there alone, long after `make test` has passed.
    texts = {file: file.read_text() for file in sorted((ROOT / "tests").rglob("test_*.py"))}
    apart = {file: text for file, text in texts.items() if MARKED_APART.search(text)}
    assert ROOT / "tests/train/pods/test_tpu_guards.py" in apart
    missing = {str(file): missing_attributes(text) for file, text in apart.items()}
    assert not {file: names for file, names in missing.items() if names}


def test_control_a_renamed_attribute_is_missing():
    text = """
from mupax.train.core.program import Program

def test(monkeypatch):
    monkeypatch.setattr(Program, "free", True)
    monkeypatch.setattr(Program, "free_layout", True)
"""
    assert missing_attributes(text) == ["Program.free"]
