"""Samples of chat templates whose rendering would take too long or too much memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from scripts.campaigns.edges.bombs.sample import EITHER, LOADS, REFUSED, Sample, first_batches

_PLAIN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"

# The sandbox of Jinja allows ranges of up to 100,000.
_LOOP = "{% for i in range(99999) %}"
_STEPS = {
    "a product of texts in a loop": "ns.x * 2",
    "a sum of texts in a loop": "ns.x + ns.x",
    "texts joined by ~ in a loop": "ns.x ~ ns.x",
    "a replacement in a replacement": "ns.x | replace('a', 'aa')",
    "a replacement by a method": "ns.x.replace('a', 'aa')",
}


def samples() -> Iterator[Sample]:
    """Yield every sample of a chat template."""
    bodies = {}
    for title, step in _STEPS.items():
        bodies[title] = (
            "{% set ns = namespace(x='ab') %}{% for i in range(40) %}{% set ns.x = "
            + step
            + " %}{% endfor %}"
        )
    bodies |= {
        "a loop of 10^9": "{% for i in range(10**9) %}x{% endfor %}",
        "loops in loops": _LOOP * 3 + "{% endfor %}" * 3,
        "a text times 10^10": "{{ 'x' * 10**10 }}",
        "a list times 10^9": "{{ ([0] * 10**9) | length }}",
        "a power of 10^9": "{{ 9 ** 999999999 }}",
        "a text centred in 10^10": "{{ 'x' | center(10**10) }}",
        "a text in 10^10 columns": "{{ 'x'.ljust(10**10) }}",
        "a number of 10^9 digits": "{{ '%01000000000d' % 5 }}",
        "a format of 10^9 digits": "{{ '{:01000000000d}'.format(5) }}",
        "an indent of 10^9": "{{ 'a\nb' | indent(10**9) }}",
        "batches of 10^9": "{{ [1] | batch(10**9, 0) | list | length }}",
        "slices of 10^9": "{{ [1] | slice(10**9) | list | length }}",
        "JSON indented by 10^9": "{{ {'a': 1} | tojson(indent=10**9) }}",
        "10^6 paragraphs of lorem ipsum": "{{ lipsum(n=1000000) }}",
        "a macro that calls itself twice": (
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
            "{{ f(40) }}"
        ),
        "a macro that calls itself for ever": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "a join of many": "{{ range(99999) | join('x' * 100000) }}",
        "blocks nested 5,000 deep": "{% if true %}" * 5000 + "x" + "{% endif %}" * 5000,
        "brackets nested 5,000 deep": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        # The known way out of a sandbox.
        "Python's own attributes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "a file of the machine": "{% include '/etc/passwd' %}",
        "an output of 10^5 times 10^5": "{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
        "5 MB of text": "x" * 5_000_000,
    }
    either = {"batches of 10^9", "slices of 10^9", "5 MB of text"}
    for title, body in bodies.items():
        make = partial(_make, template=_PLAIN + body)
        codes = EITHER if title in either else REFUSED
        yield Sample(f"chat template: {title}", "chat templates", make, _read, codes)
    ordinary = {
        "ChatML": (
            "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] | trim "
            "+ '<|im_end|>' + '\n' }}{% endfor %}"
        ),
        "a loop over 1,000 numbers": _PLAIN + "{% for i in range(1000) %}{% endfor %}",
    }
    for title, template in ordinary.items():
        make = partial(_make, template=template)
        yield Sample(f"chat template: {title}", "chat templates", make, _read, LOADS)


def _make(folder: Path, template: str) -> None:
    """Write a template and sixty short conversations."""
    (folder / "chat.jinja").write_text(template)
    with (folder / "chat.jsonl").open("w") as file:
        for number in range(60):
            question = {"role": "user", "content": f"What is {number}?"}
            answer = {"role": "assistant", "content": f"A number: {number}."}
            file.write(json.dumps({"messages": [question, answer]}) + "\n")


def _read(folder: Path) -> int:
    """Render and tokenize the conversations as a run does, and return the exit code."""
    return first_batches(
        folder, "chat:chat.jsonl", chat_template="chat.jinja", model={"seq_len": 256}
    )
