"""Candidates that a search compiles: the best, and one that differs in each thing it decides."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from mupax.__main__ import main
from mupax.train.config import cli
from mupax.train.config.recipes import RECIPES
from mupax.train.config.run import Config, MeshConfig
from mupax.train.parallel.chips import CHIPS
from mupax.train.parallel.sharding import MeshError
from mupax.train.pods import command, estimates, search
from mupax.train.pods.refusals import refused
from mupax.train.pods.search import Candidate, different

pytestmark = pytest.mark.core


REPORT = {
    "fits": True,
    "platform": "tpu",
    "roofline": {"step_seconds": 1.0, "alone": 0.1, "bound": "compute", "mfu": 0.4},
    "peak_bytes_per_device": 1,
    "batch_size": 1,
    "problems": [],
}


def with_compute(config: Config, **compute: Any) -> Config:
    changed = dataclasses.replace(config.model.compute, **compute)
    return with_model(config, compute=changed)


def with_model(config: Config, **fields: Any) -> Config:
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **fields))


def config_of(data: int = 8, **compute: Any) -> Config:
    config = dataclasses.replace(RECIPES["lm-tiny"](), mesh=MeshConfig(data=data))
    return with_compute(config, **compute)


def compiled(**fields: Any) -> Any:
    """Return a compiled step with a report."""
    report = {**REPORT, **fields}
    return SimpleNamespace(report=lambda: dict(report))


def test_near_copies_of_the_best_are_left_out() -> None:
    best = Candidate(config_of(), 1.0, 0)
    copies = [
        Candidate(dataclasses.replace(config_of(), seed=seed), 1.0 + seed / 100, 0)
        for seed in range(1, 9)
    ]
    changes: list[dict[str, Any]] = [
        {"remat": "block"},
        {"cross_entropy": "plain"},
        {"attention_block": 512},
    ]
    other = [Candidate(config_of(**change), 2.0 + i, 0) for i, change in enumerate(changes)]
    chosen = different([best, *copies, *other], 5)
    assert [plan.seconds for plan in chosen] == [1.0, 2.0, 3.0, 4.0, 1.01]
    assert different([best, *copies], 3) == [best, *copies[:2]]


def test_candidates_decide_all_that_the_search_says() -> None:
    config = with_model(config_of(data=-1), seq_len=512, num_heads=2)
    plans = list(search.candidates(config, CHIPS["v5e"], jax.devices()[:2], 1))
    values = {name: {json.dumps(plan.kinds[name]) for plan in plans} for name in plans[0].kinds}
    # Compiler flags are compared on GPUs only.
    assert values.pop("xla_flags") == {'"auto"'}
    assert all(len(choices) > 1 for choices in values.values()), values
    # The flags that are printed make the candidate.
    for plan in (plans[0], plans[-1], max(plans, key=lambda plan: plan.config.mesh.fsdp)):
        flags = [*plan.words.split(), "--model.seq-len", "512", "--model.num-heads", "2"]
        parsed = cli.parse("lm-tiny", cli.recipe("lm-tiny"), flags).config
        assert dataclasses.replace(plan, config=parsed).kinds == plan.kinds
    batch = config.data.batch_size
    assert values["batch"] == {str(batch // 2), str(batch), str(2 * batch)}
    same = search.candidates(config, CHIPS["v5e"], jax.devices()[:2], 1, (1,))
    assert {plan.kinds["batch"] for plan in same} == {batch}
    # Splitting a layer's activations has a wait.
    seconds: dict[Any, float] = {}
    for plan in reversed(plans):
        if plan.kinds["batch"] == batch:
            seconds[plan.kinds["axes"]] = plan.seconds
    assert seconds["tensor",] > seconds["fsdp",]
    own = search.candidate(config, CHIPS["v5e"], jax.devices()[:2], 1)
    assert (own.config.mesh.data, own.bytes > 0) == (2, True)
    # Larger batches are compared by the example.
    paces = [plan.seconds / plan.config.data.batch_size for plan in plans]
    assert min(plan.pace for plan in plans) == min(paces)


def test_estimates_know_the_loss_and_the_blocks() -> None:
    large = dataclasses.replace(RECIPES["lm-8b"](), mesh=MeshConfig(data=1, fsdp=8))

    def seconds(chip: str, config: Config = large, **compute: Any) -> float:
        program = search.assemble(with_compute(config, **compute))
        return search.estimate(program, CHIPS[chip], 1)

    # By parts of the vocabulary between the two: 130 M cycles of 122 and 180
    # (docs/evidence/performance.md).
    data = dataclasses.replace(large.data, batch_size=8)
    long = dataclasses.replace(with_model(large, seq_len=4096), data=data)
    plain, vocab, chunked = [
        seconds("v5e", long, cross_entropy=loss) for loss in ("plain", "vocab", "chunked")
    ]
    assert plain < vocab < (plain + chunked) / 2
    # On v6e blocks of 512 wait for keys and values. On v5e larger blocks compute more of the part
    # that the mask hides.
    assert seconds("v6e", attention_block=512) > seconds("v6e")
    assert seconds("v5e", attention_block=1024) > seconds("v5e")
    # The result of attention's kernel is not computed again, all else of the block is.
    dots, attention, block = [
        seconds("v5e", remat=remat) for remat in ("dots", "attention", "block")
    ]
    assert dots < attention < block


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--model.experts 6 --mesh.experts 3", "3 does not divide 4 chips and the model's 6"),
        ("--model.experts 6 --mesh.experts 4", "write --mesh.experts 1 or 2"),
        ("--model.experts 6 --mesh.experts -1", "write --mesh.experts 1 or 2"),
        ("--mesh.experts 2", "the model has no experts; write --mesh.experts 1, or"),
        # The control: what fits is tried, and a batch that does not fit is blamed.
        ("--model.experts 6 --mesh.experts 2 --data.batch-size 7", "write another --data.batch"),
    ],
)
def test_experts_that_fit_no_mesh_are_named(
    words: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search.topology, "devices", lambda *_: jax.devices()[:4])
    config = cli.parse("lm-tiny", cli.recipe("lm-tiny"), words.split()).config
    with pytest.raises(MeshError) as refused:
        search.search(config, "v5e:2x2", 1, 2)
    assert message in str(refused.value)


def test_a_candidate_that_the_compiler_refuses_does_not_end_the_search(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried: list[Config] = []

    def compile_for(config: Config, name: str, slices: int) -> Any:
        tried.append(config)
        if len(tried) == 2:
            message = "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem: 20.0M of 16.0M"
            raise refused(name, message, 2048)
        return compiled(flags={"xla_of_the_compiler": True})

    monkeypatch.setattr(search, "compile_for", compile_for)
    monkeypatch.setattr(search.topology, "devices", lambda *_: jax.devices()[:2])
    records: list[str] = []

    def keep(record: Any) -> None:
        records.append(json.dumps(record))

    reports = search.search(config_of(data=-1), "v5e:2x2", 1, 3, keep=keep)
    first, *_, last = map(json.loads, records)
    assert len(records) == 4  # before the first and after each
    assert {row["outcome"] for row in first["rows"]} == {"estimated"}
    rows = last["rows"]
    outcomes = [row["outcome"] for row in rows[:4]]
    assert outcomes == ["compiled", "refused", "compiled", "estimated"]
    assert "20.0M of 16.0M" in rows[1]["reason"]
    assert rows[2]["peak_bytes_per_device"] == 1
    assert all(row["expected_seconds"] > 0 and row["expected_bytes"] > 0 for row in rows)
    assert 3 < len(rows) <= last["estimated"] + 1  # the run itself beside them
    assert len(rows) <= search.MOST_ROWS + 3
    assert (len(tried), len(reports)) == (3, 2)
    assert all(report["flags"].startswith("--mesh.data ") for report in reports)
    assert reports[0]["compiler_flags"] == {"xla_of_the_compiler": True}
    shown = " ".join(capsys.readouterr().out.split())
    refusal = "the compiler of v5e:2x2 refuses this step; a core's own memory is too small"
    assert f"{refusal}: write --model.compute." in shown
    advice = "attention-block 1024, or more for one operation with --vmem-kib"
    assert f"{advice}. It says: RESOURCE_EXHAUSTED" in shown


def test_a_run_whose_own_mesh_does_not_divide_its_batch_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = config_of(data=-1)
    of_sizes = search.candidate

    def candidate(tried: Config, *words: Any) -> Candidate:
        if tried is config:
            raise MeshError("the batch does not divide")
        return of_sizes(tried, *words)

    monkeypatch.setattr(search, "candidate", candidate)
    monkeypatch.setattr(search, "compile_for", lambda *_: compiled())
    monkeypatch.setattr(search.topology, "devices", lambda *_: jax.devices()[:2])
    reports = search.search(config, "v5e:2x2", 1, 2)
    assert len({report["flags"] for report in reports}) == 2


def test_a_search_says_the_minutes_that_the_flags_of_now_take() -> None:
    minutes = {}
    for name, chip in CHIPS.items():
        kib = estimates.operation_kib(config_of(), chip, {})
        minutes[name] = estimates.compile_seconds(2**20, kib) / 60
    # Of a step of 1 MiB, lm-8b's (docs/evidence/performance.md).
    assert [round(minutes[name], 1) for name in ("v5e", "v5p", "v6e")] == [5.7, 5.7, 9.7]
    assert minutes["v4"] == 2.0


MINE = {"LIBTPU_INIT_ARGS": "--xla_tpu_scoped_vmem_limit_kib=24576"}


@pytest.mark.parametrize(
    ("chip", "changes", "environment", "kib"),
    [
        ("v6e", {}, {}, 98304),
        ("v6e", {"vmem_kib": 65536}, {}, 65536),
        ("v6e", {"xla_flags": "none"}, {}, 32768),
        ("v5e", {"xla_flags": "none"}, {}, 16384),
        ("v5e", {}, MINE, 24576),
    ],
)
def test_what_one_operation_may_take_is_what_the_step_is_compiled_with(
    chip: str, changes: dict[str, Any], environment: dict[str, str], kib: int
) -> None:
    config = dataclasses.replace(config_of(), **changes)
    assert estimates.operation_kib(config, CHIPS[chip], environment) == kib


def test_blocks_of_2048_are_tried_where_a_core_holds_them() -> None:
    config = with_model(config_of(data=-1), seq_len=4096, num_heads=2)

    def blocks(kib: int | None) -> set[int | None]:
        changed = dataclasses.replace(config, vmem_kib=kib)
        plans = search.candidates(changed, CHIPS["v5e"], jax.devices()[:1], 1, (1,))
        return {plan.config.model.compute.attention_block for plan in plans}

    assert blocks(None) == {None, 1024, 2048}  # 32 MiB; 512 is the chip's own
    assert blocks(16384) == {None, 1024}
    assert blocks(20480) == {None, 1024, 2048}


def test_a_record_lies_beside_the_workdir_which_must_be_empty_when_a_run_starts() -> None:
    config = config_of()
    assert str(command.record_of(config, "v5e:16x16", 1)) == "runs/lm-tiny.search-v5e-16x16.json"
    placed = dataclasses.replace(config, workdir="here/run/")
    assert str(command.record_of(placed, "v5p:4x4x4", 2)) == "here/run.search-v5p-4x4x4-x2.json"


def test_the_command_keeps_what_it_tried_and_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(search, "compile_for", lambda *_: compiled())
    monkeypatch.setattr(search.topology, "devices", lambda *_: jax.devices()[:2])
    monkeypatch.setattr(search.topology, "ready", lambda topology_name: None)
    words = "compile lm-tiny --topology v5e:2x2 --search --limit 2 --workdir"
    assert main([*words.split(), str(tmp_path / "run")]) == 0
    file = tmp_path / "run.search-v5e-2x2.json"
    assert str(file) in "".join(capsys.readouterr().out.split())
    record = json.loads(file.read_text())
    assert (record["recipe"], record["topology"], record["slices"]) == ("lm-tiny", "v5e:2x2", 1)
    assert [row["outcome"] for row in record["rows"][:3]] == ["compiled", "compiled", "estimated"]
    assert record["rows"][0]["roofline"] == REPORT["roofline"]
    assert not (tmp_path / "run").exists()  # where a run starts only in what is empty
