"""The film is an animated picture of valid commands, no wider than its terminal."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

from scripts.pages import film

TEXT = "{http://www.w3.org/2000/svg}"
WHITE = film.COLORS["default"]


def test_the_film_is_of_the_commands_and_as_wide_as_its_terminal() -> None:
    root = ET.parse(film.OUT).getroot()
    assert film.OUT.stat().st_size < 400_000
    assert root.findtext(f"{TEXT}title") == "; ".join(film.COMMANDS)
    lines = {line.get("id"): "".join(line.itertext()) for line in root.iter(f"{TEXT}text")}
    assert max(map(len, lines.values())) <= film.COLUMNS
    for command in film.COMMANDS:
        assert f"$ {command}" in lines.values()
    shown = {use.get("href", "")[1:] for use in root.iter(f"{TEXT}use")}
    assert shown == set(lines)
    assert "https://" not in film.OUT.read_text()


def test_frames_that_show_the_same_or_are_too_near_are_one() -> None:
    a, b, c = (((text, WHITE, False),) for text in "abc")
    frames = [
        film.Frame((a,), 0.5),
        film.Frame((a,), 0.5),
        film.Frame((b,), 0.01),
        film.Frame((c,), 0.5),
    ]
    assert film.merged(frames) == [film.Frame((a,), 1.0), film.Frame((c,), 0.51)]


def test_every_frame_has_its_time_and_place() -> None:
    frames = [film.Frame((((f"<{i}>", WHITE, True),), ()), 1.0) for i in range(4)]
    text = film.svg(frames)
    ET.fromstring(text)
    assert re.findall(r"([\d.]+)%\{transform:translateY\((-?\d+)px\)", text) == [
        (f"{25 * i:.3f}", str(-i * film.ROWS * int(film.CELL[1]))) for i in range(4)
    ]
    assert "&lt;0&gt;" in text
