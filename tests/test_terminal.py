"""What commands print at 80 columns, in a pipe, and into a pipe that nobody reads."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gzip
import io
import itertools
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
import tokenize
from pathlib import Path
from typing import Any

import pytest

from mupax import disk, memory, terminal
from mupax.__main__ import main
from mupax.train.parallel import processes

pytestmark = pytest.mark.core

LISTS = [
    "presets",
    "presets tuned",
    "presets table mup --model gpt2 --base lm-proxy",
    "presets table completep --model gpt2 --rules",
    "presets table mup --model gpt2 --joint completed-muon --optimizer muon --batch 8:64",
    "presets limits mup",
    "presets limits mup --optimizer muon --joint completed-muon",
    "presets limits mup --experts",
    "presets joint --batch 8:64 --tokens 1:8",
    "presets constants mup",
    "presets constants completep",
    "presets desiderata mup",
    "presets desiderata mup --encoder",
    "presets compare sp mup mup-half depth-mup completep ntk",
    "presets compare sp mup completep --summary",
    "models",
    "models describe gpt2",
    "--help",
    "train --help",
    "train lm-tiny --dry-run --preset depth-mup --mesh.fsdp 2 --mesh.sequence 2",
]


def printed(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(words.split()) == 0
    plain = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    return re.sub(
        r"about(\s+)\S+(\s+)s:", r"about\1T\2s:", plain
    )  # the time of a save is another each time


@pytest.mark.parametrize("words", LISTS)
def test_no_word_breaks_at_80_columns_and_no_line_in_a_pipe(
    words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # What others leave of the machine's memory is another amount each time.
    monkeypatch.setattr(memory, "room", lambda: memory.Room(8 * 2**30, "this machine"))
    monkeypatch.setenv("COLUMNS", "80")
    piped = printed(words, capsys)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    narrow = printed(words, capsys)
    assert [line for line in narrow.splitlines() if len(line) > 80] == []
    assert set(piped.split()) == set(narrow.split()) - {"\\"}  # after which a long command goes on
    assert "…" not in piped
    monkeypatch.setenv("COLUMNS", "4000")
    assert [line.rstrip() for line in printed(words, capsys).splitlines()] == [
        line.rstrip() for line in piped.splitlines()
    ]


@pytest.mark.parametrize(
    "words", ["tune --help", "predict --help", "presets desiderata --help", "export --help"]
)
def test_help_breaks_no_word_and_is_as_wide_as_the_terminal(
    words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", ["/env/bin/mupax"])
    piped = printed(words, capsys)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    narrow = printed(words, capsys)
    boxes = [line for line in narrow.splitlines() if line.startswith(("│", "|"))]
    assert boxes
    assert {len(line) for line in boxes} == {80}
    assert [line for line in narrow.splitlines() if len(line) > 80] == []
    assert set(narrow.split()) == set(piped.split())
    assert "python -m" not in narrow


def test_messages_break_between_words_and_commands_after_a_backslash(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    long = "mupax train lm-tiny --vary 'preset.gamma0=0.5, 1, 2, 4' --steps 20 --out " + "x" * 30
    assert terminal.command(long) == f"  {long}"  # the control: in a pipe
    assert main(["train", "lm-tini"]) == 2
    piped = capsys.readouterr().err
    assert len(piped.splitlines()) == 1
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    broken = terminal.command(long).splitlines()
    assert broken == [f"  {long.partition(' --out')[0]} \\", "    --out " + "x" * 30]
    assert shlex.split(" ".join(line.rstrip("\\") for line in broken)) == shlex.split(long)
    assert main(["train", "lm-tini"]) == 2
    narrow = capsys.readouterr().err
    assert max(map(len, narrow.splitlines())) <= 80
    assert narrow.split() == piped.split()
    monkeypatch.setenv("COLUMNS", "40")
    terminal.say("  write `mupax train lm-tiny --resume now` to go on from there")
    assert capsys.readouterr().out.splitlines() == [
        "  write",
        "  `mupax train lm-tiny --resume now` to",
        "  go on from there",
    ]


def test_notes_have_the_width_of_their_own_terminal() -> None:
    code = "from mupax import terminal; terminal.note('word ' * 30)"
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    reader, terminal_side = pty.openpty()
    rows_and_columns = struct.pack("HHHH", 24, 44, 0, 0)
    fcntl.ioctl(terminal_side, termios.TIOCSWINSZ, rows_and_columns)
    # Standard output is a file, as in `mupax presets table > table.txt`.
    subprocess.run(
        [sys.executable, "-c", code],
        stdout=subprocess.DEVNULL,
        stderr=terminal_side,
        env=environment,
        check=True,
    )
    os.close(terminal_side)
    lines = os.read(reader, 4096).decode().splitlines()
    os.close(reader)
    assert [len(line) for line in lines] == [44, 44, 44, 14]


def test_prose_of_the_last_column_wraps_beside_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [("name", "count", "", "why"), ("a" * 20, "3", "", "word " * 20)]
    assert terminal.filled(rows) == [["name", "count", "why"], ["a" * 20, "3", "word " * 20]]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    wide = terminal.table(terminal.filled(rows)).splitlines()
    assert wide[0].split() == ["name", "count", "why"]
    assert max(map(len, wide)) <= 80
    monkeypatch.setenv("COLUMNS", "60")
    assert terminal.table(terminal.filled(rows)).splitlines()[0].split() == ["name", "count"]


@pytest.mark.parametrize("words", ["presets", "presets --help", "models", "train", "train --help"])
def test_a_pipe_that_nobody_reads_is_no_error(words: str) -> None:
    assert unread("-m", "mupax", *words.split()) == (141, "")


def test_names_between_colons_are_no_emoji(capsys: pytest.CaptureFixture[str]) -> None:
    line = "images:fire: 20 training examples of :smile:"
    terminal.console().print(line, markup=False)
    terminal.rich_console(width=80).rule(line)
    terminal.rich_console().print(line, markup=False)
    terminal.rich_console(stderr=True).print(line, style="red", markup=False)
    out, err = capsys.readouterr()
    assert out.count("images:fire: 20") == 3
    assert "images:fire: 20" in err
    root = Path(terminal.__file__).parent.parent
    rooms = ("presets", "zoo", "train", "scripts", "mupax", "examples")
    files = itertools.chain.from_iterable((root / room).rglob("*.py") for room in rooms)
    named = [path for path in files if "Console(" in path.read_text()]
    makes_one = {
        path.relative_to(root).as_posix()
        for path in named
        if re.search(r"\bConsole \(", _code(path))
    }
    assert makes_one == {"mupax/terminal.py"}


def _code(path: Path) -> str:
    """Source of a file without its strings and comments."""
    with path.open("rb") as file:
        tokens = [
            token
            for token in tokenize.tokenize(file.readline)
            if token.type not in (tokenize.STRING, tokenize.COMMENT)
        ]
    return " ".join(token.string for token in tokens)


def test_rich_in_a_pipe_that_nobody_reads_is_no_error() -> None:
    program = """
