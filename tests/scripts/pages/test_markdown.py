"""A command rewrites its part of a page and refuses a page without the markers."""

from __future__ import annotations

import pytest

from scripts.pages.markdown import parts, replaced, table

pytestmark = pytest.mark.core

PAGE = "# Head\n\n<!-- a: begin -->\nold\n<!-- a: end -->\n\nby hand <!-- b: begin -->\n<!-- b: end -->\n"


def test_only_the_part_changes_and_twice_is_once():
    new = replaced(PAGE, "a", table([("x", "y"), ("1", "2")]))
    assert new == PAGE.replace("old", "| x | y |\n|---|---|\n| 1 | 2 |")
    assert parts(new, "a")[1] == new[new.index("\n| x") : new.index("<!-- a: end")]
    assert replaced(new, "a", "old") == PAGE


@pytest.mark.parametrize(
    "page",
    [
        "",
        PAGE.replace("<!-- a: end -->", ""),
        PAGE.replace("<!-- a: begin -->", ""),
        PAGE + PAGE,
        "<!-- a: end --> <!-- a: begin -->",
    ],
)
def test_a_page_without_both_markers_is_refused(page: str):
    with pytest.raises(
        ValueError, match="needs one line <!-- a: begin --> and after it one line <!-- a: end -->"
    ):
        replaced(page, "a", "new")
