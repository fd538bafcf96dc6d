"""What `compile` knows without a compiler: topologies, chips, the roofline, FLOPs as traced, and its messages."""

from __future__ import annotations

import dataclasses
import json
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mupax.__main__ import main
from mupax.train.config.run import Config, DataConfig, MeshConfig, OptimizerConfig, PresetConfig
from mupax.train.core import loss
from mupax.train.core.costs import memory
from mupax.train.core.program import assemble
from mupax.train.core.state import Health
from mupax.train.parallel.chips import CHIPS
from mupax.train.parallel.hardware import peak_flops
from mupax.train.pods import estimates, topology
from mupax.train.pods.compiled import Roofline
from mupax.train.pods.estimates import causal_share, matmul_flops
from mupax.train.pods.topology import TopologyError
from mupax.zoo import configs, families
from mupax.zoo.configs import ComputeConfig, DecoderConfig, EncoderDecoderConfig

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("v5e", "'v5e' is not a topology; write CHIP:AxB or CHIP:AxBxC of a TPU, or CHIP:N or"),
        ("v5e:16", "is not a topology"),
        ("v9:2x2", "no chip is named 'v9'; write one of v4, v5e, v5p, v6e, v7x"),
        ("v5e:4x4x4", "wired in 2 dimensions; write such as v5e:4x4"),
        ("v5p:0x4x4", "wired in 3 dimensions"),
    ],
)
def test_a_wrong_topology_is_told_what_to_write(written: str, message: str) -> None:
    with pytest.raises(TopologyError) as error:
        topology.chip_of(written)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("name", "around"),
    [
        ("v5e:16x16", [True, True, False]),
        ("v6e:8x16", [False, True, False]),
        ("v5e:8x8", [False] * 3),
        ("v5p:4x4x4", [True] * 3),
        ("v7x:4x8x12", [True] * 3),
        ("v5p:2x4x4", [False] * 3),
        ("v4:4x4", [False] * 3),
    ],
)
def test_only_whole_pods_and_cubes_are_tori(name: str, around: list[bool]) -> None:
    # As the table of MaxText (utils/accelerator_to_spec_map.py).
    assert topology.wraps(name) == around


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["lm-tiny"], "--topology"),
        (["lm-tinny", "--topology", "v5e:2x2"], "no recipe is named 'lm-tinny'"),
        (["lm-tiny", "--topology", "v5e:2x2", "--stepps", "3"], "--steps"),
        (["lm-tiny", "--topology", "v5e:2x2", "--search", "--limit", "1"], "--limit is 1"),
        (
            ["lm-tiny", "--topology", "v5e:2x2", "--search", "--hlo", "step.txt"],
            "--hlo writes one program, and --search compiles several",
        ),
        (["lm-tiny", "--topology", "7x7"], "'7x7' is not a topology"),
    ],
)
def test_wrong_words_are_told_what_to_write(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compile", *argv]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) <= 10


def test_help_lists_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(
        flag in out for flag in ("--topology", "--slices", "--json", "--search", "--limit", "--hlo")
    )


@pytest.mark.parametrize("name", CHIPS)
def test_both_tables_have_one_peak(name: str) -> None:
    assert CHIPS[name].peak_flops == peak_flops(CHIPS[name].device_kind)


def test_clocks_follow_from_the_peaks() -> None:
    for name, units in {"v4": 8, "v5e": 4, "v5p": 8}.items():
        clock = CHIPS[name].clock_hz
        assert clock is not None
        assert 2 * 128 * 128 * units * clock == pytest.approx(CHIPS[name].peak_flops, rel=0.003)


def test_roofline_takes_the_slowest_resource() -> None:
    line = Roofline(compute=2.0, memory=1.0, network=3.0, slow_network=0.0, cycles=None)
    assert (line.bound, line.seconds) == ("network", 3.0)
    assert line.utilization(1.5 * CHIPS["v5e"].peak_flops, CHIPS["v5e"]) == 0.5
    assert dataclasses.replace(line, cycles=4.0).bound == "cycles"
    # What runs beside nothing comes on top, but not of the network's own time.
    assert dataclasses.replace(line, alone=0.5).seconds == 3.0
    assert dataclasses.replace(line, cycles=4.0, alone=0.5).seconds == 4.5


def test_padding_of_the_smallest_layout() -> None:
    assert memory.padded((128256, 16)) == 128256 * 16  # positions innermost
    assert memory.padded((32, 16, 8, 128)) == 32 * 16 * 8 * 128
    assert memory.padded((3, 5)) == 8 * 128
    assert memory.padded((7,)) == 7


def test_only_whole_vectors_may_lie_as_the_compiler_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of()
    for width, free in ((256, False), (512, True)):
        model = dataclasses.replace(config.model, width=width)
        program = assemble(
            dataclasses.replace(config, model=model, mesh=MeshConfig(data=1, fsdp=4)),
            jax.devices()[:4],
        )
        assert not program.free_layout
        mesh = np.array([Tpu()] * 4, dtype=object).reshape(program.mesh.devices.shape)
        monkeypatch.setattr(
            type(program),
            "mesh",
            property(lambda self, mesh=mesh: types.SimpleNamespace(devices=mesh)),
        )
        assert program.free_layout == free
        monkeypatch.undo()


@dataclasses.dataclass(frozen=True)
class Tpu:
    platform: str = "tpu"


# FLOPs of the traced step


def config_of(**compute: str) -> Config:
    model = DecoderConfig(
        width=24, depth=5, num_heads=2, vocab_size=31, seq_len=14, positions="rotary", activation="swiglu",
        bias=False, compute=ComputeConfig(**compute),  # type: ignore[arg-type]
    )  # fmt: skip
    return Config(
        recipe="traced", model=model, data=DataConfig(name="python_corpus", batch_size=4), steps=3,
        preset=PresetConfig(name="mup"), optimizer=OptimizerConfig(),
    )  # fmt: skip


def traced(config: Config) -> float:
    return matmul_flops(assemble(config, jax.devices()[:1]).trace_train().jaxpr)


def expected(config: Config, passes: float) -> float:
    """All products of the forward pass with whole attention, so many times."""
    model = config.model
    terms = families.forward_terms(model)
    terms["attention"] *= (
        2  # every position to every other: the mask is applied to what is computed
    )
    readout = terms.pop("readout")
    return config.data.batch_size * 14 * (passes * sum(terms.values()) + 3 * readout)


@pytest.mark.parametrize("layers", ["scan", "unrolled"])
def test_traced_flops_are_three_forward_passes(layers: str) -> None:
    config = config_of(layers=layers)
    assert traced(config) == expected(config, 3)


@pytest.mark.parametrize("layers", ["scan", "unrolled"])
def test_recomputed_blocks_are_counted(layers: str) -> None:
    config = config_of(layers=layers, remat="block")
    assert 3.7 * expected(config, 1) / 4 < traced(config) <= expected(config, 4)
    assert traced(config) > 1.2 * traced(config_of(layers=layers))


def test_a_call_that_gives_nothing_is_not_counted() -> None:
    product = jax.jit(lambda x: x @ x)
    (call,) = jax.make_jaxpr(product)(jnp.ones((3, 3))).eqns
    jaxpr = jax.make_jaxpr(lambda x: x @ x + product(x))(jnp.ones((3, 3)))
    (left,) = [i for i, equation in enumerate(jaxpr.eqns) if equation.primitive == call.primitive]
    dead = jaxpr.eqns[left].replace(outvars=[])
    without = jaxpr.jaxpr.replace(eqns=[*jaxpr.eqns[:left], dead, *jaxpr.eqns[left + 1 :]])
    assert (matmul_flops(jaxpr), matmul_flops(without)) == (2 * 54, 54)


def test_microbatches_change_no_flops() -> None:
    config = config_of(layers="scan")
    assert traced(dataclasses.replace(config, accumulation_steps=2)) == traced(config)


def test_a_loop_of_unknown_length_is_refused() -> None:
    def halve(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda x: jnp.sum(x) > 1, lambda x: 0.5 * (x @ x), x)

    with pytest.raises(ValueError, match="unknown length"):
        matmul_flops(jax.make_jaxpr(halve)(jnp.ones((3, 3))))


def test_blocks_of_a_causal_mask() -> None:
    assert causal_share(512, 512) == 1.0
    assert causal_share(2048, 512) == 10 / 16


# Recipes for pods


@pytest.mark.parametrize("name", ["lm-1b", "lm-8b", "lm-30b-a3b", "vit-h14"])
def test_pod_recipes_shard_their_state_and_compute_in_bfloat16(name: str) -> None:
    from mupax.train.config.recipes import RECIPES

    config = RECIPES[name]()
    assert (config.mesh.data, config.mesh.fsdp) == (1, -1)
    assert config.model.compute.dtype == "bfloat16"
    assert config.model.compute.remat != "none"


def test_the_8b_model_has_llamas_parameters() -> None:
    # 8,030,261,248 in the checkpoint of Llama 3 8B.
    assert families.params(configs.get("lm-8b")) == 8_030_261_248


def test_the_30b_model_has_qwens_parameters() -> None:
    # 30,532,122,624 in the checkpoint of Qwen3-30B-A3B.
    assert families.params(configs.get("lm-30b-a3b")) == 30_532_122_624


# The committed tables

TABLES = Path(__file__).parents[3] / "docs" / "evidence" / "pods.json"


@pytest.mark.parametrize(
    "pod", ["lm-8b v5p:4x4x4", "lm-8b v5e:16x16", "lm-8b v6e:16x16", "vit-h14 v5e:4x4"]
)
def test_the_committed_pods_fit(pod: str) -> None:
    recipe, where = pod.split()
    (report,) = [
        r
        for r in json.loads(TABLES.read_text())["pods"]
        if (r["recipe"], r["topology"]) == (recipe, where)
    ]
    assert report["fits"]
    assert report["problems"] == []
    assert set(report["program"]) == {"commit", "date"}
    assert report["peak_bytes_per_device"] < report["hbm_bytes_per_device"]
    assert report["loops_of_unknown_length"] == 0
    assert report["peak_over_expected"] == pytest.approx(1, abs=0.1)
    assert all(row["op_name"] or row["source"] for row in report["temporaries"])


# The memory model


def terms(mesh: MeshConfig, batch_size: int = 16, **compute: str) -> dict[str, int]:
    config = config_of(layers="scan", **compute)
    data = dataclasses.replace(config.data, batch_size=batch_size)
    return estimates.expected(assemble(dataclasses.replace(config, mesh=mesh, data=data)))


def test_the_memory_model_counts_what_a_device_holds() -> None:
    whole, split = terms(MeshConfig(data=8)), terms(MeshConfig(data=1, fsdp=8))
    matrices = (
        families.params(config_of().model) - (2 * 5 + 1) * 24
    )  # norm gains, which fsdp splits too
    arrays, scalars = (
        3 * 4 * (matrices + 11 * 24),
        4 * (2 + len(Health())),
    )  # of the latter also two counts of steps
    assert whole["state"] == arrays + scalars
    assert split["state"] == arrays / 8 + scalars
    # Five layers keep the stream of two rows of 14 positions of width 24, in float32.
    assert terms(MeshConfig(data=8), remat="block")["saved activations"] == 5 * 2 * 14 * 24 * 4
    assert terms(MeshConfig(data=8), 32, remat="block")["saved activations"] == 5 * 4 * 14 * 24 * 4
    activations = [
        terms(MeshConfig(data=8), remat=name)["saved activations"]
        for name in ("none", "dots", "block")
    ]
    assert activations == sorted(activations, reverse=True)
    # Attention of so few positions is ordinary products, which name nothing to keep.
    assert terms(MeshConfig(data=8), remat="attention")["saved activations"] == activations[-1]


@pytest.mark.parametrize(
    ("kernel", "itemsize", "norms"), [("splash", 2, 1), ("xla", 2, 0), ("tiles", 4, 2)]
)
def test_the_memory_model_prices_what_attention_keeps(
    kernel: str, itemsize: int, norms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two rows of 128 positions on a device, five layers, two heads of 12: outputs in the kernel's type, the softmax's norms in float32.
    if kernel != "tiles":
        monkeypatch.setattr(memory, "tiled", lambda *_, **__: False)
        monkeypatch.setattr(memory, "chosen", lambda *_, **__: kernel)

    def saved(remat: str) -> int:
        config = config_of(layers="scan", remat=remat, dtype="bfloat16")
        model = dataclasses.replace(config.model, seq_len=128)
        data = dataclasses.replace(config.data, batch_size=16)
        program = assemble(
            dataclasses.replace(config, model=model, data=data, mesh=MeshConfig(data=8))
        )
        return estimates.expected(program)["saved activations"]

    outputs, sums = 5 * 2 * 128 * 24 * itemsize, 5 * 2 * 128 * 2 * 4
    assert saved("attention") - saved("block") == (outputs * (kernel != "xla") + norms * sums)


# How the loss is computed


@pytest.mark.parametrize(
    "mesh",
    [MeshConfig(data=2, fsdp=4), MeshConfig(data=1, fsdp=2, sequence=2, tensor=2)],
    ids=["fsdp", "all"],
)
def test_the_loss_that_is_estimated_is_the_one_that_is_computed(
    mesh: MeshConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    works: list[loss.ReadoutShape] = []
    options = loss.options
    monkeypatch.setattr(loss, "options", lambda work: works.append(work) or options(work))
    config = config_of(layers="scan")
    data = dataclasses.replace(config.data, batch_size=16)
    program = assemble(dataclasses.replace(config, mesh=mesh, data=data, accumulation_steps=2))
    program.trace_train()
    assert set(works) == {memory.work(program.config, program.definition, program.layout)}


def test_auto_takes_of_the_losses_the_one_that_raises_the_peak_least() -> None:
    # Llama's readout on a chip of v5e:16x16, 4096 tokens. Its layers leave little room, or some, or all.
    work = loss.ReadoutShape(4096, 128_256, 4096, 2, "tpu", "TPU v5 lite", room=2**30)
    assert [one.kind for one in loss.options(work)] == ["vocab", "chunked", "plain"]
    some, all_ = (loss.options(work._replace(room=room))[0] for room in (2**30, 2 * 2**30))
    assert (0 < some.exp_parts < some.parts, all_.exp_parts) == (True, all_.parts)
    assert (some.again > 0, all_.again) == (True, 0)
    # Where it is free all logits at once are fastest, but their gradient stays while the layers' is taken.
    assert loss.above(work._replace(room=2**40), loss.way(work, "plain")) == 4 * 4096 * 128_256
    # Elsewhere as it was: chunks where there are several.
    assert [one.kind for one in loss.options(work._replace(platform="cpu"))] == ["chunked"]
    assert [one.kind for one in loss.options(work._replace(platform="cpu", columns=256))] == [
        "plain"
    ]


# Of an encoder-decoder: five blocks that read 14 positions, three that write 6 and attend to the 14


def mending(**compute: str) -> Config:
    model = EncoderDecoderConfig(
        width=24, depth=3, encoder_depth=5, num_heads=2, vocab_size=31, seq_len=14, target_len=6, positions="rotary",
        bias=False, compute=ComputeConfig(layers="scan", **compute),  # type: ignore[arg-type]
    )  # fmt: skip
    config = config_of()
    return dataclasses.replace(
        config, model=model, data=dataclasses.replace(config.data, batch_size=16, noise="infilling")
    )


def test_traced_flops_have_both_stacks() -> None:
    config = mending()
    terms, masked = (
        families.forward_terms(config.model),
        2 * 3 * 24 * 6**2,
    )  # the masked half of the decoder's own attention
    assert traced(config) == 3 * 16 * (6 * sum(terms.values()) + masked)


def test_the_memory_model_counts_both_stacks() -> None:
    def saved(remat: str) -> int:
        program = assemble(dataclasses.replace(mending(remat=remat), mesh=MeshConfig(data=8)))
        return estimates.expected(program)["saved activations"] // (
            2 * 24 * 4
        )  # rows, width, bytes

    assert saved("block") == 5 * 14 + 3 * 6
    # The stream and its norm before every branch, queries, keys and values, what heads attended to, and the MLP's two times 4;
    # keys and values of what the encoder wrote at its positions.
    assert saved("none") == 5 * 14 * (4 + 3 + 1 + 8) + 3 * (6 * (6 + 4 + 2 + 8) + 14 * 2)
