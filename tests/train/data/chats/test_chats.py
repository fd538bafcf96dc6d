"""Conversations: what is trained on, how windows are packed, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mupax.train.config.run import DataConfig
from mupax.train.data import DataError
from mupax.train.data.chats import templates
from mupax.train.data.chats.answers import ChatTokens
from mupax.train.data.chats.conversations import windows
from mupax.train.data.chats.records import in_folder
from mupax.train.data.text import denoising
from mupax.train.data.text.noise import Infilling
from mupax.train.data.text.tokenizer import Bytes
from tests.fixtures.commands import refusal
from tests.train.data import loading
from tests.train.data.loading import assert_batches_equal
from tests.train.data.writing import write, write_rows

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("work_folder")]

CHATML = (
    "{%- for m in messages %}\n{{- '<s>' + m.role + '\\n' + m.content + '<e>' + '\\n' }}\n"
    "{%- endfor %}\n{%- if add_generation_prompt %}\n{{- '<s>assistant\\n' }}\n{%- endif %}"
)
GENERATION = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "[{% generation %}{{ m.content }}]{% endgeneration %}"
    "{% else %}({{ m.content }}){% endif %}{% endfor %}"
)
LAST_ALONE = (
    "{% for m in messages %}{% if loop.last or m.role == 'user' %}{{ m.content }}|"
    "{% endif %}{% endfor %}"
)
"""A template that forgets earlier answers, as those do that drop what a model thought."""
Messages = list[dict[str, Any]]


def message(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def user(content: str) -> dict[str, Any]:
    return message("user", content)


def assistant(content: Any, **fields: Any) -> dict[str, Any]:
    return message("assistant", content, **fields)


SYSTEM = message("system", "Sé")
TALK = [SYSTEM, user("a"), assistant("bé"), user("c"), assistant("d")]


def trained_on(
    template: str, messages: Messages, loss_on: Any = "answers"
) -> tuple[str, list[str]]:
    """Return the text, and the runs of its tokens that are targets."""
    tokens = ChatTokens(Bytes(), templates.Template(template, "x"), loss_on)
    (ids,) = tokens.encode([json.dumps(templates.checked(messages)).encode()])
    mask = ids >= 256
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]]).astype(int)))
    text = bytes((ids % 256).tolist())
    answers = [text[start:end].decode() for start, end in edges.reshape(-1, 2)]
    return text.decode(), answers


# Answers


def test_an_answer_is_what_follows_the_prompt_up_to_its_ending() -> None:
    text, answers = trained_on(CHATML, TALK)
    assert text == (
        "<s>system\nSé<e>\n<s>user\na<e>\n<s>assistant\nbé<e>\n<s>user\nc<e>\n<s>assistant\nd<e>\n"
    )
    assert answers == ["bé<e>", "d<e>"]
    assert trained_on(CHATML, TALK, "all") == (text, [text])
    # Where nothing but a line end follows an answer, that is its ending.
    assert trained_on(CHATML.replace("'<e>' + ", "''+"), TALK)[1] == ["bé\n", "d\n"]


@pytest.mark.parametrize("field", ["weight", "train", "training", "loss"])
@pytest.mark.parametrize("template", [CHATML, GENERATION])
def test_a_message_that_is_not_trained_on_is_context(field: str, template: str) -> None:
    def talk(value: Any) -> Messages:
        """Return the talk, of which the first answer has this value of the field."""
        return [*TALK[:2], assistant("bé", **{field: value}), *TALK[3:]]

    text, (first, second) = trained_on(template, TALK)
    for off in (0, False, 0.0):
        assert trained_on(template, talk(off)) == (text, [second])
    for on in (1, True, None):
        assert trained_on(template, talk(on)) == (text, [first, second])
    text, parts = trained_on(CHATML, talk(0), "all")
    assert "".join(parts) == text.replace("bé<e>", "")
    for wrong in (0.5, 2, -1, "0", "false", [0]):
        with pytest.raises(DataError, match=rf"messages\[2\] has the {field} "):
            templates.checked(talk(wrong))


def test_no_message_but_an_answer_is_a_target_whatever_its_weight() -> None:
    weighted = [{**turn, "weight": int(turn["role"] == "assistant")} for turn in TALK]
    assert trained_on(CHATML, weighted) == trained_on(CHATML, TALK)
    text, parts = trained_on(CHATML, [{**SYSTEM, "train": False}, *TALK[1:]], "all")
    assert "".join(parts) == text.replace("<s>system\nSé<e>\n", "")


DETAIL = {"begin_offset": 0, "end_offset": 9, "train": False}


@pytest.mark.parametrize(
    ("template", "answer"), [(CHATML, "but this<e>"), (GENERATION, "but this]")]
)
def test_a_part_of_an_answer_may_be_context(template: str, answer: str) -> None:
    content = "not this, but this"
    detail = [DETAIL, {"begin_offset": 10, "end_offset": 17, "train": True}]
    partial = assistant(content, train_detail=detail)
    assert trained_on(template, [user("q"), partial])[1] == [answer]
    assert trained_on(template, [user("q"), assistant(content)])[1] == [f"not this, {answer}"]


@pytest.mark.parametrize(
    "detail",
    [
        [{**DETAIL, "end_offset": 99}],
        [{"begin_offset": 0, "train": 0}],
        "0:9",
        [{**DETAIL, "train": "no"}],
    ],
)
def test_parts_that_are_none_are_refused(detail: Any) -> None:
    with pytest.raises(DataError, match=r"messages\[1\] has the train_detail "):
        templates.checked([user("q"), assistant("not this, but this", train_detail=detail)])


def test_several_turns_tools_and_system_prompts_stay_as_they_are() -> None:
    calls = [{"function": {"name": "f", "arguments": "{}"}}]
    results = [message("tool", "5"), assistant("five")]
    template = CHATML.replace("m.content", "(m.content or m.tool_calls | tojson)")

    def with_call(**fields: Any) -> Messages:
        return [*TALK[:2], assistant(None, tool_calls=calls, **fields), *results]

    text, (first, second) = trained_on(template, with_call())
    assert first.startswith('[{"function"')
    assert trained_on(template, with_call(weight=0)) == (text, [second])


def test_a_template_may_say_by_itself_what_an_answer_is() -> None:
    assert trained_on(GENERATION, TALK) == ("(Sé)(a)[bé](c)[d]", ["bé]", "d]"])


def test_a_template_that_renders_beginnings_otherwise_is_refused_by_name() -> None:
    message = "the chat template x writes the beginning of a conversation otherwise"
    with pytest.raises(DataError, match=message):
        trained_on(LAST_ALONE, TALK)
    # The control: one answer, at the end.
    assert trained_on(LAST_ALONE, TALK[:3]) == ("a|bé|", ["bé|"])
    assert trained_on(LAST_ALONE, TALK, "all")[0] == "a|c|d|"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% for m in messages %}", "is no chat template"),
        (
            "{{ raise_exception('roles must alternate') }}",
            "cannot render these messages: roles must alternate",
        ),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ strftime_now('%Y') }}", "'strftime_now' is undefined"),
    ],
)
def test_a_template_runs_where_it_can_do_no_harm(template: str, text: str) -> None:
    with pytest.raises(DataError, match=text):
        templates.Template(template, "x").render(TALK, prompt=True)


def growing(expression: str) -> str:
    """Return a template that assigns the expression to a text, again and again."""
    loop = f"{{% for i in range(40) %}}{{% set ns.x = {expression} %}}{{% endfor %}}"
    return "{% set ns = namespace(x='ab') %}" + loop


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        "{{ 'x' * 10**10 }}",
        "{{ ([0] * 10**9) | length }}",
        "{{ 9 ** 999999999 }}",
        "{{ 'x' | center(10**10) }}",
        "{{ 'x'.ljust(10**10) }}",
        "{{ '%01000000000d' % 5 }}",
        "{{ '{:01000000000d}'.format(5) }}",
        "{{ {'a': 1} | tojson(indent=10**9) }}",
        "{% for i in range(9999) %}{{ 'x' * 99999 }}{% endfor %}",
        "{% if true %}" * 5000 + "{% endif %}" * 5000,
        "x" * 2_000_000,
        growing("ns.x * 2"),
        growing("ns.x + ns.x"),
        growing("ns.x ~ ns.x"),
        growing("ns.x | replace('a', 'aa')"),
        growing("ns.x.replace('a', 'aa')"),
    ],
)
def test_a_template_that_loops_or_grows_without_end_is_refused(template: str) -> None:
    with pytest.raises(DataError, match="chat template"):
        templates.Template(template, "x").render(TALK, prompt=True)


def test_control_a_template_may_loop_and_join() -> None:
    template = (
        "{% for m in messages %}{% for i in range(3) %}"
        "{{ loop.index ~ '/' ~ loop.length ~ m.content[:1] * 2 }}{% endfor %}{% endfor %}"
    )
    text = templates.Template(template, "x").render([SYSTEM], prompt=True)
    assert text == "1/3SS2/3SS3/3SS"


def test_templates_lie_beside_the_tokenizer() -> None:
    def rendered() -> str:
        template = templates.find("tokenizer.json")
        assert template is not None
        return template.render(TALK, prompt=False)

    assert templates.find("tokenizer.json") is None
    assert templates.find("bytes") is None
    named = [{"name": "default", "template": "{{ bos_token }}1"}]
    fields = {"chat_template": named, "bos_token": {"content": "<b>"}}
    write("tokenizer_config.json", json.dumps(fields))
    assert rendered() == "<b>1"
    write("chat_template.jinja", "2{{ bos_token }}{{ messages[2] | tojson }}")
    assert rendered() == '2<b>{"role": "assistant", "content": "bé"}'
    with pytest.raises(DataError, match="no chat template at"):
        templates.find("tokenizer.json", "none")


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([], "at least one"),
        ("hi", "at least one"),
        ([message("bot", "a")], r"messages\[0\] has the role 'bot'"),
        ([user([{"type": "image_url"}])], "no text in its content"),  # pyright: ignore
        ([user("\ufdd0")], "a character that is of no text"),
    ],
)
def test_messages_that_are_none_are_refused(messages: Any, text: str) -> None:
    with pytest.raises(DataError, match=text):
        templates.checked(messages)


# Windows


def test_windows_hold_whole_conversations() -> None:
    v = 256
    end = 2 * v
    records = np.concatenate(
        [
            [1, 2, v + 3, end],
            [4, v + 5, end + 1],
            [6, 7, end],  # without an answer
            [1, 2, 3, 4, 5, v + 6, end],  # too long for the packer's end
            [v + 8, v + 9, v, end],  # ends with the separator already
        ]
    )
    side = windows(records, v, 0, 7)
    spans = [(side.tokens[start:stop] % end % v).tolist() for start, stop in side.spans]
    assert spans == [[1, 2, 3, 0], [4, 5, 1], [1, 2, 3, 4, 5, 6, 0], [8, 9, 0]]
    assert side.first.tolist() == [0, 2, 3, 4]
    assert (side.cut, side.without_target) == (0, 1)
    short = windows(records, v, 0, 5)
    assert (short.cut, short.without_target, side.count) == (1, 2, 3)


ROWS = [{"messages": [user(f"q{i}"), assistant(f"answer {i}" * (1 + i % 3))]} for i in range(40)]


def load_with_notes(seq_len: int = 96, batch_size: int = 2, **fields: Any) -> Any:
    write("t.jinja", CHATML)
    fields = {"chat_template": "t.jinja", **fields}
    return loading.load_with_notes("chat:t", seq_len=seq_len, batch_size=batch_size, **fields)


def load(**fields: Any) -> Any:
    return load_with_notes(**fields)[0]


def train_batches(source: Any) -> list[dict[str, np.ndarray]]:
    return [source.train_batch(k) for k in range(source.train_size)]


def targets(batches: Any) -> str:
    """Return the text of all tokens that count."""
    ids = [batch["targets"][batch["weights"] > 0] for batch in batches]
    return bytes(np.concatenate(ids).tolist()).decode()


def test_batches_are_trained_on_answers_alone_each_once_an_epoch() -> None:
    unanswered = {"messages": [user("nobody answers")]}
    bad = {"messages": [user("q"), assistant("a bad answer", weight=0)]}
    write_rows("t/a.jsonl", [*ROWS, unanswered, bad])
    source, notes = load_with_notes(batch_size=1)
    (note,) = [note for note in notes if "left out 2 records" in note]
    assert "a.jsonl line 41" in note
    assert "a.jsonl line 42" in note
    batches = train_batches(source)
    evaluation = [*source.eval_batches()]
    for batch in (*batches, *evaluation):
        np.testing.assert_array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
    trained = targets(batches).split("<e>")[:-1]
    evaluated = targets(evaluation).split("<e>")[:-1]
    assert sorted(trained + evaluated) == sorted(row["messages"][1]["content"] for row in ROWS)
    assert len(trained) == source.facts["train_records"]
    assert len(evaluated) == source.facts["eval_records"]
    assert len(batches) < len(trained)  # the control: windows hold several
    again = load()  # of two rows, from the cache
    part = again.train_batch(5, slice(1, 2))["inputs"]
    np.testing.assert_array_equal(again.train_batch(5)["inputs"][1:], part)
    np.testing.assert_array_equal(again.train_batch(1)["inputs"][0], batches[2]["inputs"][0])
    everything = load(loss_on="all")
    assert "<s>user\nq1" in targets(train_batches(everything))
    assert everything.facts["digest"] != source.facts["digest"]


def test_conversations_of_a_window_do_not_see_one_another_where_asked() -> None:
    write_rows("t/a.jsonl", ROWS)
    batch = load(document_mask=True, reset_positions=True).train_batch(0)
    for row in range(2):
        starts = np.flatnonzero(batch["positions"][row] == 0)
        edges = np.flatnonzero(np.diff(batch["segments"][row], prepend=-1))
        np.testing.assert_array_equal(starts, edges)
        assert len(starts) >= 2
        for start in starts:
            begins = bytes(batch["inputs"][row, start : start + 7].tolist())
            assert begins == b"<s>user" or not any(begins)  # or padding


def test_a_table_is_read_as_lines_are_and_its_weights_too() -> None:
    draft = assistant("a draft", weight=0.0)
    rows = [
        {"messages": [draft, *row["messages"]] if i % 2 == 0 else row["messages"]}
        for i, row in enumerate(ROWS)
    ]
    table = write_rows("t/a.parquet", rows)
    batches = train_batches(load())
    inputs = np.concatenate([batch["inputs"].reshape(-1) for batch in batches])
    assert "a draft" in bytes(inputs.tolist()).decode()
    assert "a draft" not in targets(batches)
    table.unlink()
    write_rows("t/a.jsonl", rows)
    assert_batches_equal(load().train_batch(0), batches[0])


def test_a_folder_of_conversations_is_known_by_its_records() -> None:
    write_rows("talks/a.jsonl", ROWS)
    write_rows("texts/a.jsonl", [{"text": "a"}])
    assert in_folder(Path("talks"))
    assert in_folder(Path("talks/a.jsonl"))
    assert not in_folder(Path("texts"))


@pytest.mark.parametrize(
    ("more", "fields", "text"),
    [
        ({"tools": [1]}, {}, "a.jsonl line 1 has tools"),
        ({"messages": [{"role": "bot"}]}, {}, r"a.jsonl line 1: messages\[0\] has the role 'bot'"),
        ({"messages": "hi"}, {}, "no text but str|no field 'messages'"),
        ({"messages": [assistant("bé", weight=0.5)]}, {}, r"a.jsonl line 1: messages\[0\] has the weight 0.5"),
        ({}, {"field": "talk"}, "no field 'talk'; write --data.field messages"),
        ({}, {"chat_template": None}, "no chat template beside data.tokenizer bytes"),
        ({}, {"tokenizer": "ids:200"}, "a number of ids and no words; write bytes, bpe:SIZE, or the path"),
        ({}, {"tokenizer": "bpe:300"}, "bpe:300 and a model of 256 tokens; write --model.vocab-size 300"),
        ({}, {"seq_len": 12}, "no answer within 12 tokens"),
    ],
)  # fmt: skip
def test_records_and_fields_that_do_not_fit_are_refused(
    more: dict[str, Any], fields: dict[str, Any], text: str
) -> None:
    write_rows("t/a.jsonl", [{**row, **more} for row in ROWS])
    with pytest.raises(DataError, match=text):
        load(**fields)


def test_noise_is_not_put_on_conversations() -> None:
    write_rows("t/a.jsonl", ROWS)
    write("t.jinja", CHATML)
    config = DataConfig(name="chat:t", batch_size=1, chat_template="t.jinja")
    with pytest.raises(DataError, match="is conversations, and noise is put on text"):
        denoising.denoising(config, Infilling(), inputs=96, seed=0)


def test_the_flags_are_of_chats_and_messages_are_no_text() -> None:
    write_rows("t/a.jsonl", ROWS)
    message = refusal("train lm-tiny --data.name text:t/a.jsonl --data.loss-on all")
    assert "--data.loss-on is not read with the data text:" in message
    message = "but messages of a chat; write data.name chat:PATH"
    loading.assert_refused(message, "records:t/a.jsonl")
