"""Files of other programs: what their own code makes of them, right configs and wrong ones, and files that are none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mupax.presets.verify import formats
from mupax.presets.verify.formats.dump import Dump
from tests.fixtures.commands import command
from tests.presets.verify.dumps import CONFIGS

pytestmark = pytest.mark.core

DEEP = "[" * 3000 + "]" * 3000
"""A value that is nested deeper than Python's functions go."""


def read(*names: str) -> list[Dump]:
    return formats.read([CONFIGS / name for name in names])


def verify(*paths: str | Path, flags: str = "") -> tuple[int, str]:
    """Return the exit code of `verify` and what it prints, in one line."""
    done = command("verify", *map(str, paths), flags)
    return done.code, f"{done.text} {done.message}"


def rewritten(folder: Path, name: str, words: dict[str, str]) -> Path:
    """Write a config with words replaced."""
    text = (CONFIGS / name).read_text()
    for before, after in words.items():
        assert before in text, before
        text = text.replace(before, after)
    path = folder / name
    path.write_text(text)
    return path


def test_a_megatron_command_line_brings_its_base():
    base, large = read("megatron.sh")
    hidden = "decoder.layers.*.mlp.linear_fc1.weight"
    assert base.parameters[hidden].shape == (1024, 256)
    assert (base.head_dim, large.head_dim) == (128, 128)
    assert (base.attention, large.attention) == (1 / 128, 1 / 128)
    entry = large.parameters[hidden]
    assert entry.shape == (8192, 2048)
    assert entry.lr == pytest.approx(3e-3 / 8)
    assert entry.eps == pytest.approx(1e-8 / 8)
    assert entry.std == pytest.approx(0.02 * 8**-0.5)
    out = large.parameters["decoder.layers.*.mlp.linear_fc2.weight"]
    assert out.std == pytest.approx(0.02 * (48 * 8) ** -0.5)
    table = large.parameters["embedding.word_embeddings.weight"]
    assert (table.lr, table.std) == (3e-3, 0.02)
    assert (large.parameters["output_layer.weight"].multiplier, large.readout) == (1 / 8, None)


def test_nanogpt_mup_brings_its_base():
    base, large = read("nanogpt.sh")
    hidden = "transformer.h.*.attn.c_attn.weight"
    assert base.parameters[hidden].shape == (768, 256)
    assert (base.readout, large.readout, large.attention) == (1.0, 0.25, 1 / 64)
    entry = large.parameters[hidden]
    assert entry.shape == (3072, 1024)
    assert entry.lr == pytest.approx(1e-2 / 4)
    assert entry.std == pytest.approx(0.02 / 2)
    out = large.parameters["transformer.h.*.mlp.c_proj.weight"]
    assert out.std == pytest.approx(0.02 / (2 * 2 * 4) ** 0.5)


TABLE = "embedding_layer.word_embeddings.weight"
"""Name of the token embedding in a model of Cerebras."""


def test_a_cerebras_config_brings_its_base():
    base, large = read("cerebras.yaml")
    attention = "transformer_decoder.layers.*.self_attn.proj_q_dense_layer.weight"
    assert base.parameters[attention].shape == (256, 256)
    assert large.parameters[attention].shape == (768, 768)
    assert large.parameters[attention].lr == pytest.approx(0.002)
    out = large.parameters["transformer_decoder.layers.*.ffn.ffn.1.linear_layer.weight"]
    assert out.lr == pytest.approx(0.002)
    # Of initializer_range, for want of its own.
    assert out.std == pytest.approx(0.02 * (3 * 20) ** -0.5)
    assert (large.readout, large.attention) == (pytest.approx(1 / 3), 1 / 64)
    assert large.parameters[TABLE].multiplier == 10


