"""Odd names: every command that is given a folder or a file, under names that shells, globs, URLs and encodings trip over.

A trial runs a command twice: with things that have an odd name, and with the same things under a plain one. Both must end well and
give the same: the digests of all arrays, the rows of metrics, the text or the numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import runpy
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.campaigns import tiny_runs
from scripts.campaigns.edges.trial import Ended, Outcome, Trial, judge

PLAIN = "plain"
EVERYTHING = "%41 [a]*?#|\\$HOME~'\"`;&=,@!{}()<>"
COMMON = {
    "all at once": EVERYTHING,
    "not UTF-8": os.fsdecode(b"caf\xe9\xff"),
    "newline and tab": "a\nb\tc",
    "leading dashes": "--resume",
    "255 bytes": "n" * 255,
    "gs:": "gs:",
}
"""Names that every command is tried with."""
RARE_NAMES = {
    "percent": "50%",
    "percent-encoded": "%41%2F",
    "hash": "a#b",
    "question mark": "a?b",
    "brackets": "[a]",
    "open bracket": "[a",
    "range in brackets": "[!a-z]",
    "backslash": "a\\b",
    "backslash at the end": "a\\",
    "bar": "a|b",
    "settings": "lr=1e-3,[d=2]",
    "colon": "a:b",
    "comma": "a,b",
    "semicolon": "a;b",
    "ampersand": "a&b",
    "star": "*",
    "two stars": "**",
    "quotes": "'a\"",
    "backtick": "`a`",
    "dollar": "$HOME",
    "tilde": "~",
    "tilde and a user": "~root",
    "braces": "{a,b}",
    "angle brackets": "<a>",
    "spaces around": " a ",
    "carriage return": "a\rb",
    "escape code": "\x1b[31mred",
    "one dash": "-a",
    "hidden": ".a",
    "three dots": "...",
    "composed": "caf\u00e9",
    "decomposed": "cafe\u0301",
    "emoji": "\U0001f525\U0001f469\u200d\U0001f4bb",
    "right to left": "\u05d0\u05d1\u202eabc",
    "line separator": "a\u2028b",
    "markup": "[bold red]a",
    "format": "{0}%s%d",
    "address": "http:",
    "kind of data": "text:a",
    "best": "best",
    "digits": "10",
    "checkpoints": "checkpoints",
    "None": "None",
    "ends as a file": "a.json",
    "repository": "org--name@main",
}
NAMES = COMMON | RARE_NAMES

VOLATILE = {"seconds", "command", "workdir", "path", "versions", "git", "time", "created", "run"}
"""Fields that differ from one run to the next."""
_DECODER = (
    "lm-tiny --model.width 16 --model.depth 1 --model.num-heads 2 --model.seq-len 16 --data.batch-size 16 "
    "--data.eval-batch-size 32 --data.eval-examples 64 --optimizer.warmup-steps 2 --log.eval-every-steps 8 "
    "--checkpoint.every-steps 4 --log.no-samples --optimizer.schedule constant"
)
_IMAGES = (
    "vit-digits --model.width 16 --model.depth 1 --model.num-heads 2 --data.batch-size 16 --data.eval-batch-size 16 "
    "--data.eval-examples 32 --optimizer.warmup-steps 2 --checkpoint.every-steps 4 --optimizer.schedule constant"
)
DECODER = _DECODER.split()
IMAGES = _IMAGES.split()


class Failed(Exception):
    """A command whose end is a fault; the text is its outcome's."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.detail)
        self.outcome = outcome


@dataclasses.dataclass(frozen=True)
class Case:
    """One command with one name.

    Attributes:
        folder: of the trial, with a plain name; the working directory of its commands.
        name: given to folders and files.
        inputs: made once for the campaign.
    """

    folder: Path
    name: str
    inputs: Inputs

    @property
    def place(self) -> Path:
        """The folder or file with the name."""
        return self.folder / self.name

    def run(
        self,
        *words: str | Path,
        environ: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        codes: Sequence[int] = (0,),
    ) -> str:
        """Run a command, and return its standard output.

        Raises:
            Failed: it ended with another code, or showed another fault.
        """
        return run(self.folder, [str(word) for word in words], environ, cwd, codes)

    def copied_run(self, kind: str = "decoder") -> Path:
        """Copy a trained run under the name."""
        shutil.copytree(self.inputs.trained(kind), self.place)
        return self.place

    def left(self, workdir: Path, step: int) -> Any:
        """Return what a run has left at a step: its rows and the digests of its arrays."""
        return tiny_runs.left(workdir, step)


