"""Files of other programs: what their own code makes of them, right configs and wrong ones, and files that are none."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest

from mupax.__main__ import main
from mupax.presets.verify import formats
from mupax.presets.verify.formats.dump import Dump
from tests.presets.verify.dumps import CONFIGS

pytestmark = pytest.mark.core

DEEP = "[" * 3000 + "]" * 3000
"""A value that is nested deeper than Python's functions go."""


def read(*names: str) -> list[Dump]:
    return formats.read([CONFIGS / name for name in names])


def verify(*words: str) -> tuple[int, str]:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        code = main(["verify", *words])
    return code, " ".join(shown.getvalue().split())


def rewritten(folder: Path, name: str, **words: str) -> str:
    """A config with words replaced: underscores in a key are spaces, as in `hidden_size` never."""
    text = (CONFIGS / name).read_text()
    for before, after in words.items():
        assert before in text, before
        text = text.replace(before, after)
    (folder / name).write_text(text)
    return str(folder / name)


def test_a_megatron_command_line_brings_its_base():
    base, large = read("megatron.sh")
    hidden = "decoder.layers.*.mlp.linear_fc1.weight"
    table = "embedding.word_embeddings.weight"
    assert (base.parameters[hidden].shape, large.parameters[hidden].shape) == (
        (1024, 256),
        (8192, 2048),
    )
    assert (base.head_dim, large.head_dim, base.attention, large.attention) == (
        128,
        128,
        1 / 128,
        1 / 128,
    )
    assert large.parameters[hidden].lr == pytest.approx(3e-3 / 8)
    assert large.parameters[hidden].eps == pytest.approx(1e-8 / 8)
    assert large.parameters[hidden].std == pytest.approx(0.02 * 8**-0.5)
    assert large.parameters["decoder.layers.*.mlp.linear_fc2.weight"].std == pytest.approx(
        0.02 * (48 * 8) ** -0.5
    )
    assert (large.parameters[table].lr, large.parameters[table].std) == (3e-3, 0.02)
    assert (large.parameters["output_layer.weight"].multiplier, large.readout) == (1 / 8, None)


def test_nanogpt_mup_brings_its_base():
    base, large = read("nanogpt.sh")
    hidden = "transformer.h.*.attn.c_attn.weight"
    out = "transformer.h.*.mlp.c_proj.weight"
    assert (base.parameters[hidden].shape, large.parameters[hidden].shape) == (
        (768, 256),
        (3072, 1024),
    )
    assert (base.readout, large.readout, large.attention) == (1.0, 0.25, 1 / 64)
    assert large.parameters[hidden].lr == pytest.approx(1e-2 / 4)
    assert large.parameters[hidden].std == pytest.approx(0.02 / 2)
    assert large.parameters[out].std == pytest.approx(0.02 / (2 * 2 * 4) ** 0.5)


def test_a_cerebras_config_brings_its_base():
    base, large = read("cerebras.yaml")
    attention = "transformer_decoder.layers.*.self_attn.proj_q_dense_layer.weight"
    out = "transformer_decoder.layers.*.ffn.ffn.1.linear_layer.weight"
    assert (base.parameters[attention].shape, large.parameters[attention].shape) == (
        (256, 256),
        (768, 768),
    )
    assert (large.parameters[attention].lr, large.parameters[out].lr) == pytest.approx(
        (0.002, 0.002)
    )
    assert large.parameters[out].std == pytest.approx(
        0.02 * (3 * 20) ** -0.5
    )  # initializer_range, for want of its own
    assert (large.readout, large.attention) == (pytest.approx(1 / 3), 1 / 64)
    assert large.parameters["embedding_layer.word_embeddings.weight"].multiplier == 10


@pytest.mark.parametrize(
    ("schedule", "peak"),
    [
        ("PiecewiseConstantLR: {learning_rates: [0.006, 0.0006], milestones: [100]}", 0.006),
        ("OneCycleLR: {initial_learning_rate: 0.0001, max_lr: 0.004, total_steps: 100}", 0.004),
        ("CyclicLR: {base_lr: 0.001, max_lr: 0.003}", 0.003),
        ("ConstantLR: {val: 0.002}", 0.002),
    ],
)
def test_the_rate_of_a_cerebras_config_is_the_peak_of_any_schedule(
    tmp_path: Path, schedule: str, peak: float
):
    before, _, _ = (CONFIGS / "cerebras.yaml").read_text().partition("    - SequentialLR")
    (tmp_path / "config.yaml").write_text(f"{before}    - {schedule}\n")
    _, large = formats.read([tmp_path / "config.yaml"])
    assert large.parameters["embedding_layer.word_embeddings.weight"].lr == peak


