"""`eval --tasks` with the lm-eval harness itself, on three tasks of files beside this one; `make parity` installs the harness."""

from __future__ import annotations

import contextlib
import io
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mupax.__main__ import main
from mupax.train.reuse.harness.texts import Texts
from tests.train.reuse.harness.test_texts import DECODER
from tests.train.reuse.test_source import published

TASKS = Path(__file__).parent / "tasks"


def evaluated(words: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words.split())
    return code, out.getvalue(), " ".join(err.getvalue().split())


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore")  # of the harness and of what it imports
def test_three_tasks_say_what_the_model_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    for name, value in {
        "HF_DATASETS_OFFLINE": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(tmp_path / "c"),
    }.items():
        monkeypatch.setenv(name, value)
    shutil.copytree(TASKS, tmp_path / "tasks")
    monkeypatch.chdir(tmp_path / "tasks")
    model = Texts(published(tmp_path / "weights", DECODER), tokenizer="bytes")
    prompts = ["abc", "what is read", "counting 0123"]
    written = [model.continued(prompt, ["\n"], max_tokens=4) for prompt in prompts]
    lines = [
        {"prompt": p, "written": w} for p, w in zip(prompts, [*written[:2], "another"], strict=True)
    ]
    Path("copying.jsonl").write_text("\n".join(map(json.dumps, lines)))
    words = "--tasks local_choices local_passages local_copying --tasks-from . --data.tokenizer bytes --json numbers.json"
    code, out, err = evaluated(f"eval {tmp_path / 'weights'} {words}")
    assert code == 0, err
    numbers: Any = json.loads(Path("numbers.json").read_text())

    docs = [json.loads(line) for line in Path("choices.jsonl").read_text().splitlines()]
    right = [
        int(np.argmax([s.logprob for s in model.likelihoods([(d["question"], f" {c}") for c in d["choices"]])])) == d["answer"]
        for d in docs
    ]  # fmt: skip
    assert numbers["local_choices"]["acc"] == pytest.approx(np.mean(right))
    passages = [
        json.loads(line)["text"] for line in Path("passages.jsonl").read_text().splitlines()
    ]
    bits = -sum(model.rolling(passages)) / sum(map(len, passages)) / math.log(2)
    assert numbers["local_passages"]["bits_per_byte"] == pytest.approx(bits, rel=1e-6)
    assert numbers["local_copying"]["exact_match"] == pytest.approx(2 / 3)
    assert numbers["local_choices"]["examples"] == 3
    assert "bits_per_byte" in out
    code, _, err = evaluated(
        f"eval {tmp_path / 'weights'} --tasks choices --tasks-from . --data.tokenizer bytes"
    )
    assert (code, "no task is named choices; . has local_choices" in err) == (2, True), err