class Inputs:
    """Runs, weights, texts and images that commands read, made in a shared folder when a trial first needs them."""

    def __init__(self, shared: Path) -> None:
        self.folder = shared
        self._results: dict[str, Any] = {}
        tiny_runs.enter_prepared(shared)
        (shared / "rows.jsonl").write_text("".join(json.dumps({"text": f"row {i} says so"}) + "\n" for i in range(900)))
        (shared / "home").mkdir()
        os.environ["MUPAX_HOME"] = str(shared / "home")

    @property
    def text(self) -> Path:
        """Path of a text."""
        return self.folder / "text.txt"

    @functools.cache  # noqa: B019 - one for the campaign
    def trained(self, kind: str) -> Path:
        """Return the workdir of a run of eight steps: `decoder` or `images`."""
        workdir = self.folder / f"trained-{kind}"
        words = [*DECODER, "--data.name", f"text:{self.text}"] if kind == "decoder" else IMAGES
        run(self.folder, ["train", *words, "--steps", "8", "--workdir", str(workdir)])
        return workdir

    @functools.cache  # noqa: B019 - one for the campaign
    def exported(self, kind: str) -> Path:
        """Return the folder of a run's weights in Hugging Face's format."""
        out = self.folder / f"exported-{kind}"
        run(self.folder, ["export", str(self.trained(kind)), "--out", str(out)])
        return out

    @functools.cache  # noqa: B019 - one for the campaign
    def imported(self) -> Path:
        """Return the folder of imported weights."""
        out = self.folder / "imported"
        run(self.folder, ["import", str(self.exported("decoder")), "--out", str(out)])
        return out

    @functools.cache  # noqa: B019 - one for the campaign
    def tokenizer(self) -> Path:
        """Return the path of a tokenizer.json."""
        out = self.folder / "tokenizer.json"
        words = ["data", "tokenizer", f"text:{self.text}", "--size", "300", "--out", str(out)]
        run(self.folder, words)
        return out

    @functools.cache  # noqa: B019 - one for the campaign
    def pictures(self) -> Path:
        """Return a folder with two folders of twelve images."""
        import numpy as np
        from PIL import Image

        draw = np.random.default_rng(0)
        folder = self.folder / "pictures"
        for channel, label in enumerate(("red", "green")):
            (folder / label).mkdir(parents=True)
            for index in range(12):
                pixels = draw.integers(0, 90, (8, 8, 3)).astype(np.uint8)
                pixels[..., channel] += 120
                Image.fromarray(pixels).save(folder / label / f"{index}.png")
        return folder

    def expected(self, label: str, act: Callable[[Case], Any]) -> Any:
        """Return the result of a command under a plain name."""
        if label not in self._results:
            # A forked session would remove a TemporaryDirectory when it exits.
            folder = Path(tempfile.mkdtemp(dir=self.folder, prefix="control-"))
            self._results[label] = act(Case(folder, PLAIN, self))
            shutil.rmtree(folder)
        return self._results[label]


def trials(shared: Path, seed: int) -> list[Trial]:
    """Return the trials: a run with every name, quick commands with many, others with few."""
    inputs = functools.cache(lambda: Inputs(shared))
    rare_names = list(RARE_NAMES)
    pairs: list[tuple[str, str]] = []
    for index, label in enumerate(QUICK):
        turned = [rare_names[(seed + MANY * index + turn) % len(rare_names)] for turn in range(MANY)]
        pairs += [(label, title) for title in (*COMMON, *turned)]
    pairs += [(TRAINED, title) for title in NAMES]
    for title in COMMON:
        pairs += [(label, title) for label in ACTS if label not in SLOW]
    for title in ("all at once", "not UTF-8"):
        pairs += [(label, title) for label in SLOW]

    all_trials: list[Trial] = []
    for label, title in dict.fromkeys(pairs):
        run_trial = functools.partial(attempt, inputs, label, ACTS[label], NAMES[title])
        all_trials.append(Trial(f"{label}: {title}", label, run_trial))
    for label, act in WAYS.items():
        run_trial = functools.partial(attempt, inputs, label, act, "w")
        all_trials.append(Trial(f"way: {label}", "ways of writing a path", run_trial))
    return all_trials