def test_the_rate_of_a_cerebras_config_may_be_in_its_optimizer(tmp_path: Path):
    before, _, _ = (CONFIGS / "cerebras.yaml").read_text().partition("    schedulers:")
    before = before.replace("weight_decay: 0.1", "weight_decay: 0.1, lr: 0.005")
    (tmp_path / "config.yaml").write_text(before)
    _, large = formats.read([tmp_path / "config.yaml"])
    assert large.parameters["embedding_layer.word_embeddings.weight"].lr == 0.005


@pytest.mark.parametrize("name", ["megatron.sh", "nanogpt.sh", "cerebras.yaml"])
def test_their_mup_is_right_but_for_what_they_leave_out(name: str):
    code, text = verify(str(CONFIGS / name))
    assert code == 0
    assert "WRONG" not in text
    assert "decay lr*wd falls as width^-1" in text
    assert verify(str(CONFIGS / name), "--strict")[0] == 1


def test_controls_muP_half_done_is_wrong(tmp_path: Path):
    """The steps that nanoGPT-mup's own coordinate checks leave out, and a command line of Megatron that has muP at neither size."""
    for flag, what in (
        ("mup_disable_hidden_lr_scaling", "the learning rate stays and should fall as width^-1"),
    ):
        code, text = verify(
            rewritten(
                tmp_path,
                "nanogpt.sh",
                **{"--mup_enabled=True": f"--mup_enabled=True --{flag}=True"},
            )
        )
        assert (code, what in text) == (1, True)
    plain = {"--use-mup --mup-base-hidden-size 256": ""}
    large = rewritten(tmp_path, "megatron.sh", **plain)
    (tmp_path / "small.sh").write_text(
        Path(large)
        .read_text()
        .replace("2048 --num-attention-heads 16", "256 --num-attention-heads 2")
    )
    code, text = verify(str(tmp_path / "small.sh"), large)
    assert code == 1
    assert "All of it is standard parameterization: muP is off" in text


def test_olmo_has_no_mup(tmp_path: Path):
    (small,) = read("olmo.yaml")
    assert small.parameters["transformer.wte.weight"].std == pytest.approx(2048**-0.5)
    assert (small.optimizer, small.readout, small.parameters["transformer.wte.weight"].wd) == (
        "adamw",
        1.0,
        0.0,
    )
    large = rewritten(
        tmp_path, "olmo.yaml", **{"d_model: 2048, n_heads: 16": "d_model: 4096, n_heads: 32"}
    )
    code, text = verify(str(CONFIGS / "olmo.yaml"), large)
    assert code == 1
    assert (
        "transformer.wte.weight (token_embedding): the initial size falls as width^-0.5 and should stay"
        in text
    )
    assert "tied readout: the learning rate stays and should fall as width^-1" in text


def test_granite_is_right_in_what_its_configs_say(tmp_path: Path):
    """Granite 3's 2B and 8B, whose heads grow: logits by 1/d, and the output by 1/width."""
    small, large = read("granite-2b.json", "granite-8b.json")
    assert (small.attention, large.attention, small.readout, large.readout) == (
        1 / 64,
        1 / 128,
        1 / 8,
        1 / 16,
    )
    code, text = verify(str(CONFIGS / "granite-2b.json"), str(CONFIGS / "granite-8b.json"))
    assert code == 0
    assert "nothing is wrong in what the files say" in text
    assert "a config.json has no rates" in text
    wrong = rewritten(
        tmp_path,
        "granite-8b.json",
        **{'"logits_scaling": 16.0': '"logits_scaling": 8.0', "0.0078125": "0.011048543"},
    )
    code, text = verify(str(CONFIGS / "granite-2b.json"), wrong)
    assert code == 1
    assert "tied readout: the initial size stays and should fall as width^-1" in text
    assert (
        "attention logits: the forward multiplier falls as width^-0.5 and should fall as width^-1"
        in text
    )


