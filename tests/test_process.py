"""Signals that end a command, and streams that are closed, full or unread."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from mupax import process
from mupax.__main__ import main
from mupax.train.data import cache

pytestmark = pytest.mark.core

WAITS = """
import signal, sys, tempfile, time, types, weakref
from mupax import process, terminal
process.ONE_S, process._REACH_S, process._CLEAN_UP_S = 0.1, 0.4, 0.6

def wait(seconds):
    print("ready", flush=True)
    time.sleep(seconds)

library = types.ModuleType("jax")  # no exception gets through its frames
exec('''
import time
def call(seconds):
    print("ready", flush=True)
    until = time.monotonic() + seconds
    try:
        while time.monotonic() < until:
            time.sleep(0.01)
    except KeyboardInterrupt:
        print("raised inside")
''', library.__dict__)

class Collected:
    def __del__(self):
        wait(0.2)

class Watched:
    pass

def callback(reference):  # Python drops an exception that leaves it
    wait(0.2)

def command(argv):
    try:
        if "collected" in argv:
            Collected()
        elif "callback" in argv:
            watched = Watched()
            reference = weakref.ref(watched, callback)
            del watched
        elif "swallows" in argv:
            try:
                wait(60)
            except KeyboardInterrupt:
                pass
        elif "fails" in argv:
            try:
                wait(60)
            except KeyboardInterrupt:
                raise ValueError("follows from the signal")
        elif "folder" in argv:
            folder = tempfile.TemporaryDirectory(dir=".")
            with folder:
                library.call(60)
        elif "library" in argv:
            library.call(0.2 if "short" in argv else 60)
        else:
            wait(1 if "ignored" in argv else 60)
        time.sleep(0 if "ignored" in argv else 60)
        return 0
    finally:
        print("left in order", flush=True)
        if "slowly" in argv:
            time.sleep(60)

sys.argv[1:] = sys.argv[1].split()
if "ignored" in sys.argv:  # as nohup and a background job have it from their start
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.exit(terminal.entry_point(command)())
"""


@pytest.mark.parametrize(
    ("how", "signals", "code", "out"),
    [
        ("", ["SIGINT"], 130, "left in order"),
        ("", ["SIGHUP"], 129, "left in order"),
        ("library short", ["SIGINT"], 130, "left in order"),
        ("library", ["SIGINT"], 130, ""),
        ("library", ["SIGTERM"], 143, ""),
        ("folder", ["SIGINT"], 130, ""),
        ("collected", ["SIGINT"], 130, "left in order"),
        ("callback", ["SIGINT"], 130, "left in order"),
        ("swallows", ["SIGINT"], 130, ""),
        ("fails", ["SIGINT"], 130, "left in order"),
        ("slowly", ["SIGINT"], 130, "left in order"),
        ("slowly", ["SIGHUP", "SIGINT"], 129, "left in order"),
        ("ignored", ["SIGHUP"], 0, "left in order"),
        ("ignored", ["SIGINT"], 0, "left in order"),
    ],
)
def test_a_signal_ends_a_command_wherever_it_is(
    how: str, signals: list[str], code: int, out: str, tmp_path: Path
) -> None:
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", WAITS, how], cwd=tmp_path, **streams) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        for name in signals:
            child.send_signal(signal.Signals[name])
            time.sleep(0.2)
        printed, errors = child.communicate(timeout=30)
    assert (child.returncode, printed.strip(), errors) == (code, out, "")
    assert not list(tmp_path.iterdir())


def test_a_second_ctrl_c_ends_a_command_at_once() -> None:
    program = WAITS.replace("0.1, 0.4, 0.6", "0.1, 60, 60")
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", program, "slowly"], **streams) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGINT)
        assert child.stdout.readline() == "left in order\n"
        time.sleep(0.2)
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=30)
    assert (child.returncode, errors) == (130, "")


def test_a_command_line_of_python_leaves_signals_alone() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    assert main(["train", "lm-tiny", "--print-config"]) == 0
    assert [
        signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    ] == before


# Streams

PRINTS = """
import os, sys
from mupax import terminal
from mupax import MupaxError
def command(argv):
    print("a line")
    if "bad" in argv:
        raise MupaxError("write 8 instead")
    with open("file", "wb") as file:
        assert file.fileno() > 2, "a library that prints would write into it"
    return 0