def attempt(inputs: Callable[[], Inputs], label: str, act: Callable[[Case], Any], name: str, folder: Path) -> Outcome:
    """Run one command under a name, and compare what it gives with what it gives under a plain name."""
    try:
        expected = inputs().expected(label, act)
    except Failed as failure:
        return Outcome("wrong", f"under a plain name: {failure.outcome.detail}")
    try:
        result = act(Case(folder, name, inputs()))
    except Failed as failure:
        return failure.outcome
    if plain_of(result) != plain_of(expected):
        return Outcome("silent", f"another result: {str(result)[:90]} and not {str(expected)[:90]}")
    return Outcome("ok", "the same as under a plain name")


def plain_of(result: Any) -> Any:
    """Return a result as JSON has it."""
    return json.loads(json.dumps(result, sort_keys=True, default=str))


# Starting commands


def run(
    folder: Path,
    words: list[str],
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    codes: Sequence[int] = (0,),
) -> str:
    """Run a command in a fork of this process, and return its standard output.

    Raises:
        Failed: it ended with another code, or showed another fault.
    """
    number = len(list(folder.glob("*.out")))
    out = folder / f"{number}.out"
    began = time.monotonic()
    pid = fork(words, out, environ, cwd or folder)
    code = wait(pid, 240.0)
    ended = Ended(code, output_of(out), time.monotonic() - began)
    outcome = judge(ended, codes)
    if outcome.verdict != "ok":
        raise Failed(Outcome(outcome.verdict, f"{' '.join(words[:2])}: {outcome.detail}"))
    return out.read_text(errors="replace")


def output_of(out: Path) -> str:
    """Return standard output and standard error of a command."""
    files = [file for file in (out, out.with_suffix(".err")) if file.exists()]
    return "\n".join(file.read_text(errors="replace") for file in files)