def test_minicpm_grows_in_width_and_depth(tmp_path: Path):
    """MiniCPM4's 0.5B and 4.1's 8B; and one alone against its own base."""
    small, large = read("minicpm4-0.5b.json", "minicpm4.1-8b.json")
    assert large.parameters["lm_head.weight"].multiplier == 256 / 4096
    assert small.branch == pytest.approx(1.4 / 24**0.5)
    names = [str(CONFIGS / name) for name in ("minicpm4-0.5b.json", "minicpm4.1-8b.json")]
    assert verify(*names)[0] == 0
    assert verify(names[0])[0] == 0
    wrong = rewritten(
        tmp_path, "minicpm4.1-8b.json", **{'"scale_depth": 1.4': '"scale_depth": 3.6'}
    )
    code, text = verify(names[0], wrong)
    assert code == 1
    assert "residual branches" in text


def test_falcon_h1s_output_is_by_its_width(tmp_path: Path):
    name = str(CONFIGS / "falcon-h1-0.5b.json")
    wider = {
        "1024": "2048",
        '"num_attention_heads": 8': '"num_attention_heads": 16',
        '"num_key_value_heads": 2': '"num_key_value_heads": 4',
    }
    assert (
        verify(
            name, rewritten(tmp_path, "falcon-h1-0.5b.json", **wider, **{"0.0390625": "0.01953125"})
        )[0]
        == 0
    )
    code, text = verify(name, rewritten(tmp_path, "falcon-h1-0.5b.json", **wider))
    assert code == 1
    assert "lm_head.weight" in text
    assert "Multiply" in text or "Write std" in text


def test_base_shapes_are_the_base_of_a_dump(tmp_path: Path):
    small, large = json.loads((CONFIGS / "mup.json").read_text())["mlp adamw"]
    for name, contents in (("small", small), ("large", large)):
        (tmp_path / f"{name}.json").write_text(json.dumps(contents))
    shapes = str(CONFIGS / "mlp.bsh")
    code, text = verify(shapes, str(tmp_path / "large.json"))
    assert (code, "embed x4" in text) == (0, True)
    code, text = verify(shapes, str(tmp_path / "small.json"))
    assert code == 2
    assert "to mup it is its own base, and all of it is standard parameterization" in text
    large["fc_2.weight"]["lr"] = 1e-3
    (tmp_path / "large.json").write_text(json.dumps(large))
    code, text = verify(shapes, str(tmp_path / "large.json"))
    assert code == 1
    assert "fc_2.weight (hidden): the learning rate stays and should fall as width^-1" in text


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.sh",
            "python train.py --n_embd=$((width)) --n_head=2",
            "n_embd is '$((width))'; write the number",
        ),
        (
            "a.sh",
            "python pretrain_gpt.py --hidden-size 64 --num-attention-heads 4",
            "does not say num-layers",
        ),
        ("a.sh", "python anything.py", "has an unknown format; write a dump"),
        (
            "a.yaml",
            "a: 1",
            "is no config of Cerebras (model: hidden_size) or OLMo (model: d_model)",
        ),
        ("a.yaml", "a: [", "is no YAML"),
        ("a.yaml", f"a: {DEEP}", "is no YAML"),
        ("a.json", f'{{"a": {DEEP}}}', "is no JSON"),
        ("a.json", f'{{"a": {"9" * 5000}}}', "is no JSON"),
        ("a.py", f"n_embd = {DEEP}", "is no Python"),
        ("a.py", "n_embd = " + "-" * 3000 + "1", "is no Python"),
        ("a.json", "{", "is no JSON"),
        ("a.json", "[]", "write an object"),
        ("a.json", '{"x": {"shap": [2]}}', "has no 'shap'; did you mean 'shape'?"),
        (
            "a.json",
            '{"x": {"shape": [2], "lr": -1}}',
            "x lr is -1; write a finite number of at least 0",
        ),
        ("a.json", '{"model": {"optimiser": "adamw"}}', "did you mean 'optimizer'?"),
        (
            "a.json",
            '{"model": {"optimizer": "soap"}, "x": {"shape": [2]}}',
            "no optimizer is named 'soap'",
        ),
        ("a.py", "n_embd = ", "is no Python"),
        (
            "a.py",
            "n_embd = 64\nn_head = 2\nmup_enabled = True\nmup_width_multiplier = n_embd / 32",
            "write the number",
        ),
        ("a.bsh", "x: [1]", "give it with one dump"),
    ],
)
def test_a_file_that_is_none_is_one_message(name: str, text: str, message: str, tmp_path: Path):
    (tmp_path / name).write_text(text)
    code, shown = verify(str(tmp_path / name))
    assert (code, message in shown) == (2, True), shown


def test_a_file_that_is_not_there():
    code, shown = verify("nowhere.json")
    assert (code, "nowhere.json cannot be read: No such file" in shown) == (2, True)
