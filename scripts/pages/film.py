"""The README's film: commands recorded in a terminal of 80 columns, as an animated SVG (docs/images/tour/film.svg).

    python -m scripts.pages.film

Commands run as they are, in a pseudo-terminal; nothing that they print is changed. Waits are cut to half a second, and the run is shown
faster than it goes, which its line says. Needs `pyte`, a terminal in memory (the extra `site`).
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

from scripts import ROOT

OUT = ROOT / "docs" / "images" / "tour" / "film.svg"
COLUMNS, ROWS = 80, 24
COMMANDS = {
    "mupax presets table mup --model gpt2-large --base gpt2": 1,
    "mupax check lm-proxy --preset mup --grow width": 1,
    "mupax train lm-laptop  # ten times as fast as it runs": 10,
}
"""What is typed, in an empty folder, and how many times faster than it runs it is shown."""
WAIT_S, READ_S, KEY_S = 0.5, 3.0, 0.03
"""Longest wait for output, time to read what a command left, time per typed letter."""
FRAME_S = 0.12
"""No two frames are nearer: what a terminal draws in between nobody sees."""
CELL = (8.4, 18.0)
"""Width and height of a letter, in pixels."""
COLORS = {
    "default": "#d8dee9", "black": "#4c566a", "red": "#e06c75", "green": "#98c379", "brown": "#e5c07b", "blue": "#61afef",
    "magenta": "#c678dd", "cyan": "#56b6c2", "white": "#eceff4",
}  # fmt: skip
"""A terminal's colours, as pyte names them."""

Span = tuple[str, str, bool]
"""A text, its colour, and whether it is bold."""
Line = tuple[Span, ...]


class Frame(NamedTuple):
    """What the screen shows, and for how long."""

    lines: tuple[Line, ...]
    seconds: float


def recorded(commands: Mapping[str, float], folder: Path) -> list[Frame]:
    """The screen's frames while commands are typed and run.

    Args:
        commands: in order, on one screen, and how much faster each is shown.
        folder: where they run.
    """
    import pyte  # pyright: ignore[reportMissingImports]  (of the extra `site`)

    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    frames: list[Frame] = []
    for command, faster in commands.items():
        stream.feed(b"\x1b[32m$\x1b[0m ")
        for letter in command:
            stream.feed(letter.encode())
            frames.append(Frame(_lines(screen), KEY_S))
        stream.feed(b"\r\n")
        for output, seconds in _output(command, folder):
            if seconds > 0:
                frames.append(Frame(_lines(screen), min(seconds / faster, WAIT_S)))
            stream.feed(output)
        frames.append(Frame(_lines(screen), READ_S))
    return merged(frames)


def _output(command: str, folder: Path) -> Iterator[tuple[bytes, float]]:
    """Pieces of a command's output in a terminal, and the seconds before each."""
    master, slave = pty.openpty()
    ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    names = {
        "TERM": "xterm-256color",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    size = {"COLUMNS": str(COLUMNS), "LINES": str(ROWS), "PYTHONPATH": str(ROOT)}
    running = subprocess.Popen(
        shlex.split(command, comments=True),
        cwd=folder,
        env=os.environ | names | size,
        stdin=slave,
        stdout=slave,
        stderr=slave,
    )
    os.close(slave)
    last = time.monotonic()
    with suppress(OSError):  # the terminal's other end is closed
        while running.poll() is None or select.select([master], [], [], 0)[0]:
            if select.select([master], [], [], FRAME_S)[0]:
                now = time.monotonic()
                yield os.read(master, 1 << 16), now - last
                last = now
    os.close(master)
    if code := running.wait():
        raise SystemExit(f"{command} ended with {code}")


def _lines(screen: Any) -> tuple[Line, ...]:
    return tuple(
        _line([screen.buffer[row][column] for column in range(COLUMNS)]) for row in range(ROWS)
    )


def _line(cells: Sequence[Any]) -> Line:
    """Neighbours of one look as one span, without what is blank at the end."""
    spans: list[Span] = []
    for cell in cells:
        color = COLORS.get(
            cell.fg.removeprefix("bright"),
            f"#{cell.fg}" if len(cell.fg) == 6 else COLORS["default"],
        )
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
    """Frames as a viewer sees them: those that show the same are one, and so are those nearer than FRAME_S."""
    shown: list[Frame] = []
    for frame in frames:
        if shown and (shown[-1].lines == frame.lines or shown[-1].seconds < FRAME_S):
            shown[-1] = Frame(frame.lines, shown[-1].seconds + frame.seconds)
        else:
            shown.append(frame)
    return shown


def svg(frames: Sequence[Frame]) -> str:
    """The film: frames below one another in a column that is moved behind a window, each line that is alike kept once."""
    width, height = COLUMNS * CELL[0] + 24, ROWS * CELL[1] + 24
    lines = {
        line: f"l{index}"
        for index, line in enumerate(dict.fromkeys(x for f in frames for x in f.lines if x))
    }
    defs = [f'<text id="{name}">{"".join(map(_span, line))}</text>' for line, name in lines.items()]
    whole, start, steps, uses = sum(frame.seconds for frame in frames), 0.0, [], []
    for index, frame in enumerate(frames):
        top = index * ROWS * CELL[1]
        steps.append(f"{100 * start / whole:.3f}%{{transform:translateY({0 - top:g}px)}}")
        start += frame.seconds
        uses += [
            f'<use href="#{lines[line]}" y="{top + (row + 1) * CELL[1] - 5:g}"/>'
            for row, line in enumerate(frame.lines)
            if line
        ]
    style = (
        "text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;white-space:pre;"
        f"fill:{COLORS['default']}}}.b{{font-weight:bold}}#film{{animation:film {whole:.2f}s steps(1,end) infinite}}"
        f"@keyframes film{{{''.join(steps)}}}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}">'
        f"<title>{escape('; '.join(COMMANDS))}</title><style>{style}</style><defs>{''.join(defs)}</defs>"
        f'<rect width="100%" height="100%" rx="8" fill="#282c34"/>'
        f'<svg x="12" y="12" width="{width - 24:g}" height="{height - 24:g}"><g id="film">{"".join(uses)}</g></svg></svg>\n'
    )


def _span(span: Span) -> str:
    text, color, bold = span
    fill = "" if color == COLORS["default"] else f' style="fill:{color}"'
    weight = ' class="b"' if bold else ""
    return f"<tspan{fill}{weight}>{escape(text)}</tspan>"


def main() -> int:
    """Records and writes the film; 0."""
    with tempfile.TemporaryDirectory() as folder:
        frames = recorded(COMMANDS, Path(folder))
    OUT.write_text(svg(frames))
    print(
        f"wrote docs/images/tour/{OUT.name}: {len(frames)} frames, {sum(f.seconds for f in frames):.0f} s, {OUT.stat().st_size // 1024} KiB"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
