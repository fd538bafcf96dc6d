"""The core trains without its leaves, and a leaf imports the core and the leaves it names.

`python -m tests.test_leaves` writes the table of docs/concepts/architecture.md.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_floors import ROOT, file_of, imports, sources

ARCHITECTURE = ROOT / "docs" / "concepts" / "architecture.md"
LEAVES: dict[str, tuple[str, ...]] = {
    "presets/analysis": (),
    "presets/tuned": (),
    "presets/infinite": (),
    "presets/verify": ("presets/analysis",),
    "zoo/encoder_decoder": (),
    "zoo/experts": (),
    "zoo/lora": (),
    "zoo/functional": (),
    "zoo/huggingface": (),
    "train/data/text": (),
    "train/data/streams": ("train/data/text",),
    "train/data/sources": ("train/data/text", "train/data/streams"),
    "train/core/functional": ("zoo/functional",),
    "train/pods": (),
    "train/run/report/mirrors": (),
    "train/run/restart": (),
    "train/reuse": ("zoo/huggingface", "zoo/lora", "train/data/text", "presets/tuned"),
    "train/reuse/generate": ("train/reuse", "train/data/text"),
    "train/reuse/serve": ("train/reuse/generate", "train/reuse", "train/data/text"),
    "train/reuse/predict": ("train/reuse", "train/data/text", "train/data/sources"),
    "train/reuse/harness": ("train/reuse/generate",),
    "train/reuse/start": (
        "train/reuse",
        "zoo/huggingface",
        "train/data/text",
        "train/data/sources",
    ),
    "train/reuse/grow": ("train/reuse", "zoo/huggingface"),
    "train/studies": (),
    "train/studies/roles": ("zoo/functional",),
    "train/studies/check": (
        "train/studies",
        "train/studies/roles",
        "presets/analysis",
        "presets/tuned",
    ),
    "train/studies/desiderata": ("train/studies/check", "presets/analysis"),
    "train/studies/infinite": ("presets/infinite",),
    "train/studies/sweep": (),
    "train/studies/transfer": ("train/studies", "train/studies/sweep", "presets/tuned"),
    "train/studies/forecast": (
        "train/studies",
        "train/studies/transfer",
        "train/studies/sweep",
        "train/pods",
    ),
    "train/studies/tune": ("train/studies", "train/studies/transfer", "train/studies/sweep"),
    "train/studies/tables": ("train/studies", "presets/tuned"),
    "train/studies/plan": (
        "train/studies",
        "train/studies/tables",
        "train/studies/forecast",
        "train/studies/transfer",
        "train/studies/sweep",
        "train/reuse",
        "train/pods",
    ),
}
"""Folder of each leaf to the leaves that it imports, which stand before it."""
SAME_LEAF = {
    "train/data/records": "train/data/text",
    "train/data/chats": "train/data/text",
    "train/reuse/huggingface": "train/reuse",
}
"""Folders that belong to the leaf of another folder: they import each other."""
REACHED_FROM: dict[str, tuple[str, ...]] = {
    "presets/__init__.py": ("presets/tuned",),
    "zoo/__init__.py": ("zoo/functional",),
    "zoo/encoder_decoder/config.py": ("zoo/encoder_decoder",),
    "zoo/layers/stack.py": ("zoo/experts",),
    "zoo/transformer.py": ("zoo/lora",),
    "train/config/data.py": ("train/data/sources", "train/data/text"),
    "train/config/preset.py": ("presets/tuned",),
    "train/config/recipes/files.py": ("presets/tuned",),
    "train/config/tuned.py": ("presets/tuned",),
    "train/core/state.py": ("zoo/experts",),
    "train/core/factors.py": ("presets/analysis",),
    "train/data/__init__.py": ("train/data/sources", "train/data/text"),
    "train/checkpoints/assets.py": ("train/data/text",),
    "train/data/named_sets.py": ("train/data/sources",),
    "train/data/show.py": ("train/data/text",),
    "train/run/dry_run.py": ("presets/tuned", "train/reuse/start"),
    "train/run/report/finish.py": ("train/reuse/generate", "train/run/report/mirrors"),
    "train/run/report/metrics.py": ("train/run/report/mirrors",),
    "train/run/runtime.py": ("train/reuse/start", "train/run/report/mirrors", "train/run/restart"),
    "train/run/start.py": ("train/reuse", "train/reuse/start", "train/run/report/mirrors"),
}
"""File of the core to the leaves that it imports, each inside the function that needs it."""
FRONT = ("train/__init__.py", "train/reuse/model.py")
"""Files that put leaves together, as commands do: the Python interface."""
CONFIGS = ("zoo/encoder_decoder/config.py",)
"""Files of leaves that belong to the core, as flags and records are made of these configs."""
CONTROL = "mupax.train.core.optimizer"

pytestmark = pytest.mark.core


def leaf_of(path: str) -> str | None:
    """Return the leaf of a file, by its path from the root; None for a file of the core."""
    if path in CONFIGS:
        return None
    folders = path.split("/")[:-1]
    for end in range(len(folders), 0, -1):
        folder = "/".join(folders[:end])
        folder = SAME_LEAF.get(folder, folder)
        if folder in LEAVES:
            return folder
    return None


def is_front(path: str) -> bool:
    """Return whether a file is an entry point, the file of a command or one of `FRONT`."""
    ends = ("__main__.py", "command.py", "run/noise.py")
    return path in FRONT or path.startswith("mupax/commands/") or path.endswith(ends)


def reached(path: str, source: str) -> list[tuple[str, bool]]:
    """Return the leaves that a file imports besides its own, each with whether at its top."""
    own = leaf_of(path)
    leaves: list[tuple[str, bool]] = []
    for module, top in imports(source):
        target = file_of(module)
        leaf = leaf_of(target) if target else None
        if leaf not in (None, own):
            leaves.append((leaf, top))
    return leaves


def wrong_imports(path: str, source: str) -> list[str]:
    """Return what is wrong with the leaves that the file at `path` imports."""
    if is_front(path):
        return []
    own = leaf_of(path)
    wrong: list[str] = []
    for leaf, top in reached(path, source):
        if own is None and top:
            wrong.append(f"{path}: the core imports {leaf} at the top; import it where it is used")
        elif own is None and leaf not in REACHED_FROM.get(path, ()):
            wrong.append(f"{path}: the core imports {leaf}; name it in REACHED_FROM")
        elif own is not None and leaf not in LEAVES[own]:
            wrong.append(f"{path}: {own} imports {leaf}; name it in LEAVES, if it stands before")
    return wrong


def first_line(folder: str) -> str:
    """Return the first line of the docstring of a package."""
    docstring = ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text()))
    assert docstring, folder
    return docstring.splitlines()[0]


def table() -> str:
    """Return the table of leaves for docs/concepts/architecture.md."""
    rows = ["| leaf | what it is |", "|---|---|"]
    for leaf in LEAVES:
        folders = [leaf, *(folder for folder, owner in SAME_LEAF.items() if owner == leaf)]
        names = ", ".join(f"`{folder}`" for folder in folders)
        rows.append(f"| {names} | {first_line(leaf)} |")
    return "\n".join(rows)


def page(text: str) -> str:
    """Return the text of docs/concepts/architecture.md with the table as `LEAVES` has it."""
    begin = "<!-- leaves: begin -->\n"
    end = "<!-- leaves: end -->"
    before = text.partition(begin)[0]
    after = text.partition(end)[2]
    return f"{before}{begin}{table()}\n{end}{after}"


@functools.cache
def product() -> dict[str, str]:
    """Return every file of the product, by its path from the root, and its text."""
    return {path: (ROOT / path).read_text() for path in sources() if not path.startswith("scripts")}


def test_every_file_keeps_to_the_core_and_the_leaves_that_its_own_names() -> None:
    wrong: list[str] = []
    for path, source in product().items():
        wrong += wrong_imports(path, source)
    assert not wrong, "\n".join(wrong)


def test_leaves_are_folders_and_import_only_those_before_them() -> None:
    order = list(LEAVES)
    for leaf, lower in LEAVES.items():
        assert (ROOT / leaf).is_dir()
        assert all(order.index(name) < order.index(leaf) for name in lower), leaf


def test_no_leaf_is_named_that_is_not_imported() -> None:
    used: dict[str, set[str]] = {}
    for path, source in product().items():
        own = leaf_of(path) or path
        used.setdefault(own, set()).update(leaf for leaf, _ in reached(path, source))
    assert [leaf for leaf, lower in LEAVES.items() if not set(lower) <= used[leaf]] == []
    assert [path for path, leaves in REACHED_FROM.items() if set(leaves) != used[path]] == []


def test_the_table_of_the_page_is_that_of_the_leaves() -> None:
    assert page(ARCHITECTURE.read_text()) == ARCHITECTURE.read_text(), (
        "python -m tests.test_leaves writes it anew"
    )


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("train/core/planted.py", "from mupax.zoo.experts import layer"),
        ("train/core/planted.py", "def f():\n    from mupax.train.studies.sweep import rows"),
        ("train/studies/sweep/planted.py", "from mupax.train.studies.transfer import study"),
        (
            "train/studies/check/planted.py",
            "def f():\n    from mupax.train.studies.desiderata import command",
        ),
        ("zoo/lora/planted.py", "from mupax.zoo.experts import layer"),
    ],
)
def test_control_a_planted_import_is_caught(path: str, source: str) -> None:
    assert wrong_imports(path, source)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("zoo/lora/planted.py", "from mupax.zoo.encoder_decoder import config"),
        ("train/data/records/planted.py", "from mupax.train.data.chats import records"),
        ("train/studies/transfer/planted.py", "from mupax.train.studies.sweep import rows"),
        (
            "train/studies/sweep/command.py",
            "def f():\n    from mupax.train.studies.transfer import study",
        ),
    ],
)
def test_allowed_imports_pass(path: str, source: str) -> None:
    assert not wrong_imports(path, source)


PROGRAM = """
import sys

