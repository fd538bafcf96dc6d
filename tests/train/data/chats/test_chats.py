"""Conversations: rendered as the template says, trained on where an answer stands, packed whole, and refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from mupax.__main__ import main
from mupax.train import data
from mupax.train.config.run import DataConfig
from mupax.train.data import DataError
from mupax.train.data.chats import templates
from mupax.train.data.chats.answers import ChatTokens
from mupax.train.data.chats.conversations import Conversations, windows
from mupax.train.data.chats.records import in_folder
from mupax.train.data.text import denoising
from mupax.train.data.text.tokenizer import Bytes
from mupax.zoo.configs import DecoderConfig
from tests.train.data.sources.test_text import cache_folder, quiet

__all__ = ["cache_folder"]  # a fixture

pytestmark = pytest.mark.core

CHATML = (
    "{%- for m in messages %}\n{{- '<s>' + m.role + '\\n' + m.content + '<e>' + '\\n' }}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n{{- '<s>assistant\\n' }}\n{%- endif %}"
)
GENERATION = (
    "{% for m in messages %}{% if m.role == 'assistant' %}[{% generation %}{{ m.content }}]{% endgeneration %}"
    "{% else %}({{ m.content }}){% endif %}{% endfor %}"
)
LAST_ALONE = "{% for m in messages %}{% if loop.last or m.role == 'user' %}{{ m.content }}|{% endif %}{% endfor %}"
"""A template that forgets earlier answers, as those do that drop what a model thought."""
TALK = [
    {"role": "system", "content": "Sé"},
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "bé"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "d"},
]


def trained_on(
    template: str, messages: list[dict[str, Any]], loss_on: Any = "answers"
) -> tuple[str, list[str]]:
    """The text, and the runs of its tokens that are targets."""
    tokens = ChatTokens(Bytes(), templates.Template(template, "x"), loss_on)
    (ids,) = tokens.encode([json.dumps(messages).encode()])
    mask = ids >= 256
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]]).astype(int)))
    answers = [bytes((ids[a:b] % 256).tolist()).decode() for a, b in edges.reshape(-1, 2)]
    return bytes((ids % 256).tolist()).decode(), answers


# What is an answer


def test_an_answer_is_what_follows_the_prompt_up_to_its_ending() -> None:
    text, answers = trained_on(CHATML, TALK)
    assert (
        text
        == "<s>system\nSé<e>\n<s>user\na<e>\n<s>assistant\nbé<e>\n<s>user\nc<e>\n<s>assistant\nd<e>\n"
    )
    assert answers == ["bé<e>", "d<e>"]
    assert trained_on(CHATML, TALK, "all") == (text, [text])
    # Where nothing but a line end follows an answer, that is its ending.
    assert trained_on(CHATML.replace("'<e>' + ", "''+"), TALK)[1] == ["bé\n", "d\n"]


def with_fields(**fields: Any) -> list[dict[str, Any]]:
    """The talk, of which the first answer has these fields, as a record has it."""
    return templates.checked(
        [{**message, **(fields if message["content"] == "bé" else {})} for message in TALK]
    )


@pytest.mark.parametrize("field", ["weight", "train", "training", "loss"])
@pytest.mark.parametrize("template", [CHATML, GENERATION])
def test_a_message_that_is_not_trained_on_is_context(field: str, template: str) -> None:
    text, (first, second) = trained_on(template, TALK)
    for off in (0, False, 0.0):
        assert trained_on(template, with_fields(**{field: off})) == (text, [second])
    for on in (1, True, None):
        assert trained_on(template, with_fields(**{field: on})) == (text, [first, second])
    whole = trained_on(CHATML, with_fields(**{field: 0}), "all")[1]
    assert "".join(whole) == trained_on(CHATML, TALK)[0].replace("bé<e>", "")
    for wrong in (0.5, 2, -1, "0", "false", [0]):
        with pytest.raises(DataError, match=rf"messages\[2\] has the {field} "):
            with_fields(**{field: wrong})


def test_no_message_but_an_answer_is_a_target_whatever_its_weight() -> None:
    off = [{**message, "weight": int(message["role"] == "assistant")} for message in TALK]
    assert trained_on(CHATML, templates.checked(off)) == trained_on(CHATML, TALK)
    system = [
        {**message, **({"train": False} if message["role"] == "system" else {})} for message in TALK
    ]
    text, parts = trained_on(CHATML, templates.checked(system), "all")
    assert "".join(parts) == text.replace("<s>system\nSé<e>\n", "")


def test_a_part_of_an_answer_may_be_context() -> None:
    talk = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "not this, but this"},
    ]
    detail = [
        {"begin_offset": 0, "end_offset": 9, "train": False},
        {"begin_offset": 10, "end_offset": 17, "train": True},
    ]
    for template, answer in ((CHATML, "but this<e>"), (GENERATION, "but this]")):
        messages = templates.checked([talk[0], {**talk[1], "train_detail": detail}])
        assert trained_on(template, messages)[1] == [answer]
        assert trained_on(template, talk)[1] == [f"not this, {answer}"]
    for wrong in (
        [{"begin_offset": 0, "end_offset": 99, "train": False}],
        [{"begin_offset": 0, "train": 0}],
        "0:9",
        [{**detail[0], "train": "no"}],
    ):
        with pytest.raises(DataError, match=r"messages\[1\] has the train_detail "):
            templates.checked([talk[0], {**talk[1], "train_detail": wrong}])


def test_several_turns_tools_and_system_prompts_stay_as_they_are() -> None:
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
    }
    talk = [
        TALK[0],
        TALK[1],
        call,
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": "five"},
    ]
    template = CHATML.replace("m.content", "(m.content or m.tool_calls | tojson)")
    plain = trained_on(template, templates.checked(talk))
    assert len(plain[1]) == 2
    assert plain[1][0].startswith('[{"function"')
    masked = templates.checked([*talk[:2], {**call, "weight": 0}, *talk[3:]])
    assert trained_on(template, masked) == (plain[0], plain[1][1:])


def test_a_template_may_say_by_itself_what_an_answer_is() -> None:
    assert trained_on(GENERATION, TALK) == ("(Sé)(a)[bé](c)[d]", ["bé]", "d]"])


def test_a_template_that_renders_beginnings_otherwise_is_refused_by_name() -> None:
    with pytest.raises(
        DataError, match="the chat template x writes the beginning of a conversation otherwise"
    ):
        trained_on(LAST_ALONE, TALK)
    assert trained_on(LAST_ALONE, TALK[:3]) == (
        "a|bé|",
        ["bé|"],
    )  # Control: one answer, at the end.
    assert trained_on(LAST_ALONE, TALK, "all")[0] == "a|c|d|"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% for m in messages %}", "is no chat template"),
        (
            "{{ raise_exception('roles must alternate') }}",
            "takes no such messages: roles must alternate",
        ),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ strftime_now('%Y') }}", "'strftime_now' is undefined"),
    ],
)
def test_a_template_runs_where_it_can_do_no_harm(template: str, text: str) -> None:
    with pytest.raises(DataError, match=text):
        templates.Template(template, "x").render(TALK, prompt=True)


LOOP = "{% set ns = namespace(x='ab') %}{% for i in range(40) %}{% set ns.x = EXPRESSION %}{% endfor %}"


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
        *(
            LOOP.replace("EXPRESSION", expression)
            for expression in (
                "ns.x * 2",
                "ns.x + ns.x",
                "ns.x ~ ns.x",
                "ns.x | replace('a', 'aa')",
                "ns.x.replace('a', 'aa')",
            )
        ),
    ],
)
def test_a_template_that_loops_or_grows_without_end_is_refused(template: str) -> None:
    with pytest.raises(DataError, match="chat template"):
        templates.Template(template, "x").render(TALK, prompt=True)


def test_control_a_template_may_loop_and_join(tmp_path: Path) -> None:
    template = "{% for m in messages %}{% for i in range(3) %}{{ loop.index ~ '/' ~ loop.length ~ m.content[:1] * 2 }}{% endfor %}{% endfor %}"
    text = templates.Template(template, "x").render(TALK[:1], prompt=True)
    first = TALK[0]["content"][:1] * 2
    assert text == f"1/3{first}2/3{first}3/3{first}"


def test_templates_lie_beside_the_tokenizer(tmp_path: Path) -> None:
    name = str(tmp_path / "tokenizer.json")
    assert templates.find(name) is None
    assert templates.find("bytes") is None
    fields = {
        "chat_template": [{"name": "default", "template": "{{ bos_token }}1"}],
        "bos_token": {"content": "<b>"},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
    one = templates.find(name)
    assert one is not None
    assert one.render(TALK, prompt=False) == "<b>1"
    (tmp_path / "chat_template.jinja").write_text("2{{ bos_token }}{{ messages[2] | tojson }}")
    two = templates.find(name)
    assert two is not None
    assert two.render(TALK, prompt=False) == '2<b>{"role": "assistant", "content": "bé"}'
    with pytest.raises(DataError, match="no chat template at"):
        templates.find(name, str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([], "at least one"),
        ("hi", "at least one"),
        ([{"role": "bot", "content": "a"}], r"messages\[0\] has the role 'bot'"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "no text in its content"),
        ([{"role": "user", "content": "\ufdd0"}], "a character that is of no text"),
    ],
)
def test_messages_that_are_none_are_refused(messages: Any, text: str) -> None:
    with pytest.raises(DataError, match=text):
        templates.checked(messages)


# Windows


def test_windows_hold_whole_conversations() -> None:
    v, end = 256, 2 * 256
    records = [
        [1, 2, v + 3, end],
        [4, v + 5, end + 1],
        [6, 7, end],
        [1, 2, 3, 4, 5, v + 6, end],
        [v + 8, v + 9, v, end],
    ]
    side = windows(np.concatenate(records), v, 0, 7)
    spans = [(side.tokens[a:b] % end % v).tolist() for a, b in side.spans]
    # The third has no answer; of the fourth all but the packer's end fit; the last ends with the separator already.
    assert spans == [[1, 2, 3, 0], [4, 5, 1], [1, 2, 3, 4, 5, 6, 0], [8, 9, 0]]
    assert side.first.tolist() == [0, 2, 3, 4]
    assert (side.cut, side.without_target) == (0, 1)
    short = windows(np.concatenate(records), v, 0, 5)
    assert (short.cut, short.without_target, side.count) == (1, 2, 3)


def write(folder: Path, count: int = 40, **more: Any) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "t.jinja").write_text(CHATML)
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"q{i}"},
                {"role": "assistant", "content": f"answer {i}" * (1 + i % 3)},
            ]
        }
        for i in range(count)
    ]
    (folder / "a.jsonl").write_text("".join(json.dumps({**row, **more}) + "\n" for row in rows))


def load(path: Path, note: Any = quiet, seq_len: int = 96, **fields: Any) -> Conversations:
    fields = {"chat_template": str(path / "t.jinja"), "batch_size": 2, **fields}
    config = DataConfig(name=f"chat:{path}", **fields)
    model = DecoderConfig(width=4, depth=1, num_heads=1, vocab_size=256, seq_len=seq_len)
    loaded = data.load(config, model, seed=3, note=note)
    assert isinstance(loaded, Conversations)
    return loaded


def targets(batch: dict[str, np.ndarray]) -> str:
    return bytes(batch["targets"][batch["weights"] > 0].tolist()).decode()


def test_batches_are_trained_on_answers_alone_each_once_an_epoch(
    tmp_path: Path, cache_folder: Path
) -> None:
    folder = tmp_path / "talks"
    write(folder)
    with (folder / "a.jsonl").open("a") as file:
        file.write(json.dumps({"messages": [{"role": "user", "content": "nobody answers"}]}) + "\n")
        answer = {"role": "assistant", "content": "a bad answer", "weight": 0}
        file.write(json.dumps({"messages": [{"role": "user", "content": "q"}, answer]}) + "\n")
    notes: list[str] = []
    source = load(folder, notes.append, batch_size=1)
    assert any(
        "left out 2 records" in n and "a.jsonl line 41" in n and "a.jsonl line 42" in n
        for n in notes
    )
    batches = [source.train_batch(k) for k in range(source.train_size)]
    evaluation = [source.eval_batch(j) for j in range(source.eval_size)]
    for batch in (*batches, *evaluation):
        np.testing.assert_array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
    answers = ["".join(map(targets, side)).split("<e>")[:-1] for side in (batches, evaluation)]
    assert sorted(answers[0] + answers[1]) == sorted(f"answer {i}" * (1 + i % 3) for i in range(40))
    assert (len(answers[0]), len(answers[1])) == (
        source.facts["train_records"],
        source.facts["eval_records"],
    )
    assert len(batches) < len(answers[0])  # Control: windows hold several.
    again = load(folder)  # of two rows, from the cache
    np.testing.assert_array_equal(
        again.train_batch(5)["inputs"][1:], again.train_batch(5, slice(1, 2))["inputs"]
    )
    np.testing.assert_array_equal(again.train_batch(1)["inputs"][0], batches[2]["inputs"][0])
    all_of_it = load(folder, loss_on="all")
    assert "<s>user\nq1" in "".join(
        targets(all_of_it.train_batch(k)) for k in range(all_of_it.train_size)
    )
    assert all_of_it.facts["digest"] != source.facts["digest"]


def test_conversations_of_a_window_do_not_see_one_another_where_asked(
    tmp_path: Path, cache_folder: Path
) -> None:
    write(tmp_path)
    batch = load(tmp_path, document_mask=True, reset_positions=True).train_batch(0)
    for segments, positions, inputs in zip(
        batch["segments"], batch["positions"], batch["inputs"], strict=True
    ):
        starts = np.flatnonzero(positions == 0)
        np.testing.assert_array_equal(starts, np.flatnonzero(np.diff(segments, prepend=-1)))
        assert all(
            bytes(inputs[s : s + 7].tolist()) in (b"<s>user", bytes(len(inputs[s : s + 7])))
            for s in starts
        )
        assert len(starts) >= 2


def test_a_table_is_read_as_lines_are(tmp_path: Path, cache_folder: Path) -> None:
    write(tmp_path / "lines")
    write(tmp_path / "table")
    lines = tmp_path / "table" / "a.jsonl"
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    lines.unlink()
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "table" / "a.parquet")
    one, other = load(tmp_path / "lines"), load(tmp_path / "table")
    np.testing.assert_array_equal(one.train_batch(0)["inputs"], other.train_batch(0)["inputs"])


def test_weights_of_a_table_are_read_too(tmp_path: Path, cache_folder: Path) -> None:
    write(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    (tmp_path / "a.jsonl").unlink()
    for row in rows[::2]:
        row["messages"] = [
            {"role": "assistant", "content": "a draft", "weight": 0.0},
            *row["messages"],
        ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    source = load(tmp_path)
    batches = [source.train_batch(k) for k in range(source.train_size)]
    assert any(
        "a draft" in bytes(batch["inputs"].reshape(-1).tolist()).decode() for batch in batches
    )
    assert "a draft" not in "".join(map(targets, batches))


def test_a_folder_of_conversations_is_known_by_its_records(tmp_path: Path) -> None:
    write(tmp_path / "talks")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.jsonl").write_text('{"text": "a"}\n')
    assert in_folder(tmp_path / "talks")
    assert in_folder(tmp_path / "talks" / "a.jsonl")
    assert not in_folder(tmp_path / "texts")


@pytest.mark.parametrize(
    ("more", "fields", "text"),
    [
        ({"tools": [1]}, {}, "a.jsonl line 1 has tools"),
        ({"messages": [{"role": "bot"}]}, {}, r"a.jsonl line 1: messages\[0\] has the role 'bot'"),
        ({"messages": "hi"}, {}, "no text but str|no field 'messages'"),
        ({"messages": [{**TALK[2], "weight": 0.5}]}, {}, r"a.jsonl line 1: messages\[0\] has the weight 0.5"),
        ({}, {"field": "talk"}, "no field 'talk'; write --data.field messages"),
        ({}, {"chat_template": None}, "no chat template beside data.tokenizer bytes"),
        ({}, {"tokenizer": "ids:200"}, "a number of ids and no words; write bytes, bpe:SIZE, or the path"),
        ({}, {"tokenizer": "bpe:300"}, "bpe:300 and a model of 256 tokens; write --model.vocab-size 300"),
        ({}, {"seq_len": 12}, "no answer within 12 tokens"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said(
    more: dict[str, Any], fields: dict[str, Any], text: str, tmp_path: Path, cache_folder: Path
) -> None:
    write(tmp_path, **more)
    with pytest.raises(DataError, match=text):
        load(tmp_path, **fields)


def test_noise_is_not_put_on_conversations(tmp_path: Path, cache_folder: Path) -> None:
    write(tmp_path)
    fields: dict[str, Any] = {
        "name": f"chat:{tmp_path}",
        "batch_size": 1,
        "chat_template": str(tmp_path / "t.jinja"),
    }
    noise = denoising.noise_of(DataConfig(**fields, noise="infilling"))
    with pytest.raises(DataError, match="is conversations, and noise is put on text"):
        denoising.denoising(DataConfig(**fields), noise, inputs=96, seed=0, note=quiet)


def test_the_flags_are_of_chats_and_messages_are_no_text(
    tmp_path: Path, cache_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path)
    words = ["lm-tiny", "--workdir", str(tmp_path / "run"), "--data.name"]
    assert main(["train", *words, f"text:{tmp_path / 'a.jsonl'}", "--data.loss-on", "all"]) == 2
    assert "--data.loss-on is not read with the data text:" in capsys.readouterr().err
    assert main(["train", *words, f"records:{tmp_path / 'a.jsonl'}"]) == 2
    assert "but messages of a chat; write data.name chat:PATH" in capsys.readouterr().err