import sys
from mupax import terminal
sys.exit(terminal.entry_point(lambda argv: terminal.console().print("a table") or 0)())
"""
    assert unread("-c", program) == (141, "")


def unread(*words: str) -> tuple[int, str]:
    """Exit code and errors of a Python process whose standard output is a pipe without a reader."""
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, *words], stdout=write, stderr=subprocess.PIPE, text=True, timeout=60
        )
    finally:
        os.close(write)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "program",
    ["/env/bin/mupax", "/env/site-packages/mupax/__main__.py", "/checkout/train/__main__.py"],
)
def test_the_installed_command_names_itself(
    program: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["train", "lm-tiny", "--stpes", "3"]
    monkeypatch.setattr(sys, "argv", [program, *words])
    assert main(words) == 2
    assert "`mupax train lm-tiny --help all` lists all flags" in capsys.readouterr().err
    assert main(["train"]) == 0
    assert capsys.readouterr().out.startswith("usage: mupax train RECIPE")
    assert main(["data"]) == 0
    assert capsys.readouterr().out.startswith("usage: mupax data COMMAND")
    assert main(["data", "prepare", "shapes"]) == 0
    assert "nothing to prepare" in capsys.readouterr().out
    assert main(["data", "tokenizer", "--help"]) == 0
    assert "usage: mupax data tokenizer" in re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert main(["train", "lm-tiny", "--help"]) == 0
    assert "usage: mupax train lm-tiny" in re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("text", "number"), [("1 class", 1), ("0 classes", 0), ("2,000 classes", 2000)]
)
def test_a_number_has_its_noun(text: str, number: int) -> None:
    assert terminal.counted(number, "class", ",") == text


def test_a_command_to_type_has_a_mupax_that_the_shell_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["mupax", "generate", "runs/my run"]
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()

    def script(path: Path) -> None:
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)

    script(folder / "python")
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setattr(sys, "argv", ["train"])
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.chdir(tmp_path)
    assert (
        terminal.typed(*words) == ".venv/bin/python -m mupax generate 'runs/my run'"
    )  # nothing is installed
    monkeypatch.setenv("PATH", str(folder))
    assert terminal.typed(*words) == "python -m mupax generate 'runs/my run'"
    script(folder / "mupax")
    assert terminal.typed(*words) == "mupax generate 'runs/my run'"
    monkeypatch.setenv("PATH", "/nowhere")
    assert terminal.typed(*words) == ".venv/bin/mupax generate 'runs/my run'"
    assert terminal.command("mupax train lm-tiny") == "  .venv/bin/mupax train lm-tiny"
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert terminal.typed(*words) == f"{folder}/mupax generate 'runs/my run'"
    linked = tmp_path / "local" / "mupax"  # as pipx and uv install it
    linked.parent.mkdir()
    linked.symlink_to(folder / "mupax")
    monkeypatch.setenv("PATH", str(linked.parent))
    monkeypatch.setattr(sys, "argv", [str(linked), "train"])
    assert terminal.typed(*words) == "mupax generate 'runs/my run'"


@pytest.mark.parametrize("path", ["my runs", "runs[1]", "$HOME/run", "it's", "a;b", "*", "a --b"])
def test_a_printed_command_can_be_copied_whatever_the_path(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [
        "mupax",
        "train",
        "lm-tiny",
        "--workdir",
        path,
        "--steps",
        "20",
        "--data.name",
        f"text:{path}",
    ]
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "30")
    lines = terminal.command(shlex.join(words)).splitlines()
    assert len(lines) > 2
    assert (
        shlex.split(" ".join(line.removesuffix(" \\") for line in lines))[-len(words) + 1 :]
        == words[1:]
    )


def test_a_stream_lasts_whatever_becomes_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    narrow = io.TextIOWrapper(io.BytesIO(), "ascii")
    with contextlib.redirect_stdout(narrow), processes.lasting():
        print("✓ better", flush=True)
    assert narrow.buffer.getvalue() == b"? better\n"  # type: ignore[attr-defined]
    closed = io.StringIO()
    closed.close()
    with contextlib.redirect_stdout(closed), processes.lasting():
        print("lost")
        print("lost too", flush=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert (
        err
        == "standard output takes nothing any more (I/O operation on closed file); the run goes on without it\n"
    )


def test_a_name_that_the_output_cannot_encode_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii", errors="strict"))

    @terminal.entry_point
    def main(argv: list[str]) -> int:
        print(argv[0])
        return 0

    assert main([os.fsdecode("caf\u00e9".encode() + b"\xff")]) == 0
    assert written.getvalue() == b"caf\\xe9\\udcff\n"


@pytest.mark.parametrize(
    ("code", "exit_code", "error"),
    [
        ("no license\nfor this", 1, "no license\nfor this\n"),
        (None, 0, ""),
        (7, 7, ""),
        (False, 0, ""),
    ],
)
def test_the_text_of_sys_exit_is_printed(
    code: str | int | None, exit_code: int, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main = terminal.entry_point(lambda argv: sys.exit(code))
    assert main([]) == exit_code
    assert capsys.readouterr().err == error


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_full_disk_names_the_file_and_what_to_do(
    is_whole: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The system's error of writing has no file name."""
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")

    @terminal.entry_point
    def main(argv: list[str]) -> int:
        if is_whole:
            disk.write_whole(full, "text")
        full.write_text("text")
        return 0

    assert main([]) == 1
    place = "/dev/full cannot be written" if is_whole else "/dev/full"
    advice = "make room, then write the same command again"
    assert capsys.readouterr().err == f"error: {place}: No space left on device; {advice}\n"


class Unready:
    """Value of a function that fails when it is looked at."""

    @property
    def name(self) -> str:
        raise RuntimeError("not ready")


@pytest.mark.parametrize("way", ["gzip", "detached", "unready"])
def test_a_full_disk_is_one_line_whatever_the_functions_hold(
    way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = contextlib.ExitStack()

    @terminal.entry_point
    def main(argv: list[str]) -> int:
        held: Any = Unready()
        if way == "gzip":
            held = files.enter_context(gzip.GzipFile(tmp_path / "file.gz", "wb"))
        elif way == "detached":
            held = io.TextIOWrapper(files.enter_context((tmp_path / "file").open("wb")))
            held.detach()
        assert held is not None
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with files:
        assert main([]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("No space left on device; make room, then write the same command again")