@pytest.mark.parametrize(
    ("schedule", "peak"),
    [
        ("PiecewiseConstantLR: {learning_rates: [0.006, 0.0006], milestones: [100]}", 0.006),
        ("OneCycleLR: {initial_learning_rate: 0.0001, max_lr: 0.004, total_steps: 100}", 0.004),
        ("CyclicLR: {base_lr: 0.001, max_lr: 0.003}", 0.003),
        ("ConstantLR: {val: 0.002}", 0.002),
        (None, 0.005),
    ],
)
def test_the_rate_of_a_cerebras_config_is_the_peak_of_any_schedule_or_the_optimizers(
    tmp_path: Path, schedule: str | None, peak: float
):
    text = (CONFIGS / "cerebras.yaml").read_text()
    if schedule:
        text = text.partition("    - SequentialLR")[0] + f"    - {schedule}\n"
    else:
        text = text.partition("    schedulers:")[0]
        text = text.replace("weight_decay: 0.1", "weight_decay: 0.1, lr: 0.005")
    (tmp_path / "config.yaml").write_text(text)
    _, large = formats.read([tmp_path / "config.yaml"])
    assert large.parameters[TABLE].lr == peak


@pytest.mark.parametrize("name", ["megatron.sh", "nanogpt.sh", "cerebras.yaml"])
def test_their_mup_is_right_but_for_what_they_leave_out(name: str):
    code, text = verify(CONFIGS / name)
    assert code == 0
    assert "WRONG" not in text
    assert "decay lr*wd falls as width^-1" in text
    assert verify(CONFIGS / name, flags="--strict")[0] == 1


def test_control_mup_half_done_is_wrong(tmp_path: Path):
    """The step that nanoGPT-mup's own coordinate checks leave out, and a command line of Megatron that has muP at neither size."""
    enabled = "--mup_enabled=True"
    half = {enabled: f"{enabled} --mup_disable_hidden_lr_scaling=True"}
    code, text = verify(rewritten(tmp_path, "nanogpt.sh", half))
    assert code == 1
    assert "the learning rate stays and should fall as width^-1" in text
    large = rewritten(tmp_path, "megatron.sh", {"--use-mup --mup-base-hidden-size 256": ""})
    sizes = "2048 --num-attention-heads 16", "256 --num-attention-heads 2"
    small = tmp_path / "small.sh"
    small.write_text(large.read_text().replace(*sizes))
    code, text = verify(small, large)
    assert code == 1
    assert "All of it is standard parameterization: muP is off" in text


def test_olmo_has_no_mup(tmp_path: Path):
    (small,) = read("olmo.yaml")
    table = small.parameters["transformer.wte.weight"]
    assert (table.std, table.wd) == (pytest.approx(2048**-0.5), 0.0)
    assert (small.optimizer, small.readout) == ("adamw", 1.0)
    sizes = {"d_model: 2048, n_heads: 16": "d_model: 4096, n_heads: 32"}
    code, text = verify(CONFIGS / "olmo.yaml", rewritten(tmp_path, "olmo.yaml", sizes))
    assert code == 1
    assert (
        "transformer.wte.weight (token_embedding): the initial size falls as width^-0.5 and should stay"
        in text
    )
    assert "tied readout: the learning rate stays and should fall as width^-1" in text


def test_granite_is_right_in_what_its_configs_say(tmp_path: Path):
    """Granite 3's 2B and 8B, whose heads grow: logits by 1/d, and the output by 1/width."""
    names = "granite-2b.json", "granite-8b.json"
    small, large = read(*names)
    assert (small.attention, large.attention) == (1 / 64, 1 / 128)
    assert (small.readout, large.readout) == (1 / 8, 1 / 16)
    code, text = verify(*(CONFIGS / name for name in names))
    assert code == 0
    assert "nothing is wrong in what the files say" in text
    assert "a config.json has no rates" in text
    words = {'"logits_scaling": 16.0': '"logits_scaling": 8.0', "0.0078125": "0.011048543"}
    code, text = verify(CONFIGS / names[0], rewritten(tmp_path, names[1], words))
    assert code == 1
    assert "tied readout: the initial size stays and should fall as width^-1" in text
    assert (
        "attention logits: the forward multiplier falls as width^-0.5 and should fall as width^-1"
        in text
    )