def fork(words: list[str], out: Path, environ: Mapping[str, str] | None, cwd: Path) -> int:
    """Start `mupax` with these words in a fork, which has imported everything already. Return its process ID."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        for number, file in ((1, out), (2, out.with_suffix(".err"))):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - until the fork ends
        sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(cwd)
        os.environ.update(environ or {})
        sys.argv = ["mupax", *words]
        runpy.run_module("mupax", run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def wait(pid: int, seconds: float) -> int | None:
    """Return the exit code of a process, or None after killing it where that takes longer."""
    until = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None
        time.sleep(0.02)


# What results are compared by


def numbers_of(value: Any) -> Any:
    """Return JSON without texts and without what differs from one run to the next."""
    if isinstance(value, dict):
        items = value.items()
        return {key: numbers_of(item) for key, item in items if key not in VOLATILE and "seconds" not in key}
    if isinstance(value, list):
        return [numbers_of(item) for item in value]
    return None if isinstance(value, str) else value


def json_numbers(file: Path) -> Any:
    """Return the numbers of a JSON file."""
    return numbers_of(json.loads(file.read_text()))


def digests(folder: Path, ending: str) -> dict[str, str]:
    """Return the digest of every file below a folder whose name ends so."""
    digests = {}
    for place, _, names in os.walk(folder):
        for name in names:
            if name.endswith(ending):
                content = (Path(place) / name).read_bytes()
                digests[str((Path(place) / name).relative_to(folder))] = hashlib.sha256(content).hexdigest()
    return digests


# Commands. Each gives something that must not depend on the name.


def train(case: Case) -> Any:
    """Train a run to its end."""
    name = f"text:{case.inputs.text}"
    case.run("train", *DECODER, "--data.name", name, "--steps", "4", f"--workdir={case.place}")
    return case.left(case.place, 4)


def train_and_resume(case: Case) -> Any:
    """Train half a run, and resume it."""
    words = ["train", *DECODER, "--ema.decay", "0.9", "--data.name", f"text:{case.inputs.text}", "--resume"]
    flag = f"--workdir={case.place}"
    case.run(*words, flag, "--steps", "4")
    case.run(*words, flag, "--steps", "8")
    return case.left(case.place, 8)


def two_processes(case: Case) -> Any:
    """Train with two processes that save together."""
    shutil.copy(case.inputs.text, case.folder / "text.txt")
    name = "".join(case.name.split())  # a session's command line is split at spaces
    session = tiny_runs.Session(tiny_runs.Case("decoder", 2), case.folder, name, 20)
    codes = session.wait(240)
    outcome = judge(Ended(max(codes), session.output(), 0.0), [0])
    if outcome.verdict != "ok":
        raise Failed(outcome)
    return tiny_runs.left_arrays(case.folder / name, 20)


def resume_moved(case: Case) -> Any:
    """Resume a run that was moved."""
    workdir = case.copied_run()
    case.run("train", "--resume", "--workdir", workdir, "--steps", "12")
    return case.left(workdir, 12)


def dry_run(case: Case) -> Any:
    """Show what a run would do."""
    case.run("train", *DECODER, "--data.name", f"text:{case.inputs.text}", "--dry-run", "--workdir", case.place)
    return case.place.exists()


def evaluate(case: Case) -> Any:
    """Evaluate a run, and write the numbers to a file with the name."""
    case.copied_run()
    (case.folder / "out").mkdir()
    file = case.folder / "out" / case.name
    case.run("eval", case.place, "--json", file)
    return json_numbers(file)


def evaluate_step(case: Case) -> Any:
    """Evaluate one step of a run."""
    workdir = case.copied_run()
    case.run("eval", workdir / "checkpoints" / "4", "--json", case.folder / "e.json")
    return json_numbers(case.folder / "e.json")


def generate(case: Case) -> Any:
    """Generate text with a run."""
    return case.run("generate", case.copied_run(), "--prompt", "def", "--tokens", "12", "--seed", "3")


def serve(case: Case) -> Any:
    """Serve a run, and ask for text."""
    workdir = case.copied_run()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    out = case.folder / "serve.out"
    pid = fork(["serve", str(workdir), "--port", str(port)], out, None, case.folder)
    address = f"http://127.0.0.1:{port}/v1/completions"
    body = json.dumps({"prompt": "def", "max_tokens": 8, "temperature": 0}).encode()
    request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
    answer: Any = None
    until = time.monotonic() + 120
    while answer is None and time.monotonic() < until:
        with contextlib.suppress(OSError):
            answer = json.loads(urllib.request.urlopen(request, timeout=90).read())["choices"][0]["text"]
        time.sleep(0.1)
    os.kill(pid, signal.SIGINT)
    outcome = judge(Ended(wait(pid, 60), output_of(out), 60.0), [0, 130])
    if outcome.verdict != "ok":
        raise Failed(outcome)
    return answer


def export(case: Case) -> Any:
    """Export a run into a folder."""
    case.run("export", case.inputs.trained("decoder"), "--out", case.place)
    return digests(case.place, ".safetensors")


def export_from(case: Case) -> Any:
    """Export from a run."""
    case.run("export", case.copied_run(), "--out", case.folder / "hf")
    return digests(case.folder / "hf", ".safetensors")


def import_weights(case: Case) -> Any:
    """Import weights from one folder into another."""
    (case.folder / "from").mkdir()
    source = case.folder / "from" / case.name
    shutil.copytree(case.inputs.exported("decoder"), source)
    case.run("import", source, "--out", case.place)
    return digests(case.place, ".safetensors")


def convert(case: Case) -> Any:
    """Convert a run into a folder."""
    case.run("convert", case.inputs.trained("decoder"), "--form", "mean-field", "--out", case.place)
    return tiny_runs.left_arrays(case.place, 8)


def convert_from(case: Case) -> Any:
    """Convert from a run."""
    out = case.folder / "converted"
    case.run("convert", case.copied_run(), "--form", "mean-field", "--out", out)
    return tiny_runs.left_arrays(out, 8)


def grow(case: Case) -> Any:
    """Grow a run into another folder, and train that."""
    workdir = case.copied_run()
    (case.folder / "out").mkdir()
    out = case.folder / "out" / case.name
    case.run("grow", workdir, "--set", "width=32", "--out", out)
    case.run("train", "--resume", "--workdir", out, "--steps", "10")
    return case.left(out, 10)


def checkpoints(case: Case) -> Any:
    """List and verify checkpoints, and write the list to a file."""
    workdir = case.copied_run()
    (case.folder / "out").mkdir()
    file = case.folder / "out" / case.name
    case.run("checkpoints", workdir, "--verify", "--json", file)
    return json_numbers(file)


def noise(case: Case) -> Any:
    """Measure the gradient noise of a run."""
    case.run("noise", case.copied_run(), "--batches", "4", "--json", case.folder / "n.json")
    return json_numbers(case.folder / "n.json")


def train_on(case: Case, name: str, *more: str | Path) -> Any:
    """Train on data."""
    workdir = case.folder / "run"
    case.run("train", *DECODER, f"--data.name={name}", "--steps", "4", "--workdir", workdir, *more)
    return case.left(workdir, 4)


def text_file(case: Case) -> Any:
    """Train on a text."""
    shutil.copy(case.inputs.text, case.place)
    return train_on(case, f"text:{case.place}")


def text_folder(case: Case) -> Any:
    """Train on a folder of texts, with a folder in it."""
    (case.place / case.name).mkdir(parents=True)
    shutil.copy(case.inputs.text, case.place / case.name / "a.txt")
    shutil.copy(case.inputs.text, case.place / "b.txt")
    return train_on(case, f"text:{case.place}")


def text_in_folder(case: Case) -> Any:
    """Train on a folder in which a text has the name."""
    (case.folder / "texts").mkdir()
    shutil.copy(case.inputs.text, case.folder / "texts" / case.name)
    return train_on(case, f"text:{case.folder / 'texts'}")


def records(case: Case) -> Any:
    """Train on a folder of records."""
    case.place.mkdir()
    shutil.copy(case.inputs.folder / "rows.jsonl", case.place / "rows.jsonl")
    return train_on(case, f"records:{case.place}")


def evaluate_on_set(case: Case) -> Any:
    """Evaluate on a text."""
    shutil.copy(case.inputs.text, case.place)
    file = case.folder / "e.json"
    case.run("eval", case.inputs.trained("decoder"), f"--data.name=text:{case.place}", "--json", file)
    return json_numbers(file)


def images(case: Case) -> Any:
    """Train on a folder of images."""
    (case.folder / "sets").mkdir()
    folder = case.folder / "sets" / case.name
    shutil.copytree(case.inputs.pictures(), folder)
    workdir = case.folder / "run"
    case.run(
        "train",
        *IMAGES,
        f"--data.name=images:{folder}",
        "--data.eval-examples",
        "2",
        "--steps",
        "4",
        "--workdir",
        workdir,
    )
    return case.left(workdir, 4)


def image_class(case: Case) -> Any:
    """Train on images of which a class has the name."""
    folder = case.folder / "set"
    shutil.copytree(case.inputs.pictures() / "red", folder / case.name)
    shutil.copytree(case.inputs.pictures() / "green", folder / "zzz")
    workdir = case.folder / "run"
    case.run(
        "train",
        *IMAGES,
        f"--data.name=images:{folder}",
        "--data.eval-examples",
        "2",
        "--steps",
        "4",
        "--workdir",
        workdir,
    )
    case.run("eval", workdir)
    return {name: entry["shape"] for name, entry in case.left(workdir, 4)["arrays"].items()}


def predict(case: Case) -> Any:
    """Predict with a run on a folder of images."""
    workdir = case.copied_run("images")
    (case.folder / "pictures").mkdir()
    shutil.copytree(case.inputs.pictures(), case.folder / "pictures" / case.name)
    shutil.copy(case.inputs.pictures() / "red" / "0.png", case.folder / "one.png")
    text = case.run("predict", workdir, case.folder / "pictures" / case.name, "one.png", "--json")
    return [numbers_of(json.loads(line)) for line in text.splitlines()]


def finetune(case: Case) -> Any:
    """Fine-tune a run on a folder of images."""
    source = case.copied_run("images")
    (case.folder / "pictures").mkdir()
    folder = case.folder / "pictures" / case.name
    shutil.copytree(case.inputs.pictures(), folder)
    out = case.folder / "tuned"
    case.run("finetune", folder, "--from", source, "--steps", "3", "--data.batch-size", "4", "--workdir", out)
    return case.left(out, 3)


def init_from(case: Case) -> Any:
    """Train from imported weights."""
    shutil.copytree(case.inputs.imported(), case.place)
    name = f"text:{case.inputs.text}"
    return train_on(case, name, f"--init-from={case.place}")


def config_file(case: Case) -> Any:
    """Train by a config file in a folder."""
    case.place.mkdir()
    file = case.place / "c.yaml"
    file.write_text(case.run("train", *DECODER, "--data.name", f"text:{case.inputs.text}", "--print-config"))
    workdir = case.folder / "run"
    case.run("train", "--config", file, "--steps", "4", "--workdir", workdir)
    return case.left(workdir, 4)


def config_by_its_name(case: Case) -> Any:
    """Read a config file that has the name."""
    file = case.folder / f"{case.name[:250]}.yaml"
    file.write_text(case.run("train", *DECODER, "--data.name", f"text:{case.inputs.text}", "--print-config"))
    return numbers_of(json.loads(case.run("train", f"--config={file}", "--print-config")))


def sweep(case: Case) -> Any:
    """Sweep two learning rates."""
    name = f"text:{case.inputs.text}"
    case.run("sweep", *DECODER, "--data.name", name, "--steps", "4", "--lr", "2^-9:2^-7:2", "--out", case.place)
    points = json.loads((case.place / "sweep.json").read_text())["points"]
    return sorted(point["loss"] for point in points)


def tune(case: Case) -> Any:
    """Tune the learning rate."""
    words = ["--over", "lr", "--points", "3", "--batch", "2", "--seeds", "1", "--confirm", "0", "--minutes", "5"]
    name = f"text:{case.inputs.text}"
    case.run("tune", *DECODER, "--data.name", name, "--steps", "4", *words, "--out", case.place)
    return sorted(entry.name for entry in case.place.iterdir())


def transfer(case: Case) -> Any:
    """Measure transfer over two sizes."""
    words = ["--grow", "head_dim=4,8", "--seeds", "2", "--max-seeds", "2", "--minutes", "1"]
    name = f"text:{case.inputs.text}"
    case.run("transfer", *DECODER, "--data.name", name, "--steps", "4", *words, "--out", case.place)
    return sorted(entry.name for entry in case.place.iterdir() if entry.suffix in {".html", ".png"})


def plan(case: Case) -> Any:
    """Plan a run into a file."""
    case.run("plan", *DECODER, "--data.name", f"text:{case.inputs.text}", "--out", case.place)
    return json.loads(case.place.read_text()).keys() != set()


def check(case: Case) -> Any:
    """Check a preset, and write numbers and a figure."""
    (case.folder / "out").mkdir()
    figure = case.folder / "out" / f"{case.name[:251]}.png"
    words = ["lm-proxy", "--sizes", "2", "--seeds", "2"]
    case.run("check", *words, "--json", case.place, "--figure", figure, codes=(0, 1))
    return [numbers_of(json.loads(case.place.read_text())), figure.stat().st_size > 0]


def balance(case: Case) -> Any:
    """Derive learning rates into a file, and read them."""
    file = case.folder / f"{case.name[:250]}.json"
    case.run("presets", "balance", "vit-proxy", "--optimizer", "sgd", "--out", file)
    case.run("presets", "table", file, "--model", "vit-proxy", "--optimizer", "sgd")
    return json_numbers(file)


def prepare(case: Case) -> Any:
    """Prepare a text."""
    shutil.copy(case.inputs.text, case.place)
    return "token" in case.run("data", "prepare", f"text:{case.place}")


def show(case: Case) -> Any:
    """Show span corruption of a text."""
    shutil.copy(case.inputs.text, case.place)
    return len(case.run("data", "show", f"text:{case.place}").splitlines()) > 1


def tokenizer(case: Case) -> Any:
    """Train a tokenizer from a text into a file."""
    (case.folder / "in").mkdir()
    source = case.folder / "in" / case.name
    shutil.copy(case.inputs.text, source)
    file = case.folder / f"{case.name[:250]}.json"
    case.run("data", "tokenizer", f"text:{source}", "--size", "300", "--out", file)
    return hashlib.sha256(file.read_bytes()).hexdigest()


def with_tokenizer(case: Case) -> Any:
    """Train and generate with a tokenizer's file."""
    case.place.mkdir()
    file = case.place / "tokenizer.json"
    shutil.copy(case.inputs.tokenizer(), file)
    result = train_on(case, f"text:{case.inputs.text}", f"--data.tokenizer={file}", "--model.vocab-size", "300")
    case.run("generate", case.folder / "run", "--prompt", "def", "--tokens", "4")
    return result


