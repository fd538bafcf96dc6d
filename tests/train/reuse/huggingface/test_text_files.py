"""Tokenizer, end of text, chat template and generation config: written by export for a run, and kept by import and export."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import io
import json
import math
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, processors

from mupax.__main__ import main
from mupax.train.data.chats import templates
from mupax.train.data.text import named_tokenizers
from mupax.train.reuse import runs, trained
from mupax.train.reuse.harness.texts import Texts
from mupax.train.reuse.huggingface import tokenizer_files
from mupax.train.reuse.serve.command import Serve, opened_service
from mupax.zoo.configs import DecoderConfig
from tests.train.checkpoints.test_assets import of_an_older_version
from tests.train.reuse.test_source import published

MISSING = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
without_them = pytest.mark.skipif(
    bool(MISSING), reason=f"{' and '.join(MISSING)} not installed; `make parity` does it"
)
VOCAB = 300
MODEL = DecoderConfig(
    width=8, depth=1, num_heads=2, mlp_ratio=2.5, vocab_size=VOCAB, seq_len=32,
    positions="rotary", norm="rmsnorm", activation="swiglu", bias=False,
)  # fmt: skip
TINY = (
    f"--model.vocab-size {VOCAB} --model.width 8 --model.depth 1 --model.num-heads 2 --model.seq-len 32 --model.positions rotary "
    "--model.norm rmsnorm --model.activation swiglu --model.no-bias --data.batch-size 8 --data.eval-examples 8 "
    "--log.no-samples --log.no-tensorboard --steps 1"
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WITH_TOKENS = "\n{{ bos_token }}{% for m in messages %}{{ m['role'] + m['content'] }}{{ eos_token }}{% endfor %}"
TALK = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]


def save_tokenizer(
    path: Path, *specials: str, begin: str | None = None, end: str | None = None
) -> Tokenizer:
    """A byte-level tokenizer.json with these special tokens at its end, and tokens that it puts around a text."""
    library = named_tokenizers.train_bpe([b"the cat sat on the mat and the dog ran"] * 4, 280)
    library.add_special_tokens([AddedToken(token, special=True) for token in specials])
    around = [token for token in (begin, end) if token]
    if around:
        library.post_processor = processors.TemplateProcessing(
            single=" ".join(token for token in (begin, "$A", end) if token),
            special_tokens=[(token, library.token_to_id(token)) for token in around],
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    library.save(str(path))
    return library


def without_separator(path: Path) -> None:
    """Gives the token that ends a text a name of its own."""
    path.write_text(path.read_text().replace("<|endoftext|>", "<<fin>>"))


def called(*words: Any) -> tuple[int, str]:
    """Exit code and all that was printed."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = main([part for word in words for part in str(word).split()])
    return code, out.getvalue()


def done(*words: Any) -> str:
    code, out = called(*words)
    assert code == 0, out
    return out


