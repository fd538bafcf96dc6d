"""Which candidates a search compiles: the best, and one that differs in each thing that is decided. No compiler is needed."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from mupax.train.config import cli
from mupax.train.config.recipes import RECIPES
from mupax.train.config.run import Config, MeshConfig
from mupax.train.parallel.chips import CHIPS
from mupax.train.pods import candidates, search
from mupax.train.pods.candidates import Candidate
from mupax.train.pods.refusals import refused
from mupax.train.pods.search import different

pytestmark = pytest.mark.core


def config_of(**compute: Any) -> Config:
    config = dataclasses.replace(RECIPES["lm-tiny"](), mesh=MeshConfig(data=8))
    return dataclasses.replace(
        config, model=dataclasses.replace(config.model, compute=dataclasses.replace(config.model.compute, **compute))
    )


def test_near_copies_of_the_best_are_left_out() -> None:
    best = Candidate(config_of(), 1.0, 0)
    copies = [Candidate(dataclasses.replace(config_of(), seed=seed), 1.0 + seed / 100, 0) for seed in range(1, 9)]
    other = [Candidate(config_of(**{name: value}), 2.0 + i, 0) for i, (name, value) in enumerate(
        {"remat": "block", "cross_entropy": "plain", "attention_block": 512}.items()
    )]  # fmt: skip
    chosen = different([best, *copies, *other], 5)
    assert [one.seconds for one in chosen] == [1.0, 2.0, 3.0, 4.0, 1.01]
    assert different([best, *copies], 3) == [best, *copies[:2]]


def test_candidates_decide_all_that_the_search_says() -> None:
    config = dataclasses.replace(config_of(), mesh=MeshConfig())
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, seq_len=512, num_heads=2))
    found = list(candidates.candidates(config, CHIPS["v5e"], jax.devices()[:2], 1))
    values = {name: {json.dumps(one.kinds[name]) for one in found} for name in found[0].kinds}
    assert all(len(of) > 1 for of in values.values()), values
    # What is printed is what makes it.
    for one in (found[0], found[-1], max(found, key=lambda one: one.config.mesh.fsdp)):
        flags = [*one.words.split(), "--model.seq-len", "512", "--model.num-heads", "2"]
        parsed = cli.parse("lm-tiny", cli.recipe("lm-tiny"), flags).config
        assert dataclasses.replace(one, config=parsed).kinds == one.kinds
    batch = config.data.batch_size
    assert values["batch"] == {str(batch // 2), str(batch), str(2 * batch)}
    same = candidates.candidates(config, CHIPS["v5e"], jax.devices()[:2], 1, (1,))
    assert {one.kinds["batch"] for one in same} == {batch}
    # What splits a layer's activations is waited for.
    paces = {one.kinds["axes"]: one.seconds for one in reversed(found) if one.kinds["batch"] == batch}
    assert paces["tensor",] > paces["fsdp",]
    own = candidates.candidate(config, CHIPS["v5e"], jax.devices()[:2], 1)
    assert (own.config.mesh.data, own.bytes > 0) == (2, True)
    # Larger batches are compared by the example.
    assert min(one.pace for one in found) == min(one.seconds / one.config.data.batch_size for one in found)


def test_estimates_know_the_loss_and_the_blocks() -> None:
    config = dataclasses.replace(RECIPES["lm-8b"](), mesh=MeshConfig(data=1, fsdp=8))

    def seconds(chip: str, **compute: Any) -> float:
        model = dataclasses.replace(config.model, compute=dataclasses.replace(config.model.compute, **compute))
        program = candidates.assemble(dataclasses.replace(config, model=model))
        return candidates.estimate(program, CHIPS[chip], 1)

    # By parts of the vocabulary between the two: 130 M cycles of 122 and 180 (docs/performance.md).
    large = config
    model, data = dataclasses.replace(config.model, seq_len=4096), dataclasses.replace(config.data, batch_size=8)
    config = dataclasses.replace(config, model=model, data=data)
    plain, vocab, chunked = (seconds("v5e", cross_entropy=loss) for loss in ("plain", "vocab", "chunked"))
    assert plain < vocab < (plain + chunked) / 2
    config = large
    # On v6e blocks of 512 wait for keys and values; on v5e larger ones compute more of what the mask hides.
    assert seconds("v6e", attention_block=512) > seconds("v6e")
    assert seconds("v5e", attention_block=1024) > seconds("v5e")


def test_a_candidate_that_the_compiler_refuses_does_not_end_the_search(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried: list[Config] = []

    def compile_for(config: Config, name: str, slices: int) -> Any:
        tried.append(config)
        if len(tried) == 2:
            raise refused(name, "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem: 20.0M of 16.0M", 2048)
        report = {"fits": True, "roofline": {"step_seconds": 1.0}, "peak_bytes_per_device": 1, "batch_size": 1}
        report["flags"] = {"xla_of_the_compiler": True}
        return SimpleNamespace(report=lambda: report)

    monkeypatch.setattr(search, "compile_for", compile_for)
    monkeypatch.setattr(search.topology, "devices", lambda *_: jax.devices()[:2])
    config = dataclasses.replace(config_of(), mesh=MeshConfig())
    reports = search.search(config, "v5e:2x2", 1, 3)
    assert (len(tried), len(reports)) == (3, 2)
    assert all(report["flags"].startswith("--mesh.data ") for report in reports)
    assert reports[0]["compiler_flags"] == {"xla_of_the_compiler": True}
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "the compiler of v5e:2x2 refuses this step; a core's own memory is too small: write --model.compute." in shown
    )
    assert "attention-block 1024, or more for one operation with --vmem-kib. It says: RESOURCE_EXHAUSTED" in shown
