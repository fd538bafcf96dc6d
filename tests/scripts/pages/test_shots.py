"""Pictures of a site hold every pixel, and the problems of a page are named."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from PIL import Image

from scripts.pages import browser, shots

needs_a_browser = pytest.mark.skipif(browser.PROGRAM is None, reason="no browser is on the path")

pytestmark = pytest.mark.core


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A page that is right and one in a folder, which is wrong twice."""
    folder = tmp_path / "site"
    (folder / "deep").mkdir(parents=True)
    Image.new("RGB", (90, 50), "red").save(folder / "red.png")
    style = (
        "<style>body{margin:0} @media (prefers-color-scheme: dark){body{background:#000}}</style>"
    )
    tall = '<div style="height:4210px"></div><pre style="overflow:auto"><i style="display:block;width:700px">x</i></pre>'
    (folder / "good.html").write_text(
        f'<!doctype html>{style}<img src="red.png" loading="lazy">{tall}'
    )
    (folder / "deep" / "bad.html").write_text(
        f'<!doctype html>{style}<div style="width:2003px">x</div><img src="../red.png"><img src="gone.png">'
    )
    return folder


def test_every_pixel_below_the_bar_is_in_a_piece() -> None:
    for height in (1, 900, 4000, 4001, 4060, 12345):
        pieces = shots.parts(height)
        assert pieces[0][0] == 0
        assert sum(pieces[-1]) == height
        assert all(1 <= tall <= shots.PART_HEIGHT for _, tall in pieces)
        for (top, tall), (below, _) in itertools.pairwise(pieces):
            assert below + shots.OVERLAP == top + tall
    assert [len(shots.parts(height)) for height in (4000, 4061)] == [1, 2]


def test_problems_name_what_is_wrong() -> None:
    right = {"width": 390, "height": 5, "widest": "", "missing": []}
    assert list(shots.problems(right, 390)) == []
    wrong = right | {"width": 401, "widest": "<table>", "missing": ["a.png", "b.svg"]}
    lines = ["is 401 pixels wide, by <table>", "does not load a.png", "does not load b.svg"]
    assert list(shots.problems(wrong, 390)) == lines
    assert next(shots.problems(wrong | {"widest": ""}, 400)) == "is 401 pixels wide"


def test_pages_are_named_and_a_wrong_name_is_refused(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shots.pages(site) == ["deep/bad", "good"]
    assert shots.pages(site, ["good"]) == ["good"]
    assert shots.main([str(site), str(site / "out"), "--pages", "god"]) == 2
    assert "has no page 'god'; it has deep/bad, good" in capsys.readouterr().err
    assert shots.main([str(site / "deep" / "none"), str(site / "out")]) == 2
    assert "make site" in capsys.readouterr().err


def test_without_a_browser_it_says_what_to_install(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(browser, "PROGRAM", None)
    assert shots.main([str(site), str(site / "out")]) == 2
    assert "is on the path; install one" in capsys.readouterr().err


@needs_a_browser
def test_a_browser_measures_and_pictures(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = ["--widths", "390", "--schemes", "light", "dark"]
    assert shots.main([str(site), str(out), "--pages", "good", *words]) == 0
    assert capsys.readouterr().out == f"2 pictures of pages in {out}, 0 problems\n"
    pieces = {
        scheme: [Image.open(out / scheme / "390" / f"good-{k}.png").convert("RGB") for k in (0, 1)]
        for scheme in shots.SCHEMES
    }
    assert [picture.size for picture in pieces["light"]] == [
        (390, shots.PART_HEIGHT),
        pieces["dark"][1].size,
    ]
    assert (
        pieces["light"][0].getpixel((45, 25)) == pieces["dark"][0].getpixel((45, 25)) == (255, 0, 0)
    )
    assert [pieces[scheme][0].getpixel((300, 3000)) for scheme in shots.SCHEMES] == [
        (255, 255, 255),
        (0, 0, 0),
    ]

    assert shots.main([str(site), str(out), "--widths", "390"]) == 1
    assert capsys.readouterr().out.splitlines()[:2] == [
        'deep/bad at 390 pixels, light: is 2003 pixels wide, by <div style="width:2003px">x</div>',
        "deep/bad at 390 pixels, light: does not load gone.png",
    ]
    assert (out / "light" / "390" / "deep.bad-0.png").exists()
