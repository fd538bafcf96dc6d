"""Every arXiv number is that of the paper beside it, and the page of papers says where."""

from __future__ import annotations

import pytest

from scripts.pages import papers

pytestmark = pytest.mark.core

PAPERS = {
    "2405.15712": papers.Paper("Bordelon, Chaudhry and Pehlevan"),
    "2203.03466": papers.Paper("Yang et al.", "Tensor Programs V"),
    "2310.02244": papers.Paper("Yang et al.", "Tensor Programs VI"),
}
EVERY = "2405.15712 2203.03466 2310.02244"


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return papers.citing()


def test_numbers_cited_are_those_of_their_papers(texts: dict[str, str]) -> None:
    assert papers.problems(texts) == []


def test_the_page_is_made_of_what_cites(texts: dict[str, str]) -> None:
    assert papers.PAGE.read_text() == papers.page(texts), (
        "write it again: python -m scripts.pages.papers"
    )


@pytest.mark.parametrize(
    "right",
    [
        "(Bordelon, Chaudhry and Pehlevan 2024, arXiv 2405.15712)",
        "Bordelon et al. 2024\n# (2405.15712)",
        "Tensor Programs V and of 2405.15712",  # another paper's name, but not before its number
        "Tensor Programs V (2203.03466), Tensor Programs VI, 2310.02244; 2405.15712",
        "SGD (2405.15712)",  # a word that is no author's
        "version 1.2405.15712 and 2405.157123",  # no numbers of papers
    ],
)
def test_what_may_stand_before_a_number(right: str) -> None:
    assert papers.problems({"a.md": right, "b.md": EVERY}, PAPERS) == []


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ("Bordelon et al. 2024 (2405.15713)", "2405.15713 is no paper of scripts/pages/papers.py"),
        ("Bordelon et al. 2023 (2405.15712)", "2023 beside 2405.15712, which is of 2024"),
        (
            "(Pehlevan 2022, arXiv 2203.03466)",
            "Pehlevan beside 2203.03466, which is by Yang et al.",
        ),
        ("Tensor Programs VI (2203.03466)", "Tensor Programs VI beside 2203.03466"),
        ("Doe et al. 2024 (2405.15712)", "Doe beside 2405.15712, which is by Bordelon"),
    ],
)
def test_a_number_that_cannot_be_right_is_named(wrong: str, problem: str) -> None:
    lines = papers.problems({"a.md": wrong, "b.md": EVERY}, PAPERS)
    assert len(lines) == 1
    assert lines[0].startswith(f"a.md: {problem}")


def test_a_paper_that_nothing_cites_is_named() -> None:
    lines = papers.problems({"a.md": "2405.15712 2310.02244"}, PAPERS)
    assert lines == ["2203.03466 is cited nowhere; take it out of PAPERS"]