def fields(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


@pytest.fixture(scope="module", autouse=True)
def work(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder with three runs: text with a separator of its choice, text with an unusual end, and conversations."""
    folder = tmp_path_factory.mktemp("text_files")
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setenv("MUPAX_DATA", str(folder / "cache"))
        texts = Path("texts")
        texts.mkdir()
        for name in "abcdefghij":
            (texts / f"{name}.txt").write_text(
                f"the cat {name} sat on the mat and the dog ran. " * 30
            )
        save_tokenizer(Path("said.json"), "<|im_end|>", "<s>", "<pad>", begin="<s>")
        done(
            "train",
            "lm-tiny --data.name text:texts --data.tokenizer said.json --data.separator <|im_end|>",
            TINY,
            "--workdir said",
        )
        save_tokenizer(Path("odd.json"))
        without_separator(Path("odd.json"))
        done(
            "train",
            "lm-tiny --data.name text:texts --data.tokenizer odd.json --data.separator <<fin>>",
            TINY,
            "--workdir odd",
        )
        talk = json.dumps({"messages": TALK})
        Path("talks.jsonl").write_text(
            "".join(talk.replace("cat", f"cat {i}") + "\n" for i in range(60))
        )
        save_tokenizer(Path("chat.json"), "<|im_start|>", "<|im_end|>")
        Path("chatml.jinja").write_text(CHATML)
        words = "lm-tiny --data.name chat:talks.jsonl --data.tokenizer chat.json --data.chat-template chatml.jinja"
        done("train", words, TINY, "--workdir chat")
        yield folder


def token_id(path: str, token: str) -> int:
    number = Tokenizer.from_file(path).token_to_id(token)
    assert number is not None
    return number


# Export of a run


def test_a_runs_separator_ends_its_texts_and_a_begin_token_that_it_never_saw_is_left_out(
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    output = done("export said --out", out)
    end, pad = token_id("said.json", "<|im_end|>"), token_id("said.json", "<pad>")
    ids = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": pad}
    assert fields(out / "config.json").items() >= ids.items()
    assert fields(out / "generation_config.json").items() >= ids.items()
    tokens = {"bos_token": "<|im_end|>", "eos_token": "<|im_end|>", "pad_token": "<pad>"}
    assert fields(out / "tokenizer_config.json").items() >= tokens.items()
    assert all(word in output for word in ("<s>", "tokenizer.json"))
    before, after = (
        Tokenizer.from_file(str(path)) for path in (Path("said.json"), out / "tokenizer.json")
    )
    assert before.encode("the cat").ids == [
        token_id("said.json", "<s>"),
        *after.encode("the cat").ids,
    ]
    assert before.get_vocab() == after.get_vocab()
    # What is exported writes as the run does: after the same prompt, and after an empty one.
    for prompt in ("the", "''"):
        texts = [
            done("generate", path, "--temperature 0 --tokens 5 --prompt", prompt)
            .partition(":")[0]
            .splitlines()[0]
            for path in ("said", out)
        ]
        assert texts[0] == texts[1]


def test_a_tokenizer_without_added_tokens_is_copied_to_the_byte(tmp_path: Path) -> None:
    output = done("export odd --out", tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == Path("odd.json").read_bytes()
    assert "never" not in output  # the control


def test_an_end_token_of_an_unusual_name_is_exported_and_found_again(tmp_path: Path) -> None:
    done("export odd --out", tmp_path / "out")
    end = token_id("odd.json", "<<fin>>")
    assert fields(tmp_path / "out" / "config.json")["eos_token_id"] == end
    assert fields(tmp_path / "out" / "tokenizer_config.json")["eos_token"] == "<<fin>>"
    done("import", tmp_path / "out", "--out", tmp_path / "in")
    for path in ("out", "in"):
        run = trained.open_model(tmp_path / path)
        assert run.tokenizer().separator == end
        done("generate", tmp_path / path, "--tokens 3 --prompt the")
    (tmp_path / "out" / "tokenizer_config.json").unlink()  # config.json alone says it then
    assert trained.open_model(tmp_path / "out").tokenizer().separator == end


def test_weights_with_a_file_of_an_unusual_end_say_how_to_name_it(tmp_path: Path) -> None:
    origin = published(tmp_path / "hf", MODEL)
    code, output = called("export", origin, "--tokenizer odd.json --out", tmp_path / "none")
    assert (code, "--separator" in output) == (2, True)
    done("export", origin, "--tokenizer odd.json --separator <<fin>> --out", tmp_path / "out")
    assert fields(tmp_path / "out" / "config.json")["eos_token_id"] == token_id(
        "odd.json", "<<fin>>"
    )
    code, output = called("export odd --separator <<fin>> --out", tmp_path / "none")
    assert (code, "--separator" in output) == (2, True)


def test_a_chat_run_ends_with_its_answers_end_and_has_its_template(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done("export chat --out", out)
    end, between = token_id("chat.json", "<|im_end|>"), token_id("chat.json", "<|endoftext|>")
    for name in ("config.json", "generation_config.json"):
        assert fields(out / name).items() >= {"eos_token_id": end, "bos_token_id": between}.items()
    assert fields(out / "tokenizer_config.json")["eos_token"] == "<|im_end|>"
    assert (out / "chat_template.jinja").read_text() == CHATML
    assert "apply_chat_template" in (out / "README.md").read_text()
    done("import", out, "--out", tmp_path / "in")
    for path in (out, tmp_path / "in"):
        # Documents are still parted by the run's separator, and answers end where the run's do.
        assert trained.open_model(path).tokenizer().separator == between
        service = opened_service(Serve(workdir=path))
        try:
            assert service.template is not None
            assert service.template.source == CHATML
            assert service._ends == {end, between}
        finally:
            service.close()


def test_a_template_that_is_gone_is_said(tmp_path: Path) -> None:
    shutil.copytree("chat", tmp_path / "chat")
    of_an_older_version(tmp_path / "chat")  # a newer one has its template with it
    record = fields(tmp_path / "chat" / "config.json")
    record["config"]["data"]["chat_template"] = str(tmp_path / "none.jinja")
    (tmp_path / "chat" / "config.json").write_text(json.dumps(record))
    output = done("export", tmp_path / "chat", "--out", tmp_path / "out")
    assert "none.jinja" in output
    assert not (tmp_path / "out" / "chat_template.jinja").exists()


def test_a_template_renders_as_in_training_whatever_the_tokens_are_called_there() -> None:
    trained = templates.Template(WITH_TOKENS, "x", {"bos_token": '<"b\\>'})
    exported = templates.Template(
        trained.with_tokens({"bos_token": "<s>", "eos_token": "</s>"}),
        "y",
        {"bos_token": "<s>", "eos_token": "</s>"},
    )
    assert (
        exported.render(TALK, prompt=True)
        == trained.render(TALK, prompt=True)
        == '\n<"b\\>userthe catassistantsat'
    )
    same = {"bos_token": '<"b\\>'}
    assert trained.with_tokens(same) == WITH_TOKENS  # nothing to say anew


@pytest.mark.parametrize(
    ("processor", "adds_nothing"),
    [
        ({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}, True),
        ({"type": "BertProcessing", "sep": ["</s>", 1], "cls": ["<s>", 0]}, False),
        ({"type": "RobertaProcessing", "sep": ["</s>", 1], "cls": ["<s>", 0], "trim_offsets": True, "add_prefix_space": False}, False),
    ],
)  # fmt: skip
def test_every_way_of_adding_tokens_is_taken_out(
    processor: dict[str, Any], adds_nothing: bool, tmp_path: Path
) -> None:
    save_tokenizer(tmp_path / "t.json", "<s>", "</s>")
    for value in (processor, {"type": "Sequence", "processors": [processor]}):
        content = {**fields(tmp_path / "t.json"), "post_processor": value}
        after = Tokenizer.from_buffer(
            tokenizer_files.without_added_tokens(json.dumps(content).encode())
        )
        plain = after.encode("the cat", add_special_tokens=False).ids
        assert after.encode("the cat").ids == plain
        before = Tokenizer.from_buffer(json.dumps(content).encode())
        assert (before.encode("the cat").ids == plain) == adds_nothing  # the control


# Import, and its export


@pytest.fixture(scope="module")
def llama(work: Path) -> Path:
    """Weights with all the files that are published with a model that chats."""
    folder = published(work / "llama", MODEL)
    library = save_tokenizer(
        folder / "tokenizer.json", "<|im_start|>", "<|im_end|>", "<s>", begin="<s>"
    )
    ends = [library.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>")]
    ids = {"bos_token_id": library.token_to_id("<s>"), "eos_token_id": ends}
    (folder / "config.json").write_text(json.dumps({**fields(folder / "config.json"), **ids}))
    tokens = {"eos_token": "<|im_end|>", "bos_token": {"content": "<s>", "lstrip": False}}
    config = {**tokens, "chat_template": CHATML, "padding_side": "left"}
    for name, content in {
        "tokenizer_config.json": config,
        "special_tokens_map.json": tokens,
        "generation_config.json": {"temperature": 0.6, "do_sample": True, **ids},
    }.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def test_import_and_export_keep_what_lies_beside_weights(llama: Path, tmp_path: Path) -> None:
    output = done("import", llama, "--out", tmp_path / "in --preset mup --base lm-proxy")
    assert "tokenizer.json" in output
    done("export", tmp_path / "in", "--out", tmp_path / "out")
    names = (
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "generation_config.json",
    )
    for name in names:
        for folder in ("in", "out"):
            assert (tmp_path / folder / name).read_bytes() == (llama / name).read_bytes()
    for name in ("bos_token_id", "eos_token_id"):
        assert (
            fields(tmp_path / "out" / "config.json")[name]
            == fields(llama / "config.json")[name]
            is not None
        )
    assert "AutoTokenizer" in (tmp_path / "out" / "README.md").read_text()


def test_an_imported_folder_needs_no_flags(llama: Path, tmp_path: Path) -> None:
    done("import", llama, "--out", tmp_path / "in")
    texts = [
        done("generate", path, "--temperature 0 --tokens 6 --prompt the").splitlines()[0]
        for path in (llama, tmp_path / "in")
    ]
    assert texts[0] == texts[1]
    service = opened_service(Serve(workdir=tmp_path / "in"))
    try:
        assert service.template is not None
        assert service._ends == {*fields(llama / "config.json")["eos_token_id"]}
    finally:
        service.close()
    done(
        "finetune lm talks.jsonl --from",
        tmp_path / "in",
        "--steps 1 --workdir",
        tmp_path / "tuned",
        "--log.no-tensorboard --data.batch-size 8 --data.eval-examples 8",
    )
    done("export", tmp_path / "tuned", "--out", tmp_path / "out")
    assert fields(tmp_path / "out" / "tokenizer_config.json")["eos_token"] == "<|im_end|>"


def test_a_run_from_weights_reads_their_tokens(llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path / "hf")
    words = ["lm-tiny --data.name text:texts", TINY, "--init-from", tmp_path / "hf", "--workdir"]
    done("train", *words, tmp_path / "run")
    data = fields(tmp_path / "run" / "config.json")["config"]["data"]
    assert (data["tokenizer"], data["separator"]) == (str(tmp_path / "hf" / "tokenizer.json"), None)
    shutil.rmtree(tmp_path / "hf")  # a run that goes on has a copy
    done("train", *words, tmp_path / "run", "--resume --steps 2 --resume-change schedule")
    done("export odd --out", tmp_path / "out")
    # The control: another vocabulary is another text.
    words = ["lm-tiny --data.name text:texts", TINY, "--init-from", tmp_path / "out", "--workdir"]
    done(
        "train",
        *words,
        tmp_path / "other",
        "--model.vocab-size 256 --init-new token_embedding readout",
    )
    assert fields(tmp_path / "other" / "config.json")["config"]["data"]["tokenizer"] == "bytes"


def test_weights_of_a_run_on_bytes_say_so(tmp_path: Path) -> None:
    origin = published(tmp_path / "hf", dataclasses.replace(MODEL, vocab_size=256))
    record = {**fields(origin / "config.json"), "mupax": {"tokenizer": "bytes"}}
    (origin / "config.json").write_text(json.dumps(record))
    (origin / "chat_template.jinja").write_text(CHATML)
    done("import", origin, "--out", tmp_path / "in")
    output = done("export", tmp_path / "in", "--out", tmp_path / "out")
    assert output.count("--licence") == 1  # every note once
    assert fields(tmp_path / "out" / "config.json")["mupax"]["tokenizer"] == "bytes"
    assert trained.open_model(tmp_path / "in").config.data.chat_template == str(
        tmp_path / "in" / "chat_template.jinja"
    )
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == CHATML
    texts = {
        done("generate", tmp_path / name, "--temperature 0 --tokens 3 --prompt the").splitlines()[0]
        for name in ("hf", "in", "out")
    }
    assert len(texts) == 1


def test_another_tokenizer_than_the_one_beside_weights_has_its_own_separator(
    tmp_path: Path,
) -> None:
    done("export odd --out", tmp_path / "out")
    done("generate", tmp_path / "out", "--tokens 3 --prompt the --data.tokenizer bytes")
    done("eval", tmp_path / "out", "--data.name text:texts --data.tokenizer bytes")


def test_scores_of_weights_begin_with_their_begin_token(llama: Path, tmp_path: Path) -> None:
    """As the lm-eval harness has it: the first token is predicted after <s>, and not after the end of a text."""
    text = "the cat sat on the mat and the dog ran"
    done("import", llama, "--out", tmp_path / "in")
    shutil.copytree(
        llama, tmp_path / "named"
    )  # the token is named, and the tokenizer does not add it
    content = (llama / "tokenizer.json").read_bytes()
    (tmp_path / "named" / "tokenizer.json").write_bytes(
        tokenizer_files.without_added_tokens(content)
    )
    shutil.copytree(tmp_path / "named", tmp_path / "none")
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        (tmp_path / "none" / name).unlink()
    begin, end = (
        token_id(str(llama / "tokenizer.json"), token) for token in ("<s>", "<|endoftext|>")
    )
    for folder, first in {
        llama: begin,
        tmp_path / "in": begin,
        tmp_path / "named": begin,
        tmp_path / "none": end,
    }.items():
        texts = Texts(folder)
        logp = logprobs(llama, [first, *texts.tokenizer.encode([text.encode()])[0]]).sum()
        assert texts.rolling([text])[0] == pytest.approx(logp, abs=1e-3)
        assert texts.likelihoods([("", text)])[0].logprob == pytest.approx(logp, abs=1e-3)


@functools.cache
def model_of(folder: Path) -> Any:
    """Log-probabilities of the tokens after the first of `MODEL.seq_len + 1`, as the weights have them."""
    run = trained.open_model(folder)
    program = runs.on_one_device(run.config)
    params, factors = run.params(program.abstract), program.inputs.factors

    def read(tokens: jax.Array) -> jax.Array:
        logits = program.definition.apply(
            params, factors.multiplier, factors.forward, tokens[None, :-1]
        )
        return jnp.take_along_axis(jax.nn.log_softmax(logits)[0], tokens[1:, None], axis=-1)[:, 0]

    return jax.jit(read)


def logprobs(folder: Path, ids: list[int]) -> np.ndarray:
    """Log-probability of each token but the first, after those before it."""
    tokens = np.zeros(MODEL.seq_len + 1, np.int32)
    tokens[: len(ids)] = ids
    return np.asarray(model_of(folder)(tokens))[: len(ids) - 1]


def test_evaluation_of_weights_begins_every_document_with_their_begin_token(
    llama: Path, tmp_path: Path
) -> None:
    words = ["the cat sat", "on the mat"]
    (tmp_path / "records").mkdir()
    for part, count in (("train", 9), ("eval", 1)):
        lines = [json.dumps({"text": word}) + "\n" for word in words * count]
        (tmp_path / "records" / f"{part}.jsonl").write_text("".join(lines))
    library = Tokenizer.from_file(str(llama / "tokenizer.json"))
    begin, end = library.token_to_id("<s>"), library.token_to_id("<|endoftext|>")
    done(
        "eval",
        llama,
        f"--data.name records:{tmp_path / 'records'} --json",
        tmp_path / "numbers.json",
    )
    numbers = fields(tmp_path / "numbers.json")
    documents = [[*library.encode(word, add_special_tokens=False).ids, end] for word in words]
    assert numbers["targets"] == sum(map(len, documents))
    # One window holds both: <s> the cat sat <end> <s> on the mat <end>, and no <s> is a target.
    joined = [begin, *documents[0], begin, *documents[1]]
    other = [begin, *documents[1], begin, *documents[0]]
    losses = [-logprobs(llama, ids)[np.array(ids[1:]) != begin].mean() for ids in (joined, other)]
    assert any(numbers["loss"] == pytest.approx(loss, abs=1e-4) for loss in losses)
    assert numbers["bits_per_byte"] == pytest.approx(
        numbers["loss"] / math.log(2) * numbers["targets"] / (sum(map(len, words)) + 2), rel=1e-6
    )


def test_without_a_generation_config_import_writes_the_ids_of_config_json(
    llama: Path, tmp_path: Path
) -> None:
    shutil.copytree(llama, tmp_path / "hf")
    (tmp_path / "hf" / "generation_config.json").unlink()
    done("import", tmp_path / "hf", "--out", tmp_path / "in")
    ids = {name: fields(llama / "config.json")[name] for name in ("bos_token_id", "eos_token_id")}
    assert fields(tmp_path / "in" / "generation_config.json") == ids


def test_a_folder_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    origin = published(tmp_path / "hf", MODEL)
    output = done("import", origin, "--out", tmp_path / "in")
    assert "--data.tokenizer" in output
    assert sorted(path.name for path in (tmp_path / "in").glob("[!.]*")) == [
        "model.json",
        "model.safetensors",
    ]
    done("export", tmp_path / "in", "--out", tmp_path / "out")
    assert not (tmp_path / "out" / "generation_config.json").exists()


# The same in `transformers`


@pytest.mark.parity
@without_them
@pytest.mark.parametrize("run", ["said", "odd", "chat"])
def test_transformers_tokenizes_as_the_run_and_stops_at_its_end(run: str, tmp_path: Path) -> None:
    import torch
    import transformers

    done("export", run, "--out", tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
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
@without_them
@pytest.mark.parametrize("case", ["own end", "tokens of another file"])
def test_transformers_renders_conversations_as_the_run(case: str, tmp_path: Path) -> None:
    import transformers

    run, words = "chat", []
    if (
        case == "tokens of another file"
    ):  # named by files beside the tokenizer, and used by the template
        folder = tmp_path / "published"
        save_tokenizer(folder / "tokenizer.json", "<s>", "</s>", "<|im_end|>", begin="<s>")
        source = "{{ bos_token }}{% for m in messages %}{{ m['role'] + eos_token + m['content'] + '<|im_end|>' }}{% endfor %}"
        tokens = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": source}
        (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
        words = ["--data.name chat:talks.jsonl --data.tokenizer", folder / "tokenizer.json"]
        run = tmp_path / "run"
        done("train", "lm-tiny", *words, TINY, "--workdir", run)
    done("export", run, "--out", tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    opened_run = trained.open_model(Path(run))
    own = opened_run.tokenizer()
    template = templates.find(
        opened_run.config.data.tokenizer, opened_run.config.data.chat_template
    )
    assert template is not None
    for talk, prompt in ((TALK, False), (TALK[:1], True)):
        text = template.render(talk, prompt=prompt)
        assert (
            tokenizer.apply_chat_template(talk, add_generation_prompt=prompt, tokenize=False)
            == text
        )
        ids = tokenizer.apply_chat_template(
            talk, add_generation_prompt=prompt, tokenize=True, return_dict=False
        )
        assert ids == own.encode([text.encode()])[0].tolist()
    assert tokenizer.eos_token == "<|im_end|>"


@pytest.mark.parity
@without_them
def test_transformers_reads_what_was_imported_and_exported_as_it_was_published(
    llama: Path, tmp_path: Path
) -> None:
    import transformers

    done("import", llama, "--out", tmp_path / "in")
    done("export", tmp_path / "in", "--out", tmp_path / "out")
    before, after = (
        transformers.AutoTokenizer.from_pretrained(path) for path in (llama, tmp_path / "out")
    )
    assert before("the cat")["input_ids"] == after("the cat")["input_ids"]
    assert before.special_tokens_map == after.special_tokens_map
    texts = [tokenizer.apply_chat_template(TALK, tokenize=False) for tokenizer in (before, after)]
    assert texts[0] == texts[1]
    configs = [
        transformers.GenerationConfig.from_pretrained(path).to_dict()
        for path in (llama, tmp_path / "out")
    ]
    assert configs[0] == configs[1]
    assert configs[0]["temperature"] == 0.6