def test_minicpm_grows_in_width_and_depth(tmp_path: Path):
    """MiniCPM4's 0.5B and 4.1's 8B; and one alone against its own base."""
    names = "minicpm4-0.5b.json", "minicpm4.1-8b.json"
    small, large = read(*names)
    assert large.parameters["lm_head.weight"].multiplier == 256 / 4096
    assert small.branch == pytest.approx(1.4 / 24**0.5)
    paths = [CONFIGS / name for name in names]
    assert verify(*paths)[0] == 0
    assert verify(paths[0])[0] == 0
    wrong = rewritten(tmp_path, names[1], {'"scale_depth": 1.4': '"scale_depth": 3.6'})
    code, text = verify(paths[0], wrong)
    assert code == 1
    assert "residual branches" in text


def test_falcon_h1s_output_is_by_its_width(tmp_path: Path):
    name = "falcon-h1-0.5b.json"
    wider = {
        "1024": "2048",
        '"num_attention_heads": 8': '"num_attention_heads": 16',
        '"num_key_value_heads": 2': '"num_key_value_heads": 4',
    }
    right = rewritten(tmp_path, name, {**wider, "0.0390625": "0.01953125"})
    assert verify(CONFIGS / name, right)[0] == 0
    code, text = verify(CONFIGS / name, rewritten(tmp_path, name, wider))
    assert code == 1
    assert "lm_head.weight" in text
    assert "Multiply" in text or "Write std" in text


def test_base_shapes_are_the_base_of_a_dump(tmp_path: Path):
    small, large = json.loads((CONFIGS / "mup.json").read_text())["mlp adamw"]

    def verify_with_shapes(contents: object) -> tuple[int, str]:
        dump = tmp_path / "dump.json"
        dump.write_text(json.dumps(contents))
        return verify(CONFIGS / "mlp.bsh", dump)

    code, text = verify_with_shapes(large)
    assert (code, "embed x4" in text) == (0, True)
    code, text = verify_with_shapes(small)
    assert code == 2
    assert "to mup it is its own base, and all of it is standard parameterization" in text
    large["fc_2.weight"]["lr"] = 1e-3
    code, text = verify_with_shapes(large)
    assert code == 1
    assert "fc_2.weight (hidden): the learning rate stays and should fall as width^-1" in text


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("a.sh", "python train.py --n_embd=$((width)) --n_head=2", "n_embd is '$((width))'; write the number"),
        ("a.sh", "python pretrain_gpt.py --hidden-size 64 --num-attention-heads 4", "does not say num-layers"),
        ("a.sh", "python anything.py", "has an unknown format; write a dump"),
        ("a.yaml", "a: 1", "is no config of Cerebras (model: hidden_size) or OLMo (model: d_model)"),
        ("a.yaml", "a: [", "is no YAML"),
        ("a.yaml", f"a: {DEEP}", "is no YAML"),
        ("a.json", f'{{"a": {DEEP}}}', "is no JSON"),
        ("a.json", f'{{"a": {"9" * 5000}}}', "is no JSON"),
        ("a.py", f"n_embd = {DEEP}", "is no Python"),
        ("a.py", "n_embd = " + "-" * 3000 + "1", "is no Python"),
        ("a.json", "{", "is no JSON"),
        ("a.json", "[]", "write an object"),
        ("a.json", '{"x": {"shap": [2]}}', "has no 'shap'; did you mean 'shape'?"),
        ("a.json", '{"x": {"shape": [2], "lr": -1}}', "x lr is -1; write a finite number of at least 0"),
        ("a.json", '{"model": {"optimiser": "adamw"}}', "did you mean 'optimizer'?"),
        ("a.json", '{"model": {"optimizer": "soap"}, "x": {"shape": [2]}}', "no optimizer is named 'soap'"),
        ("a.py", "n_embd = ", "is no Python"),
        ("a.py", "n_embd = 64\nn_head = 2\nmup_enabled = True\nmup_width_multiplier = n_embd / 32", "write the number"),
        ("a.bsh", "x: [1]", "give it with one dump"),
    ],
)  # fmt: skip
def test_a_file_that_is_none_is_one_message(file: str, text: str, message: str, tmp_path: Path):
    (tmp_path / file).write_text(text)
    code, shown = verify(tmp_path / file)
    assert (code, message in shown) == (2, True), shown


def test_a_file_that_is_not_there():
    code, shown = verify("nowhere.json")
    assert (code, "nowhere.json cannot be read: No such file" in shown) == (2, True)
