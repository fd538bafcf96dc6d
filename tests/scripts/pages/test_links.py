"""Links of the documents lead somewhere, and the check of the built site sees one that does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.pages import links, papers

pytestmark = pytest.mark.core


def test_links_of_the_documents_lead_somewhere() -> None:
    assert links.broken_in_documents() == []


DOCUMENT = """# A page: `code` and [text](a.md)
[here](#a-page-code-and-text) [again](b.md#twice-1) [folder](.) [address](https://a.example/b?c#d)
`[code](gone.md)` and
```md
[fenced](gone.md)
# No heading
```
"""
WRONG_IN_DOCUMENT = {
    "[x](gone.md)": "gone.md is no file",
    "[x](b.md#thrice)": "b.md#thrice is no anchor",
    "[x](#no-heading)": "#no-heading is no anchor",
    "[x](../../b.md)": "../../b.md leads out of ",
    "![x](gone.png)": "gone.png is no file",
    "[x](http://a.example)": "http://a.example is no address",
    "[x](https://a)": "https://a is no address",
}


@pytest.mark.parametrize(("words", "problem"), [("", None), *WRONG_IN_DOCUMENT.items()])
def test_a_link_of_a_document(words: str, problem: str | None, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text(DOCUMENT + words)
    (tmp_path / "docs" / "b.md").write_text("# Twice\n## Twice\n")
    broken = links.broken_in_documents(tmp_path)
    assert len(broken) == (problem is not None)
    assert problem is None or broken[0].startswith(f"docs/a.md: {problem}")


PAGE = '<h1 id="top">x</h1><a href="b/c%20d.html#here">x</a><a href="#top">x</a><a href="#">x</a><img src="x.svg?v=1">'
WRONG_IN_SITE = {
    '<a href="b/gone.html">': "b/gone.html is no file",
    '<a href="b/c%20d.html#there">': "b/c%20d.html#there is no anchor",
    '<a href="#bottom">': "#bottom is no anchor",
    '<a href="b/">': "b/ is no file",
    '<a href="../a.html">': "../a.html leads out of ",
    '<script src="gone.js"></script>': "gone.js is no file",
    '<a href="ftp://a.example">': "ftp://a.example is no address",
}


@pytest.mark.parametrize(("words", "problem"), [("", None), *WRONG_IN_SITE.items()])
def test_a_link_of_the_site(
    words: str, problem: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "a.html").write_text(PAGE + words)
    (tmp_path / "b" / "c d.html").write_text('<a name="here" href="../a.html">')
    (tmp_path / "x.svg").write_text("<svg/>")
    assert links.main([str(tmp_path)]) == (problem is not None)
    assert problem is None or f"a.html: {problem}" in capsys.readouterr().out


def test_a_site_that_is_not_built_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert links.main([str(tmp_path)]) == 2
    assert "make site" in capsys.readouterr().err


def test_addresses_in_documents_and_code_can_be_right() -> None:
    texts = {path: text for path, text in papers.citing().items() if not path.startswith("tests/")}
    texts["docs/reference/papers.md"] = papers.PAGE.read_text()
    assert (
        sum(text.count("https://arxiv.org/abs/") for text in texts.values())
        > len(papers.PAPERS) - 1
    )
    assert links.wrong_addresses(texts) == []


WRONG_ADDRESSES = {
    "http://arxiv.org/abs/2405.15712": "is no address of the form",
    "https://arxiv/abs/2405.15712": "is no address of the form",
    "https://arxiv.org/abs/2405.1571": "has no path of arxiv.org",
    "https://arxiv.org/abs/2413.15712": "has no path of arxiv.org",
    "https://arxiv.org/pdf/2405.15712": "has no path of arxiv.org",
    "https://arxvi.org/abs/2405.15712": "has a host that no other address has",
    "https://github.com/microsoft": "has no path of github.com",
    "https://github.com/somebody/mupax/blob/main/zoo/gone.py": "is no file of this repository",
}
RIGHT_ADDRESSES = (
    "https://arxiv.org/abs/2405.15712",
    "https://github.com/microsoft/mup/issues/48",
    "https://github.com/somebody/mupax/tree/main/zoo/transformer.py",
    "http://localhost:8000/v1",
    "http://www.w3.org/2000/svg",
)


def test_an_address_that_cannot_be_right_is_named() -> None:
    text = "\n".join(f"[x]({address}). " for address in (*WRONG_ADDRESSES, *RIGHT_ADDRESSES))
    lines = links.wrong_addresses({"a.md": text})
    assert len(lines) == len(WRONG_ADDRESSES)
    for line, (address, problem) in zip(lines, WRONG_ADDRESSES.items(), strict=True):
        assert line.startswith(f"a.md: {address} {problem}")
