"""A room imports only from rooms on floors below it, and no modules import in a circle."""

from __future__ import annotations

import ast
import functools
import itertools
from pathlib import Path

import pytest

from scripts.house import sizes

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("presets", "zoo", "train")
FLOORS: tuple[tuple[str, ...], ...] = (
    ("mupax",),
    ("presets",),
    ("presets/papers",),
    ("presets/tuned", "presets/analysis", "presets/infinite"),
    ("presets/__init__.py",),
    ("presets/verify",),
    ("zoo", "zoo/layers"),
    ("zoo/huggingface",),
    ("train/config",),
    ("train/parallel", "train/data"),
    ("train/core",),
    ("train/checkpoints", "train/pods"),
    ("train/reuse",),
    ("train/run",),
    ("train/studies",),
    ("entry points",),
    ("scripts",),
)
"""Rooms by floor, the lowest first; only the two of `TOGETHER` see each other on a floor.

`presets.get` looks presets up by name, so it is above all of them.
"""
TOGETHER = {"zoo", "zoo/layers"}
"""One room in two folders: a model family is made of layers, which read its configs."""
HEAVY = ("jax", "jaxlib", "flax", "optax", "orbax", "numpy")
ROOMS = frozenset(itertools.chain.from_iterable(FLOORS))
PURE = ("presets", "presets/papers", "presets/tuned", "presets/analysis", "presets/verify")
"""Rooms that import none of `HEAVY`: theory needs neither arrays nor a device."""
_LIGHT = "the command answers --help without it, and it imports JAX or NumPy"
OWN_IDEAS = {
    "presets/verify/findings.py": "sentences about a dump; with the command that prints them 1,300 lines",
    "train/pods/hlo.py": "a parser of the compiler's text; with the compiled step 1,700 lines",
    "train/reuse/grow/grow.py": _LIGHT,
    "train/reuse/serve/server.py": "imports uvicorn, which is an extra; `serve --help` answers without it",
    "train/reuse/serve/worker.py": "the thread that has the device; with the service 1,200 lines",
    "train/run/dry_run.py": _LIGHT,
    "train/run/resume.py": "comparisons with earlier parts and other processes; with the start of a run 1,000 lines",
    "train/studies/check/balance.py": _LIGHT,
    "train/studies/check/joint_run.py": "a study of a run's optimizer; with the command of coordinate checks 1,000 lines",
    "train/studies/roles/matrices.py": "how matrices meet activations; with the declarations made of it 1,400 lines",
    "train/studies/transfer/frugal.py": _LIGHT,
    "train/studies/tune/report.py": _LIGHT,
    "zoo/decoder/model.py": _LIGHT,
    "zoo/encoder_decoder/model.py": _LIGHT,
    "zoo/vit/model.py": _LIGHT,
}
"""Files that only one file of their folder imports, with the reason why they are not part of it."""
MOST_OWN_IDEAS = 15
ENTRIES: dict[str, tuple[str, ...]] = {
    "presets/optimizers.py": (
        "mupax.train.core.muon",
        "mupax.train.core.optimizer",
        "mupax.train.config.run",
    ),
    "train/config/data.py": (
        "mupax.train.data.sources",
        "mupax.train.data.records",
        "mupax.train.data.interface",
    ),
    "zoo/decoder/config.py": ("mupax.zoo.decoder.model",),
    "zoo/encoder_decoder/config.py": ("mupax.zoo.encoder_decoder.model",),
    "zoo/transformer.py": ("mupax.zoo.lora.layer",),
    "zoo/vit/config.py": ("mupax.zoo.vit.model",),
}
"""Files whose entries name modules on floors above them, with these modules.

An entry imports inside a function, for those who use the entry, so the file does not depend on it.
"""
IMPORTERS = {
    "mupax/plugins.py": "modules of the user's own, by the name that the user gives",
    "mupax/mappings.py": "MODULE:FUNCTION that a user writes into a table or as a command's word",
    "train/__init__.py": "names of the Python interface, which `if TYPE_CHECKING` imports too",
    "zoo/__init__.py": "names of the Python interface, which `if TYPE_CHECKING` imports too",
}
"""Files that import a module by a text that is not written there, with the reason."""
ARRAYS = "presets/infinite"
"""Room of theory that imports NumPy alone of `HEAVY`; no other room of `presets` imports it."""

