"""Sizes, traces and mutants of small trees, held to what a person finds in them by hand."""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
import threading
from pathlib import Path

import pytest

from scripts.house import mutants, sizes, traces

pytestmark = pytest.mark.core

CODE = '''"""Docstring of a module."""

import math  # a comment


class A:
    """Docstring of a class."""

    field: int = 1
    """Docstring of a field,
    on two lines."""


def f(x):
    "a" "b"
    return f"{x + 1} {math.pi:.2f}" + "text"
'''
TOKENS = [
    *("import", "math"),
    *("class", "A", ":", "field", ":", "int", "=", "1"),
    *("def", "f", "(", "x", ")", ":", "return", "an f-string", "+", "'text'"),
]


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_tokens_are_those_counted_by_hand() -> None:
    assert sizes.count_tokens(CODE) == len(TOKENS)


def test_control_a_token_more_is_counted() -> None:
    assert sizes.count_tokens(CODE + "1\n") == len(TOKENS) + 1


def test_tokens_of_a_folder_do_not_follow_links(tmp_path: Path) -> None:
    write(tmp_path, {"zoo/a.py": "x = 1\n", "mupax/__init__.py": "y = 1 + 2\n"})
    (tmp_path / "mupax" / "zoo").symlink_to(tmp_path / "zoo")
    counts = sizes.tokens_by_folder(tmp_path)
    assert (counts["zoo"], counts["mupax"]) == (3, 5)


def test_single_importers(tmp_path: Path) -> None:
    files = {
        "zoo/once.py": "",
        "zoo/twice.py": "",
        "zoo/far.py": "",
        "zoo/one.py": "def f():\n    from mupax.zoo.once import g\nfrom mupax.zoo import twice\n",
        "zoo/two.py": "import mupax.zoo.twice\n",
        "zoo/__init__.py": "from mupax.zoo import once\n",  # a package collects what it exports
        "train/user.py": "from mupax.zoo import far\n",
    }
    assert sizes.single_importers(write(tmp_path, files)) == {"zoo/once.py": "zoo/one.py"}


def test_help_is_read_by_its_lists() -> None:
    page = (
        "usage: mupax X\n\nrecipes:\n  lm     A model.\n\nTrain:\n  train  a run\n  data   of it\n\n"
        "`mupax` and more.\n  no  x\n"
    )
    assert sizes.listed_commands(page) == ["train", "data"]
    box = "╭─ a ─╮\n│ -h, --help     │\n│ --b.c N, --c N │\n│      see --d   │\n│      --f.* change it │\n│ --help │\n╰────╯\n  --e  plain\n"
    assert sizes.listed_flags(box) == {"--b.c", "--e"}


RUN = """
import threading, time
from pathlib import Path

def early():
    pass

def worker(path):
    def write():
        Path(path).write_text("row")
    time.sleep(0.05)
    write()

def inner():
    return [len(str(i)) for i in range(2)]

def window(path, begun, done):
    class Local:
        pass
    begun.set()
    done.wait()
    threading.Thread(target=worker, args=(path,)).start()
    return inner()

def late():
    pass

def run(path, begun, done):
    early()
    late()
    window(path, begun, done)
"""


