"""Tokenizer, end of text, chat template and generation config, in exports and imports."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, processors

from mupax.train.data.chats import templates
from mupax.train.data.text import named_tokenizers
from mupax.train.reuse import runs, trained
from mupax.train.reuse.generate.texts import Texts
from mupax.train.reuse.huggingface import tokenizer_files
from mupax.train.reuse.serve.command import Serve, opened_service
from tests.fixtures.devices import one_device
from tests.fixtures.generators import shared_generators
from tests.fixtures.idle_steps import idle_steps
from tests.fixtures.programs import shared_programs
from tests.train.checkpoints.test_assets import of_an_older_version
from tests.train.reuse.commands import call, change_json, read_json, refuse, succeed
from tests.train.reuse.huggingface.parity_marks import needs_transformers
from tests.train.reuse.random_weights import LLAMA, published

__all__ = ["idle_steps", "one_device", "shared_generators", "shared_programs"]  # fixtures

MODEL = dataclasses.replace(LLAMA, width=8, depth=1, mlp_ratio=2.5, vocab_size=300, seq_len=32)
TINY = (
    "--model.vocab-size 300 --model.width 8 --model.depth 1 --model.num-heads 2 --model.seq-len 32 "
    "--model.positions rotary --model.norm rmsnorm --model.activation swiglu --model.no-bias "
    "--data.batch-size 8 --data.eval-examples 8 --log.no-samples --log.no-tensorboard --steps 1 "
)
CHATML = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WITH_TOKENS = (
    "\n{{ bos_token }}"
    "{% for m in messages %}{{ m['role'] + m['content'] }}{{ eos_token }}{% endfor %}"
)
TALK = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]
GREEDY = "--temperature 0 --tokens 5 --prompt"
COMPANION_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
)


def save_tokenizer(path: Path, *specials: str, begin: str | None = None) -> Tokenizer:
    """Write a byte-level tokenizer.json.

    Args:
        specials: Special tokens at the end of the vocabulary.
        begin: The token that it puts before a text.
    """
    library = named_tokenizers.train_bpe([b"the cat sat on the mat and the dog ran"] * 4, 280)
    library.add_special_tokens([AddedToken(token, special=True) for token in specials])
    if begin is not None:
        library.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, library.token_to_id(begin))]
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    library.save(str(path))
    return library


@pytest.fixture(scope="module", autouse=True)
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the current folder, with three runs and their exports in `out`.

    `said` is on text with a separator of its choice, `odd` on text with an unusual end, and `chat`
    on conversations.
    """
    folder = tmp_path_factory.mktemp("text_files")
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setenv("MUPAX_DATA", str(folder / "cache"))
        Path("texts").mkdir()
        for name in "abcdefghij":
            text = f"the cat {name} sat on the mat and the dog ran. "
            Path("texts", f"{name}.txt").write_text(text * 30)
        save_tokenizer(Path("said.json"), "<|im_end|>", "<s>", "<pad>", begin="<s>")
        save_tokenizer(Path("odd.json"))
        odd = Path("odd.json").read_text().replace("<|endoftext|>", "<<fin>>")
        Path("odd.json").write_text(odd)
        save_tokenizer(Path("chat.json"), "<|im_start|>", "<|im_end|>")
        Path("chatml.jinja").write_text(CHATML)
        talk = json.dumps({"messages": TALK})
        talks = [talk.replace("cat", f"cat {i}") + "\n" for i in range(60)]
        Path("talks.jsonl").write_text("".join(talks))
        for name, words in {
            "said": "text:texts --data.separator <|im_end|>",
            "odd": "text:texts --data.separator <<fin>>",
            "chat": "chat:talks.jsonl --data.chat-template chatml.jinja",
        }.items():
            tokenizer = f"--data.tokenizer {name}.json --workdir {name}"
            succeed("train lm-tiny", TINY, tokenizer, "--data.name", words)
        yield folder


@functools.cache
def exported(run: str) -> tuple[Path, str]:
    """Export a run once. Return the folder, and what the command printed."""
    folder = Path("out", run)
    return folder, succeed("export", run, "--out", folder).text


def token_id(path: str | Path, token: str) -> int:
    number = Tokenizer.from_file(str(path)).token_to_id(token)
    assert number is not None
    return number


