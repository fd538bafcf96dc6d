"""A folder imports only from folders below it: presets <- zoo <- train <- scripts. Read from the source by `ast`."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOORS = ("presets", "zoo", "train", "scripts")
NUMERIC = ("scripts/figures/kernels.py", "scripts/figures/attention_kernels.py")
"""The files of presets that need numpy; nothing there imports them but one another."""
ENTRY_IMPORTER = "mupax/__main__.py"
"""The `mupax` command: the one file that may import entry points."""

pytestmark = pytest.mark.core


def imports(source: str) -> list[tuple[str, bool]]:
    """Every module that the source imports, and whether inside a function. `from a import b` counts as a and as a.b."""
    found: list[tuple[str, bool]] = []

    def visit(node: ast.AST, inside: bool) -> None:
        inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if isinstance(node, ast.Import):
            found.extend((alias.name, inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            found.extend([(module, inside), *((f"{module}.{alias.name}", inside) for alias in node.names)])
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(ast.parse(source), False)
    return found


def violations(path: str, source: str) -> list[str]:
    """What the file at `path` (relative to the root) must not import."""
    floor = path.split("/", 1)[0]
    above = FLOORS[FLOORS.index(floor) + 1 :]
    entry = path.endswith("__main__.py")
    wrong = []
    for module, inside in imports(source):
        top = module.split(".", 1)[0]
        if module.startswith("."):
            wrong.append(f"{path}: relative import {module}")
        elif top in above and not ((entry or path == ENTRY_IMPORTER) and inside):
            wrong.append(f"{path}: {floor} imports {module}, a floor above it")
        elif floor == "presets" and path not in NUMERIC and f"{module.replace('.', '/')}.py" in NUMERIC:
            wrong.append(f"{path}: imports {module}, which needs numpy")
        elif floor == "presets" and top == "numpy" and path in NUMERIC:
            pass
        elif floor == "presets" and top in ("jax", "jaxlib", "flax", "optax", "orbax", "numpy"):
            wrong.append(f"{path}: presets is pure Python and imports {module}")
        elif "__main__" in module.split(".") and path != ENTRY_IMPORTER:
            wrong.append(f"{path}: imports the entry point {module}")
    return wrong


def sources() -> list[str]:
    found = [path.relative_to(ROOT).as_posix() for floor in FLOORS for path in sorted((ROOT / floor).rglob("*.py"))]
    assert {path.split("/", 1)[0] for path in found} >= {"presets", "zoo", "train"}
    return found


def test_every_file_keeps_to_its_floor():
    wrong = [line for path in sources() for line in violations(path, (ROOT / path).read_text())]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("presets/planted.py", "import jax"),
        ("presets/planted.py", "from flax import nnx"),
        ("presets/planted.py", "def f():\n    from zoo import configs"),
        ("presets/planted.py", "import numpy"),
        ("presets/planted.py", "from presets import kernels"),
        ("scripts/figures/kernels.py", "import jax"),
        ("presets/__main__.py", "from zoo import configs"),
        ("zoo/planted.py", "from mupax.train.config.run import Config"),
        ("zoo/planted.py", "class A:\n    def f(self):\n        import train"),
        ("train/planted.py", "import scripts.figure"),
        ("train/data/planted.py", "from .. import config"),
        ("train/planted.py", "from train import __main__"),
        ("train/planted.py", "def f():\n    from mupax.zoo.__main__ import main"),
    ],
)
def test_control_a_planted_import_is_found(path: str, source: str):
    assert violations(path, source)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("presets/planted.py", "import math\nfrom mupax.presets.roles import Role"),
        ("presets/__main__.py", "def main():\n    from zoo import configs"),
        ("scripts/figures/kernels.py", "import numpy\nfrom presets import attention_kernels"),
        ("zoo/planted.py", "import jax\nimport presets"),
        ("train/planted.py", "from zoo import configs"),
        ("mupax/__main__.py", "def main():\n    from mupax.zoo.__main__ import main"),
        ("scripts/planted.py", "from train import data"),
    ],
)
def test_allowed_imports_pass(path: str, source: str):
    assert not violations(path, source)


def test_no_file_is_a_bag_of_things():
    bags = [path for path in sources() if Path(path).stem in ("utils", "util", "common", "helpers", "helper", "misc")]
    assert not bags