sys.exit(terminal.entry_point(command)())
"""


@pytest.mark.parametrize(
    ("redirection", "word", "code", "lines"),
    [
        (">&-", "", 0, 0),
        ("<&- >&- 2>&-", "", 0, 0),
        (">&-", "bad", 2, 1),
        ("2>&-", "bad", 2, 0),
        (">/dev/full", "", 1, 1),
        (">/dev/full 2>/dev/full", "", 1, 0),
        (">/dev/full", "bad", 2, 2),
        ("2>/dev/full", "bad", 2, 0),
        ("| true", "", 141, 0),
    ],
)
def test_streams_that_take_nothing_are_one_line_at_most(
    redirection: str, word: str, code: int, lines: int, tmp_path: Path
) -> None:
    if "/dev/full" in redirection and not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    program = tmp_path / "prints.py"
    program.write_text(PRINTS)
    command = f"set -o pipefail; '{sys.executable}' prints.py {word} {redirection}"
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    environment.pop("PYTHONUNBUFFERED", None)
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == code, done.stderr
    assert len(done.stderr.splitlines()) == lines
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


# Variables of JAX and XLA


@pytest.mark.parametrize(
    "setting",
    [
        "JAX_DISABLE_JIT=1",
        "JAX_DISABLE_JIT=True",
        "JAX_NUMPY_RANK_PROMOTION=raise",
        "JAX_NUMPY_DTYPE_PROMOTION=strict",
        "JAX_TRANSFER_GUARD=disallow",
        "JAX_DEBUG_KEY_REUSE=1",
    ],
)
def test_variables_with_which_nothing_works_are_refused(
    setting: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    name, _, value = setting.partition("=")
    monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    for words in (["train", "lm-tiny"], ["check", "lm-proxy"]):
        assert main(words) == 2
        errors = capsys.readouterr().err
        assert name in errors
        assert len(errors.splitlines()) == 1
    assert main(["train", "lm-tiny", "--print-config"]) == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "setting", ["JAX_DISABLE_JIT=0", "JAX_NUMPY_RANK_PROMOTION=warn", "JAX_DEBUG_NANS=1"]
)
def test_variables_with_which_mupax_works_are_not_refused(setting: str) -> None:
    name, _, value = setting.partition("=")
    process.check(cache.remembered, {name: value})


def process_under(
    setting: str, words: Sequence[str], folder: Path
) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own with one variable set, and its cache in a folder."""
    name, _, value = setting.partition("=")
    root = Path(__file__).resolve().parent.parent
    environment = {**os.environ, "MUPAX_DATA": str(folder / "data"), "PYTHONPATH": str(root)}
    for usual in ("JAX_PLATFORMS", "XLA_FLAGS"):
        environment.pop(usual, None)
    environment[name] = value
    command = [sys.executable, "-m", "mupax", *words]
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    "setting",
    [
        "JAX_PLATFORMS=cuda",
        "JAX_PLATFORMS=nonsense",
        "JAX_ENABLE_X64=maybe",
        "XLA_FLAGS=--xla_nonsense=1",
    ],
)
def test_what_jax_refuses_is_one_line(setting: str, tmp_path: Path) -> None:
    name, _, value = setting.partition("=")
    done = process_under(setting, ["train", "vit-digits", "--dry-run"], tmp_path)
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert name in done.stderr
    assert value in done.stderr


def test_flags_of_xla_are_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUPAX_DATA", str(tmp_path))
    monkeypatch.delitem(sys.modules, "jaxlib", raising=False)
    flags = {**os.environ, "XLA_FLAGS": "--xla_cpu_enable_fast_math=false"}
    process.check(cache.remembered, flags)
    assert len(list(tmp_path.rglob("xla-flags-*"))) == 1
    monkeypatch.setattr(process, "_try_flags", pytest.fail)
    process.check(cache.remembered, flags)
    process.check(cache.remembered, {"XLA_FLAGS": " --xla_force_host_platform_device_count=8 "})


def test_an_error_under_a_debugging_variable_of_jax_names_the_variable() -> None:
    import jax
    import jax.numpy as jnp

    with jax.debug_nans(True), pytest.raises(FloatingPointError) as raised:
        jnp.log(jnp.float32(-1.0))
    assert process.explained(raised.value, {}) is None
    text = process.explained(raised.value, {"JAX_DEBUG_NANS": "1"})
    assert text is not None
    assert "JAX_DEBUG_NANS=1" in text
    assert process.explained(ValueError("of ours"), {"JAX_DEBUG_NANS": "1"}) is None


def test_memory_of_a_decoder_takes_positions_of_any_integer_type() -> None:
    import jax
    import jax.numpy as jnp

    from mupax.zoo.layers.cache import Cache

    with jax.enable_x64(True):
        empty = jnp.zeros((2, 1, 1, 4, 2), jnp.float32)
        cache = Cache(empty, empty, jnp.int32(1))
        filled = cache.put(1, jnp.ones((1, 1, 1, 2)), jnp.ones((1, 1, 1, 2)))
    assert filled.keys[1, 0, 0, :, 0].tolist() == [0, 1, 0, 0]