def texts_of(*paths: str | Path, prompt: str = "the", words: str = "") -> set[str]:
    """Return the texts that `generate` writes with each of these models."""
    return {succeed("generate", path, GREEDY, prompt, words).out for path in paths}


# Export of a run


def test_a_runs_separator_ends_its_texts_and_a_begin_token_that_it_never_saw_is_left_out() -> None:
    out, output = exported("said")
    end = token_id("said.json", "<|im_end|>")
    pad = token_id("said.json", "<pad>")
    ids = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": pad}
    for name in ("config.json", "generation_config.json"):
        assert read_json(out, name).items() >= ids.items()
    tokens = {"bos_token": "<|im_end|>", "eos_token": "<|im_end|>", "pad_token": "<pad>"}
    assert read_json(out, "tokenizer_config.json").items() >= tokens.items()
    assert "<s>" in output
    assert "tokenizer.json" in output
    before = Tokenizer.from_file("said.json")
    after = Tokenizer.from_file(str(out / "tokenizer.json"))
    begin = token_id("said.json", "<s>")
    assert before.encode("the cat").ids == [begin, *after.encode("the cat").ids]
    assert before.get_vocab() == after.get_vocab()
    # The export writes as the run does: after the same prompt, and after an empty one.
    for prompt in ("the", "''"):
        assert len(texts_of("said", out, prompt=prompt)) == 1


def test_another_tokenizer_than_the_runs_is_refused_unless_that_is_lost(tmp_path: Path) -> None:
    shutil.copytree("odd", tmp_path / "bytes")
    config = read_json(tmp_path, "bytes", "config.json")["config"]
    config["data"] |= {"tokenizer": "bytes", "separator": None}
    change_json(tmp_path / "bytes/config.json", config=config, data={"tokenizer": "bytes"})
    of_an_older_version(tmp_path / "bytes")
    words = "export {} --tokenizer {} --out new"
    for run, file in (("odd", "chat.json"), ("chat", "said.json")):
        assert f"is another tokenizer than that of {run}" in refuse(words.format(run, file))
    assert "are bytes" in refuse(words.format(tmp_path / "bytes", "chat.json"))
    assert not Path("new").exists()

    succeed(f"export odd --tokenizer odd.json --out {tmp_path / 'same'}")
    shutil.copytree("chat", tmp_path / "lost")
    of_an_older_version(tmp_path / "lost")
    change_json(tmp_path / "lost/config.json", data={"tokenizer": "tokenizer-0000"})
    text = succeed(words.format(tmp_path / "lost", "chat.json").replace("new", "out/lost")).text
    assert "caution: chat.json is not, to the byte, the tokenizer" in text


def test_a_tokenizer_without_added_tokens_is_copied_to_the_byte() -> None:
    out, output = exported("odd")
    assert (out / "tokenizer.json").read_bytes() == Path("odd.json").read_bytes()
    assert "never" not in output  # the control