def traced(root: Path, part: traces.Part) -> traces.Recorder:
    """Trace the tree's `run`, while an older thread runs `late` inside of its window."""
    spec = importlib.util.spec_from_file_location("traced_tree", root / "train" / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    recorder = traces.Recorder(part, root, root)
    begun = threading.Event()
    done = threading.Event()
    elder = threading.Thread(target=lambda: (begun.wait(), module.late(), done.set()))
    profile = sys.getprofile()
    threading.setprofile(recorder)
    sys.setprofile(recorder)
    try:
        elder.start()
        module.run(root / "row", begun, done)
    finally:
        sys.setprofile(profile)
        threading.setprofile(None)
    elder.join()
    return recorder


EARLY = traces.Function("train/run.py", "early")
WINDOW = traces.Function("train/run.py", "window")
IN_WINDOW = {"window", "inner", "worker", "worker.<locals>.write"}
"""Not `late`, which runs before the window and meanwhile on another thread; no class body and no comprehension."""


@pytest.mark.parametrize(
    ("opens", "names"),
    [((WINDOW,), IN_WINDOW), ((EARLY, WINDOW), {"early", *IN_WINDOW})],
    ids=["one", "two"],
)
def test_a_trace_has_the_functions_of_its_windows_on_all_threads(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    opens: tuple[traces.Function, ...],
    names: set[str],
) -> None:
    monkeypatch.setattr(traces, "QUIET_S", 0.2)
    part = traces.Part(opens, ends=WINDOW, on_disk="r?w")
    recorder = traced(write(tmp_path, {"train/run.py": RUN}), part)
    assert {function.name for function in recorder.functions} == names
    count = len(names)
    assert recorder.result() == {"files": 1, "functions": count, "by file": {"train/run.py": count}}


def test_a_trace_can_leave_out_what_is_called_elsewhere(tmp_path: Path) -> None:
    late = traces.Function("train/run.py", "late")
    root = write(tmp_path, {"train/run.py": RUN})
    with pytest.raises(RuntimeError, match=r"late of train/run\.py never ran"):
        traced(root, traces.Part((late,), within=traces.Function("train/run.py", "inner"))).result()
    assert (
        traced(root, traces.Part((late,), within=traces.Function("train/run.py", "run"))).result()[
            "functions"
        ]
        == 1
    )


def test_a_trace_whose_function_has_moved_says_so(tmp_path: Path) -> None:
    moved = traces.Function("train/other.py", "window")
    recorder = traced(write(tmp_path, {"train/run.py": RUN}), traces.Part((moved,)))
    with pytest.raises(RuntimeError, match=r"window of train/other\.py never ran.* PARTS"):
        recorder.result()


@pytest.mark.parametrize("part", traces.PARTS.values(), ids=list(traces.PARTS))
def test_parts_name_functions_of_this_tree(part: traces.Part) -> None:
    for function in {*part.opens, part.within, part.ends} - {None}:
        assert function is not None
        tree = ast.parse((sizes.ROOT / function.path).read_text())
        for name in function.name.split("."):
            bodies = [node for node in tree.body if getattr(node, "name", "") == name]
            assert bodies, f"{function.path} has no {function.name}"
            tree = bodies[0]


SMALL = '''"""A module."""

LIMIT: int = 3


def below(x: int) -> bool:
    """Compare."""
    return x < LIMIT


def unseen(x: int) -> int:
    return x + 1
'''
TEST = """
from presets.small import below

def test_below():
    assert below(1) and not below(7)
"""


def small_tree(root: Path) -> Path:
    files = {
        "presets/__init__.py": "",
        "mupax/__init__.py": "",
        "presets/small.py": SMALL,
        "tests/presets/test_small.py": TEST,
    }
    marks = "\n".join(
        f"    {name}: x" for name in ("alone", "parity", "tpu", "schedulers", "release")
    )
    return write(root, {**files, "pytest.ini": f"[pytest]\npythonpath = .\nmarkers =\n{marks}\n"})


def test_mutants_are_all_changes_of_the_tree() -> None:
    lines = [
        f"{m.kind} {m.function}: {m.before} -> {m.after}"
        for m in mutants.mutants_of("presets/small.py", SMALL)
    ]
    assert lines == [
        "constant : 3 -> 4",
        "return below: return x < LIMIT -> return None",
        "comparison below: x < LIMIT -> x >= LIMIT",
        "return unseen: return x + 1 -> return None",
        "arithmetic unseen: x + 1 -> x - 1",
        "constant unseen: 1 -> 2",
    ]


@pytest.mark.parametrize(
    "source",
    [
        "def f(é, y):\n    if not (é and\n            y): return 'é' * 2\n",
        "@d\ndef f():\n    @e\n    def g(): x = 1; return x\n    return g\n",
        "def f(x):\n    match x:\n        case 1: return -x ** 2\n",
        "async def f(x=1.5):\n    '''d'''; return [y for y in x if y is not None]\n",
    ],
)
def test_every_mutant_is_the_tree_with_one_change(source: str) -> None:
    places = mutants.mutants_of("a.py", source)
    assert places
    for mutant in places:
        changed = ast.unparse(ast.parse(mutant.apply(source)))
        assert changed != ast.unparse(ast.parse(source))


def test_a_record_has_what_tests_kill_and_goes_on_where_it_stopped(
    tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    root = small_tree(tmp_path / "tree")
    out = tmp_path / "rows.jsonl"
    places = mutants.mutants_of("presets/small.py", SMALL)
    pairs = [(place.name, place) for place in (places[2], places[4], places[0])]
    mutants.measure(out, pairs[:2], root)
    first = out.read_text()
    out.write_text(first + '{"mutant": "cut o')
    mutants.measure(out, pairs, root)
    assert out.read_text().startswith(first)
    rows = mutants.read_rows(out)
    assert [row["outcome"] for row in rows] == ["killed", "survived", "survived"]
    assert rows[0]["failed"] == "tests/presets/test_small.py::test_below"
    assert (root / "presets" / "small.py").read_text() == SMALL
    assert len(capfd.readouterr().out.splitlines()) == 3


def test_a_mutant_is_seen_again_where_its_code_has_moved(tmp_path: Path) -> None:
    place = mutants.mutants_of("presets/small.py", SMALL)[2]
    row = json.loads(json.dumps({"mutant": place.name, **vars(place), "span": None}))
    moved = SMALL.replace("LIMIT", "BOUND").replace('"""A module."""', "A = 1 < 2")
    tree = mutants.Tree(write(tmp_path, {"zoo/new.py": moved}))
    match = tree.find(row)
    assert match is not None
    assert (match.path, match.before) == ("zoo/new.py", "x < BOUND")
    assert mutants.Tree(write(tmp_path / "empty", {"zoo/new.py": "x = 1\n"})).find(row) is None


def test_control_a_short_text_in_a_function_of_that_name_is_no_match(tmp_path: Path) -> None:
    place = mutants.mutants_of("presets/small.py", SMALL)[-1]
    assert (place.function, place.before) == ("unseen", "1")
    row = {"mutant": place.name, **vars(place)}
    renamed = write(tmp_path / "other", {"zoo/new.py": "def unseen(y):\n    print(y[1])\n"})
    unchanged = write(tmp_path / "same", {"zoo/new.py": "def unseen(x):\n    return x + 1\n"})
    assert mutants.Tree(renamed).find(row) is None
    assert mutants.Tree(unchanged).find(row) is not None


def test_records_differ_where_a_mutant_is_no_longer_killed() -> None:
    outcomes = {"a": "killed", "b": "killed", "c": "timeout", "d": "survived"}
    before = [{"mutant": name, "outcome": outcome} for name, outcome in outcomes.items()]
    after = [
        {"mutant": "a", "outcome": "timeout"},
        {"mutant": "b", "outcome": "survived"},
        {"mutant": "c", "outcome": "gone"},
    ]
    lines = mutants.differences(before, after)
    assert [line[-1] for line in lines] == ["b", "c"]


def test_the_choice_of_modules_changes_little_when_a_module_comes(tmp_path: Path) -> None:
    files = {f"zoo/m{i}.py": f"x = {i} + 1\n" for i in range(12)}
    files |= {f"tests/zoo/test_m{i}.py": "" for i in range(11)}
    root = write(tmp_path, files)
    before = mutants.chosen(root, 8)
    assert len({mutant.path for mutant in before}) == 8
    assert before == mutants.chosen(root, 8)
    assert before != mutants.chosen(root, 8, seed=1)
    assert "zoo/m11.py" not in [
        mutant.path for mutant in mutants.chosen(root, 12)
    ]  # it has no tests
    write(root, {"tests/zoo/test_m11.py": ""})
    assert len(set(before) - set(mutants.chosen(root, 8))) <= 1
