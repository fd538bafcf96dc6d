"""The project's own files: requirements, packages, what git tracks, and configs that are read."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
REQUIREMENTS = ("requirements.txt", "requirements-dev.txt")
PYTHONS = ("3.11", "3.12", "3.13")
CODE = ("presets", "zoo", "train", "scripts")
CONFIGS = ("train/config.py", "zoo/configs.py")

pytestmark = pytest.mark.core


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    files = [ROOT / name for name in listed.split("\0") if name]
    assert ROOT / "pyproject.toml" in files
    return [file for file in files if file.is_file()]


def dependencies() -> list[str]:
    project = PROJECT["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    groups = [line for lines in PROJECT["dependency-groups"].values() for line in lines]
    return [*PROJECT["build-system"]["requires"], *project["dependencies"], *extras, *groups]


# Requirements


def unbounded(line: str) -> bool:
    operators = {specifier.operator for specifier in Requirement(line).specifier}
    return not (operators & {">=", "==", "~="} and operators & {"<", "<=", "==", "~="})


def test_every_dependency_has_both_bounds():
    assert [line for line in dependencies() if unbounded(line)] == []


@pytest.mark.parametrize("line", ["jax", "jax>=0.10", "jax<0.13", "jax[cuda]>=1"])
def test_control_an_open_bound_is_found(line: str):
    assert unbounded(line)


ADDRESS = re.compile(r"://|www\.|\bfile:|@ |--(extra-)?index-url|--find-links|--trusted-host|\b\w+\.(org|com|io|net)\b")


@pytest.mark.parametrize("name", REQUIREMENTS)
def test_requirements_name_no_address(name: str):
    lines = (ROOT / name).read_text().splitlines()
    assert [line for line in lines if ADDRESS.search(line)] == []


@pytest.mark.parametrize(
    "line",
    ["--index-url somewhere", "# from https" + "://a.b/simple", "jax @ file:///x.whl", "--find-links /opt/w", "a.org"],
)
def test_control_an_address_is_found(line: str):
    assert ADDRESS.search(line)


def locked(name: str) -> dict[str, list[Requirement]]:
    """Package to its pinned lines. A package may have one line per Python version."""
    found: dict[str, list[Requirement]] = {}
    for line in re.findall(r"^\S.*(?: \\)?$", (ROOT / name).read_text(), re.MULTILINE):
        if not line.startswith("#"):
            requirement = Requirement(line.removesuffix("\\").strip())
            found.setdefault(normalized(requirement.name), []).append(requirement)
    return found


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def applies(requirement: Requirement, python: str, platform: str = "linux") -> bool:
    environment = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": platform}
    return requirement.marker is None or requirement.marker.evaluate(environment)


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("name", REQUIREMENTS)
def test_the_lock_answers_pyproject(name: str, python: str):
    wanted = PROJECT["project"]["dependencies"] + PROJECT["dependency-groups"]["build"]
    if name == "requirements-dev.txt":
        wanted = wanted + PROJECT["project"]["optional-dependencies"]["dev"]
    pins = locked(name)
    for requirement in map(Requirement, wanted):
        versions = [str(pin.specifier) for pin in pins.get(normalized(requirement.name), []) if applies(pin, python)]
        assert len(versions) == 1, f"{name}: {requirement.name} on {python} is pinned {versions}; run `make lock`"
        pinned = Version(versions[0].removeprefix("=="))
        assert pinned in requirement.specifier, f"{name}: {requirement} is pinned {pinned}; run `make lock`"


@pytest.mark.parametrize("name", REQUIREMENTS)
def test_every_locked_line_is_hashed_and_torch_stays_out(name: str):
    text = (ROOT / name).read_text()
    entries = re.split(r"\n(?=[a-z0-9])", text[text.index("\n") :], flags=re.IGNORECASE)[1:]
    assert len(entries) == sum(map(len, locked(name).values())) > 50
    assert [entry.split()[0] for entry in entries if "--hash=sha256:" not in entry] == []
    assert not {"torch", "tensorflow"} & set(locked(name))


def test_both_locks_agree():
    run, dev = (locked(name) for name in REQUIREMENTS)
    for package, pins in run.items():
        assert {str(pin) for pin in pins} == {str(pin) for pin in dev[package]}, f"{package}: run `make lock`"


# Packages


def test_every_package_is_listed_and_importable():
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    there = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "scripts"}
    assert set(packages) == there == {"presets", "zoo", "train"}
    folders = {path.parent for package in packages for path in (ROOT / package).rglob("*.py")}
    assert [folder.relative_to(ROOT) for folder in folders if not (folder / "__init__.py").exists()] == []


# What git tracks

MACHINE = re.compile(rb"/(root|work|home/\w+|Users/\w+)/|py(pi)\.org|python(hosted)\.org")


def test_no_tracked_file_is_large():
    limit_bytes = 1_000_000
    assert [path.name for path in tracked() if path.stat().st_size > limit_bytes] == []


def test_no_tracked_file_names_a_machine():
    found = [f"{path.name}: {hit.group()!r}" for path in tracked() if (hit := MACHINE.search(path.read_bytes()))]
    assert found == []


@pytest.mark.parametrize(
    "text", [b"see /ro" + b"ot/x", b"/wo" + b"rk/shared", b"/ho" + b"me/jo/a", b"from pyp" + b"i.org"]
)
def test_control_a_machine_path_is_found(text: bytes):
    assert MACHINE.search(text)


# Configs


def fields(source: str) -> dict[str, list[str]]:
    """Dataclass name to the names of its fields."""
    found = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(d) for d in node.decorator_list):
            lines = [line for line in node.body if isinstance(line, ast.AnnAssign)]
            annotated = [line.target for line in lines if "ClassVar" not in ast.unparse(line.annotation)]
            found[node.name] = [target.id for target in annotated if isinstance(target, ast.Name)]
    return found


def attributes_read(source: str) -> set[str]:
    """Names x of every `something.x` that is read; the definition of a field is not one."""
    nodes = ast.walk(ast.parse(source))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}


def unread(definitions: str, sources: list[str]) -> list[str]:
    read = set().union(*map(attributes_read, sources))
    return [f"{owner}.{name}" for owner, names in fields(definitions).items() for name in names if name not in read]


@pytest.mark.parametrize("config", CONFIGS)
def test_every_config_field_is_read(config: str):
    sources = [path.read_text() for folder in CODE for path in sorted((ROOT / folder).rglob("*.py"))]
    definitions = (ROOT / config).read_text()
    assert fields(definitions)
    assert unread(definitions, sources) == []


def test_control_an_unread_field_is_found():
    planted = "@dataclasses.dataclass(frozen=True)\nclass C:\n    width: int\n    forgotten: int = 0\n"
    reader = "def f(c):\n    c.other.forgotten_too\n    return c.width\n"
    assert unread(planted, [planted, reader]) == ["C.forgotten"]


# .ci/run


def ci_finds(tmp_path: Path, scripts: dict[str, str]) -> str:
    """What `.ci/run --list` prints where only these programs exist beside the system's own."""
    for name, script in scripts.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    environment = {"PATH": f"{tmp_path}/shims:/bin:/usr/bin", "PYENV_ROOT": str(tmp_path), "HOME": str(tmp_path)}
    command = ["bash", str(ROOT / ".ci/run"), "--list"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60).stdout


def test_ci_runs_an_interpreter_before_it_believes_it(tmp_path: Path):
    broken, working = "exit 127", "exit 0"
    scripts = {"shims/python3.12": broken, "shims/python3.13": broken, "versions/3.12.9/bin/python3.12": working}
    listed = ci_finds(tmp_path, scripts)
    assert f"found Python 3.12: {tmp_path}/versions/3.12.9/bin/python3.12" in listed
    assert "found no Python 3.13" in listed