def test_an_end_token_of_an_unusual_name_is_exported_and_found_again(tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(exported("odd")[0], out)
    end = token_id("odd.json", "<<fin>>")
    assert read_json(out, "config.json")["eos_token_id"] == end
    assert read_json(out, "tokenizer_config.json")["eos_token"] == "<<fin>>"
    succeed("import", out, "--out", tmp_path / "in")
    for path in (out, tmp_path / "in"):
        assert trained.open_model(path).tokenizer().separator == end
        texts_of(path)
    (out / "tokenizer_config.json").unlink()  # config.json alone says it then
    assert trained.open_model(out).tokenizer().separator == end
    # Another tokenizer than the one beside the weights has its own separator.
    texts_of(out, words="--data.tokenizer bytes")
    succeed("eval", out, "--data.name text:texts --data.tokenizer bytes")


def test_weights_with_a_file_of_an_unusual_end_say_how_to_name_it(tmp_path: Path) -> None:
    origin = published(tmp_path / "hf", MODEL)
    words = "--tokenizer odd.json --out"
    for refused in (
        call("export", origin, words, tmp_path / "none"),
        call("export odd --separator <<fin>> --out", tmp_path / "none"),
    ):
        assert refused.code == 2
        assert "--separator" in refused.text
    succeed("export", origin, "--separator <<fin>>", words, tmp_path / "out")
    end = token_id("odd.json", "<<fin>>")
    assert read_json(tmp_path, "out", "config.json")["eos_token_id"] == end


def test_a_chat_run_ends_with_its_answers_end_and_has_its_template(tmp_path: Path) -> None:
    out, _ = exported("chat")
    end = token_id("chat.json", "<|im_end|>")
    between = token_id("chat.json", "<|endoftext|>")
    for name in ("config.json", "generation_config.json"):
        ids = {"eos_token_id": end, "bos_token_id": between}
        assert read_json(out, name).items() >= ids.items()
    assert read_json(out, "tokenizer_config.json")["eos_token"] == "<|im_end|>"
    assert (out / "chat_template.jinja").read_text() == CHATML
    assert "apply_chat_template" in (out / "README.md").read_text()
    succeed("import", out, "--out", tmp_path / "in")
    for path in (out, tmp_path / "in"):
        # The run's separator still parts documents, and answers end where the run's do.
        assert trained.open_model(path).tokenizer().separator == between
        assert template_and_ends(path) == (CHATML, {end, between})


def test_answers_that_end_with_words_need_a_stop_string_in_transformers(tmp_path: Path) -> None:
    run = tmp_path / "words"
    template = tmp_path / "words.jinja"
    template.write_text(CHATML.replace("<|im_end|>", " (end)"))
    data = (
        f"--data.name chat:talks.jsonl --data.tokenizer chat.json --data.chat-template {template}"
    )
    succeed("train lm-tiny", TINY, data, "--workdir", run)
    text = succeed("export", run, "--out", tmp_path / "out").text
    assert "answers end with '(end)', which is no token" in " ".join(text.split())
    assert "which is no token" not in exported("chat")[1]


def template_and_ends(path: Path) -> tuple[str, set[int]]:
    """Return the chat template of a server, and the tokens that end its texts."""
    service = opened_service(Serve(workdir=path))
    try:
        assert service.template is not None
        return service.template.source, {*service._ends}
    finally:
        service.close()


def test_a_template_that_is_gone_is_said(tmp_path: Path) -> None:
    run = tmp_path / "chat"
    shutil.copytree("chat", run)
    of_an_older_version(run)  # a newer one has its template with it
    config = read_json(run, "config.json")["config"]
    config["data"]["chat_template"] = str(tmp_path / "none.jinja")
    change_json(run / "config.json", config=config)
    assert "none.jinja" in succeed("export", run, "--out", tmp_path / "out").text
    assert not (tmp_path / "out" / "chat_template.jinja").exists()


def test_a_template_renders_as_in_training_whatever_the_tokens_are_called_there() -> None:
    in_training = templates.Template(WITH_TOKENS, "x", {"bos_token": '<"b\\>'})
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    exported_template = templates.Template(in_training.with_tokens(tokens), "y", tokens)
    expected = '\n<"b\\>userthe catassistantsat'
    for template in (in_training, exported_template):
        assert template.render(TALK, prompt=True) == expected
    # Nothing has to be said anew.
    assert in_training.with_tokens({"bos_token": '<"b\\>'}) == WITH_TOKENS


BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}
BERT = {"type": "BertProcessing", "sep": ["</s>", 1], "cls": ["<s>", 0]}
ROBERTA = {**BERT, "type": "RobertaProcessing", "trim_offsets": True, "add_prefix_space": False}


@pytest.mark.parametrize(
    ("processor", "adds_nothing"), [(BYTE_LEVEL, True), (BERT, False), (ROBERTA, False)]
)
def test_every_way_of_adding_tokens_is_taken_out(
    processor: dict[str, Any], adds_nothing: bool, tmp_path: Path
) -> None:
    save_tokenizer(tmp_path / "t.json", "<s>", "</s>")
    for post_processor in (processor, {"type": "Sequence", "processors": [processor]}):
        change_json(tmp_path / "t.json", post_processor=post_processor)
        content = (tmp_path / "t.json").read_bytes()
        before = Tokenizer.from_buffer(content)
        after = Tokenizer.from_buffer(tokenizer_files.without_added_tokens(content))
        plain = after.encode("the cat", add_special_tokens=False).ids
        assert after.encode("the cat").ids == plain
        assert (before.encode("the cat").ids == plain) == adds_nothing  # the control