def push(case: Case) -> Any:
    """List what would be pushed."""
    text = case.run("push", case.copied_run(), "--to", "user/name", "--dry-run")
    return [name in text for name in ("model.safetensors", "config.json")]


def data_folder(case: Case) -> Any:
    """Keep prepared data in a folder."""
    return train_on(case, f"text:{case.inputs.text}", f"--data.data-dir={case.place}")


def environment_folders(case: Case) -> Any:
    """Keep caches, settings and temporary files in folders."""
    name = f"text:{case.inputs.text}"
    names = ("MUPAX_DATA", "MUPAX_HOME", "XDG_CACHE_HOME", "JAX_COMPILATION_CACHE_DIR", "TMPDIR")
    folders = {variable: case.place / variable for variable in names}
    for folder in folders.values():
        folder.mkdir(parents=True)
    workdir = case.folder / "run"
    environ = {variable: str(folder) for variable, folder in folders.items()}
    case.run("train", *DECODER, "--data.name", name, "--steps", "4", "--workdir", workdir, environ=environ)
    return case.left(workdir, 4)


def working_directory(case: Case) -> Any:
    """Train and generate in a working directory."""
    case.place.mkdir()
    shutil.copy(case.inputs.text, case.place / "t.txt")
    case.run("train", *DECODER, "--data.name", "text:t.txt", "--steps", "4", cwd=case.place)
    case.run("generate", "runs/lm-tiny", "--prompt", "a", "--tokens", "4", cwd=case.place)
    return case.left(case.place / "runs" / "lm-tiny", 4)


