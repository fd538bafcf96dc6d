"""`eval --tasks` with the lm-eval harness, which `make parity` installs, on tasks of local files."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mupax.train.reuse.generate.texts import Texts
from tests.train.reuse.commands import call, read_json, succeed
from tests.train.reuse.harness.test_texts import DECODER
from tests.train.reuse.random_weights import published

TASKS = Path(__file__).parent / "tasks"


def read_lines(path: str) -> list[Any]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore")  # of the harness and of what it imports
def test_three_tasks_say_what_the_model_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "c"))
    shutil.copytree(TASKS, tmp_path / "tasks")
    monkeypatch.chdir(tmp_path / "tasks")
    weights = published(tmp_path / "weights", DECODER)
    model = Texts(weights, tokenizer="bytes")
    prompts = ["abc", "what is read", "counting 0123"]
    written = [model.continued(prompt, ["\n"], max_tokens=4) for prompt in prompts]
    written[2] = "another"
    rows = zip(prompts, written, strict=True)
    lines = [json.dumps({"prompt": prompt, "written": text}) for prompt, text in rows]
    Path("copying.jsonl").write_text("\n".join(lines))
    tasks = "--tasks local_choices local_passages local_copying --tasks-from ."
    words = "--data.tokenizer bytes --json report.json"
    out = succeed("eval", weights, tasks, words).out
    report = read_json("report.json")

    is_right = []
    for document in read_lines("choices.jsonl"):
        pairs = [(document["question"], f" {choice}") for choice in document["choices"]]
        scores = [score.logprob for score in model.likelihoods(pairs)]
        is_right.append(int(np.argmax(scores)) == document["answer"])
    assert report["local_choices"]["acc"] == pytest.approx(np.mean(is_right))
    passages = [document["text"] for document in read_lines("passages.jsonl")]
    bits = -sum(model.rolling(passages)) / sum(map(len, passages)) / math.log(2)
    assert report["local_passages"]["bits_per_byte"] == pytest.approx(bits, rel=1e-6)
    assert report["local_copying"]["exact_match"] == pytest.approx(2 / 3)
    assert report["local_choices"]["examples"] == 3
    assert "bits_per_byte" in out
    words = "--tasks choices --tasks-from . --data.tokenizer bytes"
    code, _, err = call("eval", weights, words)
    assert code == 2
    assert "no task is named choices; . has local_choices" in err