pytestmark = pytest.mark.core


@functools.cache
def imports(source: str) -> list[tuple[str, bool]]:
    """Return every module that a source imports, and whether at its top.

    `from a import b` counts as a.b, and as a unless b is a module.
    """
    modules: list[tuple[str, bool]] = []

    def visit(node: ast.AST, top: bool) -> None:
        top = top and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name):
            top = top and node.test.id != "TYPE_CHECKING"
        if isinstance(node, ast.Import):
            modules.extend((alias.name, top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names = [f"{module}.{alias.name}" for alias in node.names]
            modules.extend((name, top) for name in names)
            if not all(map(file_of, names)):
                modules.append((module, top))
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.expr):  # an import is a statement
                visit(child, top)

    visit(ast.parse(source), True)
    return modules


@functools.cache
def room(path: str) -> str:
    """Return the room of a file, by its path from the root.

    A `__main__.py`, the commands and what `mupax.train` exports are on the highest floor but one.
    """
    folders = path.split("/")[:-1]
    if path == "presets/__init__.py":
        return path
    is_main = path.endswith("__main__.py") and folders[:1] != ["scripts"]
    if path == "train/__init__.py" or is_main or folders == ["mupax", "commands"]:
        return "entry points"
    names = ["/".join(folders[:end]) for end in range(len(folders), 0, -1)]
    return next(name for name in names if name in ROOMS)


@functools.cache
def floor(name: str) -> int:
    return next(number for number, rooms in enumerate(FLOORS) if name in rooms)


@functools.cache
def file_of(module: str) -> str | None:
    """Return the file of a module of ours, by its path from the root."""
    parts = module.split(".")
    if parts[0] == "mupax" and parts[1:2] and parts[1] in PACKAGES:
        parts = parts[1:]
    path = "/".join(parts)
    for name in (f"{path}.py", f"{path}/__init__.py"):
        if (ROOT / name).is_file():
            return name
    return None


def is_entry(path: str, module: str, top: bool) -> bool:
    """Return whether a file imports a module inside a function, for an entry of its table."""
    return not top and f"{module}.".startswith(tuple(f"{name}." for name in ENTRIES.get(path, ())))


def dynamic_imports(source: str) -> list[str]:
    """Return the calls that import a module of mupax, or one whose name is computed."""
    if "import_module" not in source and "__import__" not in source:
        return []  # parsing all files takes seconds
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    wrong: list[str] = []
    for call in calls:
        function = ast.unparse(call.func).rpartition(".")[2]
        if function not in ("import_module", "__import__"):
            continue
        name = call.args[0]
        is_foreign = isinstance(name, ast.Constant) and not str(name.value).startswith("mupax")
        if not is_foreign:
            wrong.append(ast.unparse(call))
    return wrong


def violations(path: str, source: str) -> list[str]:
    """Return what the file at `path` (from the root) must not import."""
    own = room(path)
    wrong: list[str] = []
    for module, top in imports(source):
        if is_entry(path, module, top):
            continue
        package = module.split(".")[0]
        if module.startswith("."):
            wrong.append(f"{path}: relative import {module}")
        elif package in PACKAGES:
            wrong.append(
                f"{path}: {module} has another name where mupax is installed; write mupax.{module}"
            )
        elif package in HEAVY and own in PURE:
            wrong.append(f"{path}: {own} is pure Python and imports {module}")
        elif package in HEAVY and own == ARRAYS and package != "numpy":
            wrong.append(f"{path}: {own} has NumPy alone and imports {module}")
        elif "__main__" in module.split("."):
            wrong.append(f"{path}: imports the entry point {module}")
        elif (target := file_of(module)) and "__main__" not in module:
            peer = room(target)
            allowed = peer == own or floor(peer) < floor(own) or {own, peer} <= TOGETHER
            allowed &= peer != ARRAYS or not own.startswith("presets") or own == peer
            if not allowed:
                wrong.append(
                    f"{path}: {own} imports {module}, which is in {peer}, not on a floor below"
                )
            elif own == "entry points" != peer and top and floor(peer) >= floor("train/core"):
                wrong.append(
                    f"{path}: an entry point imports {module} inside the function that needs it"
                )
    return wrong


@functools.cache
def sources() -> tuple[str, ...]:
    """Return all files of the product and its scripts, by their paths from the root."""
    paths: list[Path] = []
    for folder in ("mupax", *PACKAGES, "scripts"):
        paths += sorted((ROOT / folder).rglob("*.py"))
    return tuple(path.relative_to(ROOT).as_posix() for path in paths)


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return groups of files that reach one another: Tarjan's strongly connected components."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def connect(node: str) -> None:
        low[node] = len(index)
        index[node] = low[node]
        stack.append(node)
        for peer in graph.get(node, ()):
            if peer not in index:
                connect(peer)
                low[node] = min(low[node], low[peer])
            elif peer in stack:
                low[node] = min(low[node], index[peer])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            groups.append(sorted(group))

    for node in graph:
        if node not in index:
            connect(node)
    return [group for group in groups if len(group) > 1]


@functools.cache
def import_graph(entries: bool = False) -> dict[str, set[str]]:
    """Return the files of ours that each file imports, wherever in it.

    A package counts where nothing in it is named.

    Args:
        entries: Count also what the entries of tables name.
    """
    graph: dict[str, set[str]] = {}
    for path in sources():
        graph[path] = set()
        for module, top in imports((ROOT / path).read_text()):
            target = file_of(module)
            if target not in (None, path) and (entries or not is_entry(path, module, top)):
                graph[path].add(target)
    return graph


def modules_alone(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the graph without arrows to packages, which import what they export."""
    packages = {path for path in graph if path.endswith("__init__.py")}
    return {path: targets - packages for path, targets in graph.items()}


def test_every_file_keeps_to_its_floor():
    wrong = [violations(path, (ROOT / path).read_text()) for path in sources()]
    assert not any(wrong), "\n".join(itertools.chain.from_iterable(wrong))


def test_no_files_import_in_a_circle():
    assert circles(modules_alone(import_graph())) == []


def test_control_a_circle_is_seen():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


def test_every_room_is_there():
    folders = {Path(path).parent.as_posix() for path in sources()}
    assert {name for name in ROOMS if (ROOT / name).is_dir()} <= folders


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("presets/planted.py", "import jax"),
        ("presets/analysis/planted.py", "from flax import nnx"),
        ("presets/planted.py", "def f():\n    from mupax.zoo import configs"),
        ("presets/planted.py", "from zoo import configs"),
        ("presets/infinite/planted.py", "import jax.numpy"),
        ("presets/analysis/planted.py", "from mupax.presets.infinite import dice"),
        ("presets/__init__.py", "def f():\n    from mupax.presets.infinite import dice"),
        ("zoo/planted.py", "from mupax.train.config.run import Config"),
        ("zoo/planted.py", "class A:\n    def f(self):\n        from mupax.train.core import step"),
        ("zoo/layers/planted.py", "from mupax.zoo.huggingface import names"),
        ("train/core/planted.py", "import scripts.studies.transfer"),
        ("train/core/planted.py", "from mupax.train.run import loop"),
        ("train/parallel/planted.py", "from mupax.train.data import interface"),
        ("train/reuse/grow/planted.py", "def f():\n    from mupax.train.run import loop"),
        ("train/data/planted.py", "from .. import config"),
        ("train/run/planted.py", "from mupax.train import __main__"),
        ("train/run/planted.py", "def f():\n    from mupax.zoo.__main__ import main"),
        ("train/__main__.py", "from mupax.train.run import loop"),
        ("mupax/commands/planted.py", "from mupax.train.run import loop"),
        ("mupax/planted.py", "def run():\n    from mupax.commands import dispatch"),
        ("train/run/planted.py", "def run():\n    from mupax.commands import dispatch"),
        ("mupax/__main__.py", "def main():\n    from mupax.zoo.__main__ import main"),
        ("presets/optimizers.py", "from mupax.train.core import optimizer"),
        ("presets/optimizers.py", "def f():\n    from mupax.train.core import step"),
        ("train/config/data.py", "def f():\n    from mupax.train.data import load"),
    ],
)
def test_control_a_planted_import_is_caught(path: str, source: str):
    assert violations(path, source)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("presets/planted.py", "import math\nfrom mupax.presets.roles import Role"),
        ("presets/infinite/planted.py", "import numpy as np"),
        ("presets/__main__.py", "def main():\n    from mupax.zoo import configs"),
        ("zoo/layers/planted.py", "import jax\nfrom mupax.zoo import configs"),
        ("train/run/planted.py", "from mupax.train.core import step"),
        ("train/studies/sweep/planted.py", "from mupax.train.run import loop"),
        ("mupax/commands/planted.py", "def run():\n    from mupax.train.run import loop"),
        ("scripts/planted.py", "from mupax.train import data"),
        ("presets/optimizers.py", "def f():\n    from mupax.train.core import optimizer"),
        ("train/config/data.py", "def f():\n    from mupax.train.data.sources import digits"),
    ],
)
def test_allowed_imports_pass(path: str, source: str):
    assert not violations(path, source)


def test_no_module_is_imported_by_a_text():
    # Editors and the type checker follow an import, and not a text that names a module.
    dynamic = {path for path in sources() if dynamic_imports((ROOT / path).read_text())}
    assert {path for path in dynamic if not path.startswith("scripts/")} == IMPORTERS.keys()


@pytest.mark.parametrize(
    ("source", "is_seen"),
    [
        ("importlib.import_module(name)", True),
        ("import_module(f'{folder}.text')", True),
        ("import_module('mupax.zoo.vit.model').ViT", True),
        ("__import__(name)", True),
        ("importlib.import_module('readline')", False),
    ],
)
def test_control_an_import_by_a_text_is_seen(source: str, is_seen: bool):
    assert bool(dynamic_imports(source)) == is_seen


def test_entries_name_what_is_there():
    for path, names in ENTRIES.items():
        modules = imports((ROOT / path).read_text())
        named = [f"{module}." for module, top in modules if is_entry(path, module, top)]
        for name in names:
            assert any(module.startswith(f"{name}.") for module in named), f"{path}: {name}"


def test_a_file_with_one_importer_is_an_idea_of_its_own():
    single = set(sizes.single_importers(ROOT))
    assert single == OWN_IDEAS.keys(), "merge it into the file that imports it, or say why not"
    assert len(OWN_IDEAS) <= MOST_OWN_IDEAS


def test_control_a_file_with_one_importer_is_seen(tmp_path: Path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "part.py").write_text("")
    (tmp_path / "train" / "main.py").write_text("def run():\n    from mupax.train import part\n")
    assert sizes.single_importers(tmp_path) == {"train/part.py": "train/main.py"}


def test_no_file_is_a_bag_of_things():
    bags = {"utils", "util", "common", "helpers", "helper", "misc"}
    assert [path for path in sources() if Path(path).stem in bags] == []


def context_variables(source: str) -> list[str]:
    """Return the imports with which a source could keep a value that its functions read."""
    modules = [module for module, _ in imports(source)]
    return [module for module in modules if module.split(".")[0] in ("contextvars", "threading")]


def test_a_model_reads_nothing_that_it_is_not_given():
    # The layout was a `ContextVar` once: a model saw whichever was set when it was called.
    zoo = [path for path in sources() if path.startswith("zoo/")]
    assert len(zoo) > 40
    assert [path for path in zoo if context_variables((ROOT / path).read_text())] == []


@pytest.mark.parametrize(
    "source",
    [
        "from contextvars import ContextVar",
        "def f():\n    import contextvars",
        "from threading import local",
    ],
)
def test_control_a_context_variable_is_seen(source: str):
    assert context_variables(source)