def relative_name(case: Case) -> Any:
    """Give the bare name, as a shell's tab key would, after `./` where it begins with a dash or means a home folder."""
    word = f"./{case.name}" if case.name[0] in "-~" or ":" in case.name else case.name
    name = f"text:{case.inputs.text}"
    case.run("train", *DECODER, "--data.name", name, "--steps", "4", "--workdir", word)
    case.run("eval", word)
    return case.left(case.place, 4)


TRAINED = "train"
MANY = 6
"""Further names that a quick command is tried with."""
QUICK = (
    "eval WORKDIR --json",
    "eval WORKDIR/checkpoints/STEP",
    "eval --data.name",
    "export --out",
    "export WORKDIR",
    "import",
    "convert --out",
    "convert WORKDIR",
    "checkpoints",
    "--config FILE",
    "plan --out",
    "data prepare",
    "data show",
    "data tokenizer",
    "push --dry-run",
)
"""Commands of about a second."""
SLOW = (
    "train, resume",
    "two processes",
    "resume a moved run",
    "grow",
    "images:FOLDER",
    "classes in images:FOLDER",
    "predict",
    "finetune",
    "sweep",
    "tune",
    "transfer",
    "check --json --figure",
    "balance",
    "working directory",
    "folders named in the environment",
    "--data.data-dir",
    "--init-from",
)
"""Commands that are tried with two names."""