class Hider:
    def find_spec(self, name, path=None, target=None):
        if name in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}, which is hidden", name=name)

hidden = set()
sys.meta_path.insert(0, Hider())
control, leaves, *words = sys.argv[1:]
from mupax.train.__main__ import main

hidden = {control}
try:
    print("control:", main(words))
except ModuleNotFoundError as error:
    print("control:", error)

hidden = set(leaves.split(","))
early = hidden.intersection(sys.modules)
assert not early, early
sys.exit(main(words))
"""
TRAIN = (
    "lm-tiny --steps 2 --optimizer.warmup-steps 1 --data.batch-size 8 --data.eval-examples 8 "
    "--model.depth 1 --log.no-samples --log.no-tensorboard --log.no-progress --workdir run"
)
READ = ("train/data/text", "train/data/sources/__init__.py", "train/data/sources/text.py")
"""What `lm-tiny` itself reads: text."""


def modules_of_leaves() -> set[str]:
    """Return the modules of all leaves except what `lm-tiny` reads and packages of `CONFIGS`."""
    stays = {*READ, *(f"{Path(path).parent}/__init__.py" for path in CONFIGS)}
    modules: set[str] = set()
    for path in product():
        if leaf_of(path) not in (None, *READ) and path not in stays:
            module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            modules.add(f"mupax.{module}")
    return modules


def test_the_core_trains_without_its_leaves_and_not_without_a_part_of_itself(
    tmp_path: Path,
) -> None:
    # All leaves are hidden at once: a run that needs none of them does not need any one of them.
    hidden = modules_of_leaves()
    assert len(hidden) > 100
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}){PROGRAM}"
    command = [sys.executable, "-c", program, CONTROL, ",".join(hidden), *TRAIN.split()]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"No module named {CONTROL!r}, which is hidden" in done.stdout + done.stderr
    assert "control: 0" not in done.stdout
    assert (tmp_path / "run" / "checkpoints" / "2").is_dir()


if __name__ == "__main__":
    ARCHITECTURE.write_text(page(ARCHITECTURE.read_text()))
