"""Requirements are bounded, locked with hashes and without addresses, one for every import."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
REQUIREMENTS = ("requirements.txt", "requirements-dev.txt", "requirements-site.txt")
"""The first is installed with each of the others, which list what they add to it."""
MAKEFILE = (ROOT / "Makefile").read_text()
PACKAGES = 85
"""Most packages of a plain install."""
TO_BUILD = {"hatchling", "pathspec", "pluggy", "tomlkit", "trove-classifiers"}
"""Locked for the editable install, and brought by no other."""
PYTHONS = ("3.11", "3.12", "3.13")
PRODUCT = ("presets", "zoo", "train")

pytestmark = pytest.mark.core


def dependencies() -> list[str]:
    project = PROJECT["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    groups = [line for lines in PROJECT["dependency-groups"].values() for line in lines]
    return [*PROJECT["build-system"]["requires"], *project["dependencies"], *extras, *groups]


def unbounded(line: str) -> bool:
    operators = {specifier.operator for specifier in Requirement(line).specifier}
    return not (operators & {">=", "==", "~="} and operators & {"<", "<=", "==", "~="})


def test_every_dependency_has_both_bounds():
    assert [line for line in dependencies() if unbounded(line)] == []


@pytest.mark.parametrize("line", ["jax", "jax>=0.10", "jax<0.13", "jax[cuda]>=1"])
def test_control_an_open_bound_is_found(line: str):
    assert unbounded(line)


ADDRESS = re.compile(
    r"://|www\.|\bfile:|@ |--(extra-)?index-url|--find-links|--trusted-host|\b\w+\.(org|com|io|net)\b"
)


@pytest.mark.parametrize("name", REQUIREMENTS)
def test_requirements_name_no_address(name: str):
    lines = (ROOT / name).read_text().splitlines()
    assert [line for line in lines if ADDRESS.search(line)] == []


@pytest.mark.parametrize(
    "line",
    [
        "--index-url somewhere",
        "# from https" + "://a.b/simple",
        "jax @ file:///x.whl",
        "--find-links /opt/w",
        "a.org",
    ],
)
def test_control_an_address_is_found(line: str):
    assert ADDRESS.search(line)


def locked(name: str) -> dict[str, list[Requirement]]:
    """Package to its pinned lines. A package may have one line per Python version."""
    pins: dict[str, list[Requirement]] = {}
    for line in re.findall(r"^\S.*(?: \\)?$", (ROOT / name).read_text(), re.MULTILINE):
        if not line.startswith("#"):
            requirement = Requirement(line.removesuffix("\\").strip())
            pins.setdefault(normalized(requirement.name), []).append(requirement)
    return pins


def installed(name: str) -> dict[str, list[Requirement]]:
    """Package to the pinned lines that an environment of this file has."""
    return {**locked(REQUIREMENTS[0]), **locked(name)}


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def applies(requirement: Requirement, python: str, platform: str = "linux") -> bool:
    environment = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "sys_platform": platform,
    }
    return requirement.marker is None or requirement.marker.evaluate(environment)


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("name", REQUIREMENTS)
def test_the_lock_answers_pyproject(name: str, python: str):
    requirements = PROJECT["project"]["dependencies"] + PROJECT["dependency-groups"]["build"]
    for extra in ("dev", "site"):
        if name == f"requirements-{extra}.txt":
            requirements = requirements + PROJECT["project"]["optional-dependencies"][extra]
    pins = installed(name)
    for requirement in map(Requirement, requirements):
        versions = [
            str(pin.specifier)
            for pin in pins.get(normalized(requirement.name), [])
            if applies(pin, python)
        ]
        assert len(versions) == 1, (
            f"{name}: {requirement.name} on {python} is pinned {versions}; run `make lock`"
        )
        pinned = Version(versions[0].removeprefix("=="))
        assert pinned in requirement.specifier, (
            f"{name}: {requirement} is pinned {pinned}; run `make lock`"
        )


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_a_plain_install_brings_few_packages(python: str, platform: str):
    """Each is code that a user trusts and downloads; what few commands need is an extra."""
    pins = locked(REQUIREMENTS[0])
    brought = {name for name in pins if any(applies(pin, python, platform) for pin in pins[name])}
    assert len(brought - TO_BUILD) <= PACKAGES


@pytest.mark.parametrize("name", REQUIREMENTS)
def test_every_locked_line_is_hashed_and_torch_stays_out(name: str):
    text = (ROOT / name).read_text()
    entries = re.split(r"\n(?=[a-z0-9])", text[text.index("\n") :], flags=re.IGNORECASE)[1:]
    assert len(entries) == sum(map(len, locked(name).values())) > 50
    assert [entry.split()[0] for entry in entries if "--hash=sha256:" not in entry] == []
    assert not {"torch", "tensorflow"} & set(locked(name))


@pytest.mark.parametrize("name", REQUIREMENTS[1:])
def test_a_lock_lists_only_what_it_adds(name: str):
    """A file that lists the others again is 2,600 lines longer to review."""
    assert locked(REQUIREMENTS[0]).keys() & locked(name).keys() == set(), "run `make lock`"
    # So make installs both, and again where either has changed.
    assert f"--require-hashes -r {REQUIREMENTS[0]} -r {name}\n" in MAKEFILE
    assert f": {REQUIREMENTS[0]} {name} pyproject.toml |" in MAKEFILE


def test_the_tools_of_tests_and_of_the_site_share_an_environment():
    tools = locked("requirements-dev.txt")
    site = locked("requirements-site.txt")
    assert tools.keys() & site.keys()
    versions = [
        {name: {str(pin.specifier) for pin in pins[name]} for name in tools.keys() & site}
        for pins in (tools, site)
    ]
    assert versions[0] == versions[1], "run `make lock`"


def undeclared(sources: list[str], declared: set[str]) -> set[str]:
    """Modules that the sources import and no declared distribution provides."""
    providers = packages_distributions()
    tops = {module.split(".")[0] for source in sources for module in imported(source)}
    outside = (
        tops - set(sys.stdlib_module_names) - {"mupax", "scripts", "tests", "conftest", "examples"}
    )
    return {
        top
        for top in outside
        if not declared & {normalized(name) for name in providers.get(top, [top])}
    }


def imported(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def declared(*extras: str) -> set[str]:
    optional = PROJECT["project"]["optional-dependencies"]
    lines = [
        *PROJECT["project"]["dependencies"],
        *(line for extra in extras for line in optional[extra]),
    ]
    return {normalized(Requirement(line).name) for line in lines}


def test_every_import_is_a_declared_dependency():
    def sources(*folders: str) -> list[str]:
        return [path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py")]

    extras = set(PROJECT["project"]["optional-dependencies"])
    assert undeclared(sources(*PRODUCT), declared(*extras - {"dev"})) == set()
    assert undeclared(sources("scripts"), declared(*extras)) == set()
    tests = sources("tests")
    assert undeclared(tests, declared("wandb", "torch", "eval", "dev")) == set()


def test_control_an_undeclared_import_is_found():
    sources = ["def f():\n    import pandas.io", "import jax, math", "from not_there import x"]
    assert undeclared(sources, declared()) == {"pandas", "not_there"}