ACTS: dict[str, Callable[[Case], Any]] = {
    TRAINED: train,
    "train, resume": train_and_resume,
    "two processes": two_processes,
    "resume a moved run": resume_moved,
    "train --dry-run": dry_run,
    "relative names": relative_name,
    "eval WORKDIR --json": evaluate,
    "eval WORKDIR/checkpoints/STEP": evaluate_step,
    "eval --data.name": evaluate_on_set,
    "generate": generate,
    "serve": serve,
    "export --out": export,
    "export WORKDIR": export_from,
    "import": import_weights,
    "convert --out": convert,
    "convert WORKDIR": convert_from,
    "grow": grow,
    "checkpoints": checkpoints,
    "noise": noise,
    "text:FILE": text_file,
    "text:FOLDER": text_folder,
    "files in text:FOLDER": text_in_folder,
    "records:FOLDER": records,
    "images:FOLDER": images,
    "classes in images:FOLDER": image_class,
    "predict": predict,
    "finetune": finetune,
    "--init-from": init_from,
    "--config in a folder": config_file,
    "--config FILE": config_by_its_name,
    "sweep": sweep,
    "tune": tune,
    "transfer": transfer,
    "plan --out": plan,
    "check --json --figure": check,
    "balance": balance,
    "data prepare": prepare,
    "data show": show,
    "data tokenizer": tokenizer,
    "--data.tokenizer": with_tokenizer,
    "push --dry-run": push,
    "--data.data-dir": data_folder,
    "folders named in the environment": environment_folders,
    "working directory": working_directory,
}
"""Every command with its trials' name."""