# Import, and its export


@pytest.fixture(scope="module")
def llama(work: Path) -> Path:
    """Weights with all the files that are published with a model that chats."""
    folder = published(work / "llama", MODEL)
    specials = ("<|im_start|>", "<|im_end|>", "<s>")
    library = save_tokenizer(folder / "tokenizer.json", *specials, begin="<s>")
    ends = [library.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>")]
    ids = {"bos_token_id": library.token_to_id("<s>"), "eos_token_id": ends}
    change_json(folder / "config.json", **ids)
    tokens = {"eos_token": "<|im_end|>", "bos_token": {"content": "<s>", "lstrip": False}}
    config = {**tokens, "chat_template": CHATML, "padding_side": "left"}
    generation = {"temperature": 0.6, "do_sample": True, **ids}
    for name, fields in {
        "tokenizer_config.json": config,
        "special_tokens_map.json": tokens,
        "generation_config.json": generation,
    }.items():
        (folder / name).write_text(json.dumps(fields))
    return folder


@pytest.fixture(scope="module")
def imported(llama: Path) -> Path:
    """The weights as `import` writes them under mup."""
    folder = llama.with_name("imported")
    output = succeed("import", llama, "--preset mup --base lm-proxy --out", folder).text
    assert "tokenizer.json" in output
    return folder


def test_import_and_export_keep_what_lies_beside_weights(
    llama: Path, imported: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    succeed("export", imported, "--out", out)
    for name in COMPANION_FILES:
        for folder in (imported, out):
            assert (folder / name).read_bytes() == (llama / name).read_bytes()
    expected = read_json(llama, "config.json")
    config = read_json(out, "config.json")
    for name in ("bos_token_id", "eos_token_id"):
        assert config[name] == expected[name] is not None
    assert "AutoTokenizer" in (out / "README.md").read_text()


def test_an_imported_folder_needs_no_flags(llama: Path, imported: Path, tmp_path: Path) -> None:
    assert len(texts_of(llama, imported)) == 1
    ends = read_json(llama, "config.json")["eos_token_id"]
    assert template_and_ends(imported)[1] == {*ends}
    words = "--steps 1 --log.no-tensorboard --data.batch-size 8 --data.eval-examples 8 --workdir"
    tuned = tmp_path / "tuned"
    succeed("finetune lm talks.jsonl --from", imported, words, tuned)
    succeed("export", tuned, "--out", tmp_path / "out")
    assert read_json(tmp_path, "out", "tokenizer_config.json")["eos_token"] == "<|im_end|>"


def test_a_run_from_weights_reads_their_tokens(llama: Path, tmp_path: Path) -> None:
    origin = tmp_path / "hf"
    shutil.copytree(llama, origin)
    run = tmp_path / "run"
    words = ["train lm-tiny --data.name text:texts", TINY, "--init-from"]
    succeed(*words, origin, "--workdir", run)
    data = read_json(run, "config.json")["config"]["data"]
    assert data["tokenizer"] == str(origin / "tokenizer.json")
    assert data["separator"] is None
    shutil.rmtree(origin)  # a run that goes on has a copy
    succeed(*words, origin, "--workdir", run, "--resume --steps 2 --resume-change schedule")
    # The control: another vocabulary is another text.
    other = "--model.vocab-size 256 --init-new token_embedding readout --workdir"
    succeed(*words, exported("odd")[0], other, tmp_path / "other")
    assert read_json(tmp_path, "other", "config.json")["config"]["data"]["tokenizer"] == "bytes"


def test_weights_of_a_run_on_bytes_say_so(tmp_path: Path) -> None:
    origin = published(tmp_path / "hf", dataclasses.replace(MODEL, vocab_size=256))
    change_json(origin / "config.json", mupax={"tokenizer": "bytes"})
    (origin / "chat_template.jinja").write_text(CHATML)
    imported = tmp_path / "in"
    out = tmp_path / "out"
    succeed("import", origin, "--out", imported)
    output = succeed("export", imported, "--out", out).text
    assert output.count("--licence") == 1  # every note once
    assert read_json(out, "config.json")["mupax"]["tokenizer"] == "bytes"
    template = trained.open_model(imported).config.data.chat_template
    assert template == str(imported / "chat_template.jinja")
    assert (out / "chat_template.jinja").read_text() == CHATML
    assert len(texts_of(origin, imported, out)) == 1


def test_scores_of_weights_begin_with_their_begin_token(
    llama: Path, imported: Path, tmp_path: Path
) -> None:
    """The lm-eval harness does the same: the first token comes after <s>, not after an end."""
    text = "the cat sat on the mat and the dog ran"
    named = tmp_path / "named"  # the token is named, and the tokenizer does not add it
    shutil.copytree(llama, named)
    content = (llama / "tokenizer.json").read_bytes()
    (named / "tokenizer.json").write_bytes(tokenizer_files.without_added_tokens(content))
    unnamed = tmp_path / "unnamed"
    shutil.copytree(named, unnamed)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        (unnamed / name).unlink()
    begin = token_id(llama / "tokenizer.json", "<s>")
    end = token_id(llama / "tokenizer.json", "<|endoftext|>")
    for folder, first in {llama: begin, imported: begin, named: begin, unnamed: end}.items():
        texts = Texts(folder)
        tokens = texts.tokenizer.encode([text.encode()])[0]
        expected = pytest.approx(log_probabilities(llama, [first, *tokens]).sum(), abs=1e-3)
        assert texts.rolling([text])[0] == expected
        assert texts.likelihoods([("", text)])[0].logprob == expected


@functools.cache
def forward_pass(folder: Path) -> Any:
    """Return a compiled function from `MODEL.seq_len + 1` tokens to log-probabilities."""
    run = trained.open_model(folder)
    program = runs.on_one_device(run.config)
    params = run.params(program.abstract)
    factors = program.inputs.factors

    def read(tokens: jax.Array) -> jax.Array:
        logits = program.definition.apply(
            params, factors.multiplier, factors.forward, tokens[None, :-1]
        )
        return jnp.take_along_axis(jax.nn.log_softmax(logits)[0], tokens[1:, None], axis=-1)[:, 0]

    return jax.jit(read)


def log_probabilities(folder: Path, ids: list[int]) -> np.ndarray:
    """Return the log-probability of each token but the first, after those before it."""
    tokens = np.zeros(MODEL.seq_len + 1, np.int32)
    tokens[: len(ids)] = ids
    return np.asarray(forward_pass(folder)(tokens))[: len(ids) - 1]


def test_evaluation_of_weights_begins_every_document_with_their_begin_token(
    llama: Path, tmp_path: Path
) -> None:
    words = ["the cat sat", "on the mat"]
    records = tmp_path / "records"
    records.mkdir()
    for part, count in (("train", 9), ("eval", 1)):
        lines = [json.dumps({"text": word}) + "\n" for word in words * count]
        (records / f"{part}.jsonl").write_text("".join(lines))
    library = Tokenizer.from_file(str(llama / "tokenizer.json"))
    begin = library.token_to_id("<s>")
    end = library.token_to_id("<|endoftext|>")
    report_file = tmp_path / "report.json"
    succeed("eval", llama, f"--data.name records:{records} --json", report_file)
    report = read_json(report_file)
    first, second = [
        [begin, *library.encode(word, add_special_tokens=False).ids, end] for word in words
    ]
    assert report["targets"] == len(first) - 1 + len(second) - 1
    # One window holds both, in either order, and no <s> is a target.
    losses = []
    for ids in (first + second, second + first):
        is_target = np.array(ids[1:]) != begin
        losses.append(-log_probabilities(llama, ids)[is_target].mean())
    assert any(report["loss"] == pytest.approx(loss, abs=1e-4) for loss in losses)
    num_bytes = sum(map(len, words)) + 2
    bits = report["loss"] / math.log(2) * report["targets"] / num_bytes
    assert report["bits_per_byte"] == pytest.approx(bits, rel=1e-6)


def test_without_a_generation_config_import_writes_the_ids_of_config_json(
    llama: Path, tmp_path: Path
) -> None:
    origin = tmp_path / "hf"
    shutil.copytree(llama, origin)
    (origin / "generation_config.json").unlink()
    succeed("import", origin, "--out", tmp_path / "in")
    config = read_json(llama, "config.json")
    ids = {name: config[name] for name in ("bos_token_id", "eos_token_id")}
    assert read_json(tmp_path, "in", "generation_config.json") == ids


def test_a_folder_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    origin = published(tmp_path / "hf", MODEL)
    imported = tmp_path / "in"
    assert "--data.tokenizer" in succeed("import", origin, "--out", imported).text
    names = sorted(path.name for path in imported.glob("[!.]*"))
    assert names == ["model.json", "model.safetensors"]
    succeed("export", imported, "--out", tmp_path / "out")
    assert not (tmp_path / "out" / "generation_config.json").exists()


# In `transformers`


@pytest.mark.parity
@needs_transformers
@pytest.mark.parametrize("run", ["said", "odd", "chat"])
def test_transformers_tokenizes_as_the_run_and_stops_at_its_end(run: str) -> None:
    import torch
    import transformers

    out, _ = exported(run)
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    own = trained.open_model(Path(run)).tokenizer()
    for text in ("the cat sat", " on<|endoftext|>the mat ", "é 中\n"):
        ids = own.encode([text.encode()])[0].tolist()
        assert tokenizer(text)["input_ids"] == ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == own.decode(ids)
    end = tokenizer.eos_token_id
    assert model.generation_config.eos_token_id == end == model.config.eos_token_id
    assert model.generation_config.bos_token_id == tokenizer.bos_token_id
    prompt = tokenizer("the cat", return_tensors="pt")
    length = prompt["input_ids"].shape[1]
    for likely in (end, 5):  # the second is the control
        with torch.no_grad():
            model.lm_head.weight.zero_()
            hidden = model.model(**prompt).last_hidden_state[0, -1]
            model.lm_head.weight[likely] = hidden
        written = model.generate(**prompt, max_new_tokens=9, do_sample=False)[0, length:]
        assert written[0] == likely
        assert (len(written) == 1) == (likely == end)


@pytest.mark.parity
@needs_transformers
@pytest.mark.parametrize("case", ["own end", "tokens of another file"])
def test_transformers_renders_conversations_as_the_run(case: str, tmp_path: Path) -> None:
    import transformers

    run = Path("chat")
    if case == "tokens of another file":
        # Named by files beside the tokenizer, and used by the template.
        folder = tmp_path / "published"
        save_tokenizer(folder / "tokenizer.json", "<s>", "</s>", "<|im_end|>", begin="<s>")
        source = (
            "{{ bos_token }}{% for m in messages %}"
            "{{ m['role'] + eos_token + m['content'] + '<|im_end|>' }}{% endfor %}"
        )
        tokens = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": source}
        (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
        words = "train lm-tiny --data.name chat:talks.jsonl --data.tokenizer"
        run = tmp_path / "run"
        succeed(words, folder / "tokenizer.json", TINY, "--workdir", run)
    succeed("export", run, "--out", tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    opened_run = trained.open_model(run)
    own = opened_run.tokenizer()
    data = opened_run.config.data
    template = templates.find(data.tokenizer, data.chat_template)
    assert template is not None
    for talk, prompt in ((TALK, False), (TALK[:1], True)):
        text = template.render(talk, prompt=prompt)
        render = functools.partial(
            tokenizer.apply_chat_template, talk, add_generation_prompt=prompt
        )
        assert render(tokenize=False) == text
        ids = render(tokenize=True, return_dict=False)
        assert ids == own.encode([text.encode()])[0].tolist()
    assert tokenizer.eos_token == "<|im_end|>"


@pytest.mark.parity
@needs_transformers
def test_transformers_reads_what_was_imported_and_exported_as_it_was_published(
    llama: Path, imported: Path, tmp_path: Path
) -> None:
    import transformers

    out = tmp_path / "out"
    succeed("export", imported, "--out", out)
    before, after = [transformers.AutoTokenizer.from_pretrained(path) for path in (llama, out)]
    assert before("the cat")["input_ids"] == after("the cat")["input_ids"]
    assert before.special_tokens_map == after.special_tokens_map
    texts = [tokenizer.apply_chat_template(TALK, tokenize=False) for tokenizer in (before, after)]
    assert texts[0] == texts[1]
    configs = [
        transformers.GenerationConfig.from_pretrained(path).to_dict() for path in (llama, out)
    ]
    assert configs[0] == configs[1]
    assert configs[0]["temperature"] == 0.6
