"""Report of a study, on the terminal and as an HTML page: answers, what to type next, tables."""

from __future__ import annotations

import base64
import dataclasses
import html
import math
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mupax import disk, terminal

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 72rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem } img { max-width: 100% }
table { border-collapse: collapse; margin: .5rem 0 } td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #ddd }
td:last-child { text-align: left } code, pre { background: #f5f5f5; padding: .1rem .3rem }
pre { padding: .6rem; overflow-x: auto } .transfers { color: #00704a } .drifts { color: #b00020 } .undecided { color: #8a6100 }
.answer { font-size: 1.2rem; font-weight: 600 }
"""


class Step(NamedTuple):
    """Proposal of what to do after a study: a sentence and a shell command.

    Attributes:
        command: Command line to type. "" (the default) if the step needs no command.
    """

    sentence: str
    command: str = ""


@dataclasses.dataclass(frozen=True)
class Section:
    """Section of a study's report: a table with a title above and sentences below.

    Attributes:
        rows: Cells of the table. The first row has the heads of the columns.
        title: Line above the table.
        lines: Sentences below the table.
        left: Heads of the columns that are aligned left on the terminal. `None` (the default)
            aligns all left, an empty collection none.
        picture: PNG file that a page shows above the table.
        verdict: "transfers", "drifts" or "undecided", which gives the first of the `lines` its
            colour on a page; "" for none.
    """

    rows: Sequence[Sequence[str]]
    title: str = ""
    lines: Sequence[str] = ()
    left: Collection[str] | None = None
    picture: Path | None = None
    verdict: str = ""

    def show(self) -> None:
        """Print title, table and sentences to the terminal."""
        if self.title:
            terminal.say(self.title)
        print(terminal.table(self.rows, left=self.left, indent=1))
        for line in self.lines:
            terminal.say(f"  {line}")

    def html(self) -> str:
        """Return the section as HTML, with the picture embedded and all text escaped."""
        title = html.escape(self.title)
        parts = [f"<h2>{title}</h2>"]
        if self.picture is not None:
            # In the page itself, so that the page can be moved without its folder.
            picture = base64.b64encode(self.picture.read_bytes()).decode()
            parts.append(f'<img alt="{title}" src="data:image/png;base64,{picture}">')
        parts.append(html_table(self.rows))
        for line in self.lines[:1]:
            parts.append(f'<p class="{self.verdict}"><b>{html.escape(line)}</b></p>')
        parts += [f"<p>{html.escape(line)}</p>" for line in self.lines[1:]]
        return "".join(parts)


@dataclasses.dataclass(frozen=True)
class Report:
    """Report of a finished study, which can be printed or written as an HTML page.

    Attributes:
        answers: Answers of the study, a paragraph each.
        steps: Proposals of what to do next, most of them with a command.
        sections: Tables below the answers.
        remarks: Sentences below the tables.
    """

    answers: Sequence[str]
    steps: Sequence[Step] = ()
    sections: Sequence[Section] = ()
    remarks: Sequence[str] = ()

    def show(self) -> None:
        """Print answers, next steps, tables and remarks to the terminal.

        A command is continued after backslashes, so that it can be copied. Only a command may have
        a line that is wider than the terminal.
        """
        for answer in self.answers:
            terminal.say(answer)
        for sentence, command in self.steps:
            terminal.say(f"{sentence}:" if command else sentence)
            if command:
                print(terminal.command(command))
        for section in self.sections:
            print()
            section.show()
        if self.remarks:
            print()
        for remark in self.remarks:
            terminal.say(remark)

    def write_page(
        self, path: Path, title: str, command: str, facts: Iterable[tuple[str, Any]]
    ) -> None:
        """Write the report as one self-contained HTML page, with its pictures embedded.

        An existing file is replaced.

        Args:
            path: File of the page. Its folder must exist.
            title: Heading of the page and of its browser tab.
            command: Command that made the report, printed below it.
            facts: Rows (name, value) of a table at the end, such as versions and data.
        """
        body = [f"<h1>{html.escape(title)}</h1>"]
        answers = []
        for answer in self.answers:
            answers.append(f'<p class="answer">{html.escape(answer)}</p>')
        body += answers
        for sentence, next_command in self.steps:
            body.append(f"<p>{html.escape(sentence)}</p>")
            if next_command:
                body.append(f"<pre>{html.escape(next_command)}</pre>")
        body += [section.html() for section in self.sections]
        body += [f"<p>{html.escape(remark)}</p>" for remark in self.remarks]
        body += [
            "<h2>How it was made</h2>",
            f"<pre>{html.escape(command)}</pre>",
            html_table(facts),
        ]
        head = f"<meta charset=utf-8><title>{html.escape(title)}</title><style>{_STYLE}</style>"
        text = (
            f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(body)}</body></html>\n"
        )
        # A path in the command may hold bytes that are not UTF-8. Python keeps them as surrogates,
        # which a strict encoder refuses.
        disk.write_whole(path, text.encode("utf-8", errors="backslashreplace"))


def html_table(rows: Iterable[Iterable[Any]]) -> str:
    """Return rows of cells as an HTML table without a head; cells become escaped text."""
    lines = []
    for row in rows:
        cells = "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row)
        lines.append(f"<tr>{cells}</tr>")
    return f"<table>{''.join(lines)}</table>"


def write_json(path: Path | str, content: Any) -> Path:
    """Write a value as an indented JSON file, make its folder if missing, and return the path.

    An existing file is replaced. A number that is not finite is written as null.

    Raises:
        TypeError: `content` has a value that JSON cannot hold.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    disk.write_whole(path, disk.json_text(content, indent=1) + "\n")
    return path


def finite(value: float, digits: int | None = None) -> float | None:
    """Return a value for JSON: rounded to `digits` decimals if given, `None` if not finite."""
    if not math.isfinite(value):
        return None
    return value if digits is None else round(float(value), digits)
