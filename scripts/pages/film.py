"""Film of the README: commands recorded in a terminal, as the animated docs/images/tour/film.svg.

    python -m scripts.pages.film

Commands run as they are, in a pseudo-terminal of 80 columns, and their output is not changed. Waits
are cut to half a second, and the run is shown faster than it goes, as its line says. Needs `pyte`,
a terminal in memory (the extra `site`).
"""

from __future__ import annotations

import os
import pty
import select
import shlex
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from fcntl import ioctl
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from scripts import ROOT, harness

OUT = ROOT / "docs" / "images" / "tour" / "film.svg"
COLUMNS = 80
ROWS = 24
COMMANDS = {
    "mupax presets table mup --model gpt2-large --base gpt2": 1,
    "mupax check lm-proxy --preset mup --grow width": 1,
    "mupax train lm-laptop  # ten times as fast as it runs": 10,
}
"""Command to the factor by which it is shown faster than it runs. All run in one empty folder."""
WAIT_S = 0.5
"""Longest wait for output that the film shows."""
READ_S = 3.0
"""Time to read the screen after a command."""
KEY_S = 0.03
"""Time of a typed letter."""
FRAME_S = 0.12
"""Shortest time of a frame; shorter ones are merged with the next."""
CELL = (8.4, 18.0)
"""Width and height of a letter, in pixels."""
COLORS = {
    "default": "#d8dee9",
    "black": "#4c566a",
    "red": "#e06c75",
    "green": "#98c379",
    "brown": "#e5c07b",
    "blue": "#61afef",
    "magenta": "#c678dd",
    "cyan": "#56b6c2",
    "white": "#eceff4",
}
"""Name of a terminal's colour, as pyte has them, to its value."""

Span = tuple[str, str, bool]
"""Text, its colour, and whether it is bold."""
Line = tuple[Span, ...]
"""Spans of one row of the screen."""


class Frame(NamedTuple):
    """Content of the screen, and the time for which it is shown."""

    lines: tuple[Line, ...]
    seconds: float


def recorded(commands: Mapping[str, float], folder: Path) -> list[Frame]:
    """Type and run commands one after the other, and return the frames of their screen.

    Args:
        commands: Command to the factor by which it is shown faster.
    """
    import pyte  # pyright: ignore[reportMissingImports]  (of the extra `site`)

    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    frames: list[Frame] = []
    for command, speed in commands.items():
        stream.feed(b"\x1b[32m$\x1b[0m ")
        for letter in command:
            stream.feed(letter.encode())
            frames.append(Frame(_lines(screen), KEY_S))
        stream.feed(b"\r\n")
        for output, seconds in _output(command, folder):
            if seconds > 0:
                frames.append(Frame(_lines(screen), min(seconds / speed, WAIT_S)))
            stream.feed(output)
        frames.append(Frame(_lines(screen), READ_S))
    return merged(frames)