# Ways of writing a path to a folder with a plain name


def short_run(case: Case, word: str, place: Path) -> Any:
    """Train and evaluate a workdir as it is written."""
    name = f"text:{case.inputs.text}"
    case.run("train", *DECODER, "--data.name", name, "--steps", "4", "--workdir", word)
    case.run("eval", word)
    return case.left(place, 4)


def absolute(case: Case) -> Any:
    """Write the workdir from the root."""
    return short_run(case, str(case.place), case.place)


def trailing_slash(case: Case) -> Any:
    """Write a slash after the workdir."""
    return short_run(case, f"{case.place}/", case.place)


def two_slashes(case: Case) -> Any:
    """Write two slashes in the workdir."""
    return short_run(case, f"{case.folder}//{case.name}", case.place)


def dot_in_the_middle(case: Case) -> Any:
    """Write a dot in the workdir."""
    return short_run(case, f"{case.folder}/./{case.name}", case.place)


def one_up(case: Case) -> Any:
    """Write a workdir that goes into a folder and up again."""
    (case.folder / "side").mkdir()
    return short_run(case, f"{case.folder}/side/../{case.name}", case.place)


def up_from_a_link(case: Case) -> Any:
    """Write a workdir that goes up from where a link leads."""
    (case.folder / "far" / "deep").mkdir(parents=True)
    (case.folder / "link").symlink_to(case.folder / "far" / "deep")
    return short_run(case, f"{case.folder}/link/../{case.name}", case.folder / "far" / case.name)


def link_to_a_folder(case: Case) -> Any:
    """Write a link as workdir."""
    (case.folder / "[real]").mkdir()
    case.place.symlink_to(case.folder / "[real]")
    return short_run(case, str(case.place), case.folder / "[real]")


def this_folder(case: Case) -> Any:
    """Write the working directory as workdir."""
    case.place.mkdir()
    case.run(
        "train", *DECODER, "--data.name", f"text:{case.inputs.text}", "--steps", "4", "--workdir", ".", cwd=case.place
    )
    return case.left(case.place, 4)


def home(case: Case) -> Any:
    """Write a workdir in the home folder."""
    words = ["train", *DECODER, "--data.name", f"text:{case.inputs.text}", "--steps", "4"]
    case.run(*words, "--workdir", f"~/{case.name}", environ={"HOME": str(case.folder)})
    return case.left(case.place, 4)


def deep(case: Case) -> Any:
    """Write a workdir of 1,800 characters."""
    place = case.folder.joinpath(*["[d]" * 60] * 9, case.name)
    return short_run(case, str(place), place)


WAYS: dict[str, Callable[[Case], Any]] = {
    "absolute": absolute,
    "trailing slash": trailing_slash,
    "two slashes": two_slashes,
    "a dot": dot_in_the_middle,
    "one up": one_up,
    "up from a link": up_from_a_link,
    "link": link_to_a_folder,
    "this folder": this_folder,
    "home": home,
    "1,800 characters": deep,
}
"""Ways of writing the workdir."""