def _output(command: str, folder: Path) -> Iterator[tuple[bytes, float]]:
    """Run a command in a terminal, and yield pieces of its output with the seconds before each.

    Raises:
        SystemExit: The command failed.
    """
    master, slave = pty.openpty()
    ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    names = {
        "TERM": "xterm-256color",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    # Rich asks these variables before it asks the terminal.
    size = {"COLUMNS": str(COLUMNS), "LINES": str(ROWS), "PYTHONPATH": str(ROOT)}
    running = subprocess.Popen(
        shlex.split(command, comments=True),
        cwd=folder,
        env=os.environ | names | size,
        stdin=slave,
        stdout=slave,
        stderr=slave,
    )
    # Reading notices the command's end only if nobody else holds the terminal's other end.
    os.close(slave)
    last = time.monotonic()
    with suppress(OSError):  # the terminal's other end is closed
        # After the command's end, what it has written is still read.
        while running.poll() is None or select.select([master], [], [], 0)[0]:
            if select.select([master], [], [], FRAME_S)[0]:
                read_at = time.monotonic()
                yield os.read(master, 1 << 16), read_at - last
                last = read_at
    os.close(master)
    code = running.wait()
    if code:
        raise SystemExit(f"{command} ended with {code}")


def _lines(screen: Any) -> tuple[Line, ...]:
    """Return the rows of a pyte screen."""
    lines = []
    for row in range(ROWS):
        cells = [screen.buffer[row][column] for column in range(COLUMNS)]
        lines.append(_line(cells))
    return tuple(lines)


def _line(cells: Sequence[Any]) -> Line:
    """Join neighbouring cells of one colour and weight to spans, without blanks at the end."""
    spans: list[Span] = []
    for cell in cells:
        # pyte gives one of 256 colours as six hexadecimal digits.
        unnamed = f"#{cell.fg}" if len(cell.fg) == 6 else COLORS["default"]
        color = COLORS.get(cell.fg.removeprefix("bright"), unnamed)
        if spans and spans[-1][1:] == (color, cell.bold):
            spans[-1] = (spans[-1][0] + cell.data, color, cell.bold)
        else:
            spans.append((cell.data, color, cell.bold))
    while spans and not spans[-1][0].strip():
        spans.pop()
    if spans:
        text, color, bold = spans[-1]
        spans[-1] = (text.rstrip(), color, bold)
    return tuple(spans)


def merged(frames: Sequence[Frame]) -> list[Frame]:
    """Merge frames with equal content, and each frame shorter than `FRAME_S` with the next one."""
    shown: list[Frame] = []
    for frame in frames:
        if shown and (shown[-1].lines == frame.lines or shown[-1].seconds < FRAME_S):
            shown[-1] = Frame(frame.lines, shown[-1].seconds + frame.seconds)
        else:
            shown.append(frame)
    return shown


def svg(frames: Sequence[Frame]) -> str:
    """Return the film as an animated SVG.

    The frames stand below one another in a column that moves behind a window. A line of the screen
    that several frames share is written once.
    """
    width = COLUMNS * CELL[0] + 24
    height = ROWS * CELL[1] + 24
    names = _line_names(frames)
    texts = []
    for line, name in names.items():
        spans = "".join(_span(span) for span in line)
        texts.append(f'<text id="{name}">{spans}</text>')

    total_s = sum(frame.seconds for frame in frames)
    start_s = 0.0
    steps = []
    uses = []
    for index, frame in enumerate(frames):
        top = index * ROWS * CELL[1]
        # `-top` would be -0 in the first frame.
        steps.append(f"{100 * start_s / total_s:.3f}%{{transform:translateY({0 - top:g}px)}}")
        start_s += frame.seconds
        for row, line in enumerate(frame.lines):
            if line:
                y = top + (row + 1) * CELL[1] - 5
                uses.append(f'<use href="#{names[line]}" y="{y:g}"/>')

    style = (
        "text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;"
        f"white-space:pre;fill:{COLORS['default']}}}.b{{font-weight:bold}}"
        f"#film{{animation:film {total_s:.2f}s steps(1,end) infinite}}"
        f"@keyframes film{{{''.join(steps)}}}"
    )
    title = escape("; ".join(COMMANDS))
    size = f'width="{width:g}" height="{height:g}"'
    inner_size = f'width="{width - 24:g}" height="{height - 24:g}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" {size}>'
        f"<title>{title}</title><style>{style}</style><defs>{''.join(texts)}</defs>"
        f'<rect width="100%" height="100%" rx="8" fill="#282c34"/>'
        f'<svg x="12" y="12" {inner_size}><g id="film">{"".join(uses)}</g></svg></svg>\n'
    )


def _line_names(frames: Sequence[Frame]) -> dict[Line, str]:
    """Return each distinct line that is not empty, with its id in the SVG."""
    names: dict[Line, str] = {}
    for frame in frames:
        for line in frame.lines:
            if line and line not in names:
                names[line] = f"l{len(names)}"
    return names


def _span(span: Span) -> str:
    """Return the SVG of a span."""
    text, color, bold = span
    fill = "" if color == COLORS["default"] else f' style="fill:{color}"'
    weight = ' class="b"' if bold else ""
    return f"<tspan{fill}{weight}>{escape(text)}</tspan>"


def main() -> int:
    """Record the commands, write the film and return 0."""
    with tempfile.TemporaryDirectory() as folder:
        frames = recorded(COMMANDS, Path(folder))
    OUT.write_text(svg(frames))
    seconds = sum(frame.seconds for frame in frames)
    kib = OUT.stat().st_size // 1024
    print(f"wrote docs/images/tour/{OUT.name}: {len(frames)} frames, {seconds:.0f} s, {kib} KiB")
    return 0


if __name__ == "__main__":
    harness.refuse_words()
    raise SystemExit(main())
