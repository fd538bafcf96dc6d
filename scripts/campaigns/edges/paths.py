"""Odd names: every command that is given a folder or a file, under names that shells, globs, URLs and encodings trip over.

A trial runs a command twice: with things that have an odd name, and with the same things under a plain one. Both must end well and
give the same: the digests of all arrays, the rows of metrics, the text or the numbers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from scripts.campaigns import forks, tiny_runs
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
DECODER = (
    "lm-tiny --model.width 16 --model.depth 1 --model.num-heads 2 --model.seq-len 16 --data.batch-size 16 "
    "--data.eval-batch-size 32 --data.eval-examples 64 --optimizer.warmup-steps 2 --log.eval-every-steps 8 "
    "--checkpoint.every-steps 4 --log.no-samples --optimizer.schedule constant"
)
IMAGES = (
    "vit-digits --model.width 16 --model.depth 1 --model.num-heads 2 --data.batch-size 16 --data.eval-batch-size 16 "
    "--data.eval-examples 32 --optimizer.warmup-steps 2 --checkpoint.every-steps 4 --optimizer.schedule constant"
)
TRAIN = f"train {DECODER} --data.name=text:{{text}}"


class Failed(Exception):
    """A command whose end is a fault; the text is its outcome's."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.detail)
        self.outcome = outcome


@dataclass(frozen=True)
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

    def text(self, template: str) -> str:
        """Return a text with paths in place of words in braces."""
        return template.format_map(_Paths(self))

    def words(self, command: str) -> list[str]:
        """Return the words of a command line."""
        return [self.text(word) for word in command.split()]

    def path(self, template: str) -> Path:
        """Return a path, from a text as `Act` has it."""
        return Path(self.text(template))


class _Paths(dict[str, Any]):
    """Inputs that words in braces stand for; they are made when they are needed first."""

    def __init__(self, case: Case) -> None:
        super().__init__(
            place=case.place, folder=case.folder, name=case.name, short=case.name[:250]
        )
        self["out"] = case.folder / "out" / case.name
        self._inputs = case.inputs

    def __missing__(self, word: str) -> Path:
        return getattr(self._inputs, word)()


class Inputs:
    """Runs, weights, texts and images that commands read, made in a shared folder when a trial first needs them."""

    def __init__(self, shared: Path) -> None:
        self.folder = shared
        self._results: dict[str, Any] = {}
        tiny_runs.enter_prepared(shared)
        (shared / "rows.jsonl").write_text(
            "".join(json.dumps({"text": f"row {i} says so"}) + "\n" for i in range(900))
        )
        (shared / "home").mkdir()
        os.environ["MUPAX_HOME"] = str(shared / "home")

    def text(self) -> Path:
        """Return the path of a text."""
        return self.folder / "text.txt"

    def rows(self) -> Path:
        """Return the path of a file of records."""
        return self.folder / "rows.jsonl"

    def decoder(self) -> Path:
        """Return the workdir of a decoder's run of eight steps."""
        return self._made_by(
            "decoder", f"train {DECODER} --data.name text:{self.text()} --steps 8 --workdir"
        )

    def images(self) -> Path:
        """Return the workdir of a vision transformer's run of eight steps."""
        return self._made_by("images", f"train {IMAGES} --steps 8 --workdir")

    def exported(self) -> Path:
        """Return the folder of the decoder's weights in Hugging Face's format."""
        return self._made_by("exported", f"export {self.decoder()} --out")

    def imported(self) -> Path:
        """Return the folder of imported weights."""
        return self._made_by("imported", f"import {self.exported()} --out")

    def tokenizer(self) -> Path:
        """Return the path of a tokenizer.json."""
        return self._made_by(
            "tokenizer.json", f"data tokenizer text:{self.text()} --size 300 --out"
        )

    @cache  # noqa: B019 - one for the campaign
    def _made_by(self, name: str, command: str) -> Path:
        """Return the path that a command has made, which ends with it."""
        path = self.folder / name
        run(self.folder, [*command.split(), str(path)])
        return path

    @cache  # noqa: B019 - one for the campaign
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
    inputs = cache(lambda: Inputs(shared))
    rare_names = list(RARE_NAMES)
    pairs: list[tuple[str, str]] = []
    for index, label in enumerate(QUICK):
        turned = [
            rare_names[(seed + MANY * index + turn) % len(rare_names)] for turn in range(MANY)
        ]
        pairs += [(label, title) for title in (*COMMON, *turned)]
    pairs += [(TRAINED, title) for title in NAMES]
    for title in COMMON:
        pairs += [(label, title) for label in ACTS if label not in SLOW]
    for title in ("all at once", "not UTF-8"):
        pairs += [(label, title) for label in SLOW]

    all_trials: list[Trial] = []
    for label, title in dict.fromkeys(pairs):
        run_trial = partial(attempt, inputs, label, ACTS[label], NAMES[title])
        all_trials.append(Trial(f"{label}: {title}", label, run_trial))
    for label, act in WAYS.items():
        run_trial = partial(attempt, inputs, label, act, "w")
        all_trials.append(Trial(f"way: {label}", "ways of writing a path", run_trial))
    return all_trials


def attempt(
    inputs: Callable[[], Inputs], label: str, act: Callable[[Case], Any], name: str, folder: Path
) -> Outcome:
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
    code = forks.wait(pid, 240.0)
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
    """Start `mupax` with these words in a fork of this process, and return its process ID."""

    def prepare() -> None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - until the fork ends
        sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        os.chdir(cwd)
        os.environ.update(environ or {})

    return forks.start(words, out, prepare, errors=out.with_suffix(".err"))


# What results are compared by


def numbers_of(value: Any) -> Any:
    """Return JSON without texts and without what differs from one run to the next."""
    if isinstance(value, dict):
        items = value.items()
        return {
            key: numbers_of(item)
            for key, item in items
            if key not in VOLATILE and "seconds" not in key
        }
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
                digests[str((Path(place) / name).relative_to(folder))] = hashlib.sha256(
                    content
                ).hexdigest()
    return digests


# Commands. Each gives something that must not depend on the name.


@dataclass(frozen=True)
class Act:
    """Commands that are tried with a name.

    In all texts {place} is the path with the name, {folder} the trial's folder, {name} and {short} the name (the second
    cut to 250 characters), {out} a path with the name in another folder, and any other word a method of `Inputs`.

    Attributes:
        commands: command lines after `mupax`, which must all end well.
        result: returns what must not depend on the name, from the case and the output of the last command.
        copies: destination to what is copied there first.
        links: links that are made first, and the folders that they lead to.
        folders: folders that are made first.
        environ: variables that name folders, which are made.
        cwd: working directory.
        codes: exit codes that are right.
    """

    commands: Sequence[str]
    result: Callable[[Case, str], Any]
    copies: Mapping[str, str] = dataclasses.field(default_factory=dict)
    links: Mapping[str, str] = dataclasses.field(default_factory=dict)
    folders: Sequence[str] = ()
    environ: Mapping[str, str] = dataclasses.field(default_factory=dict)
    cwd: str = "{folder}"
    codes: Sequence[int] = (0,)

    def __call__(self, case: Case) -> Any:
        """Prepare what the commands need, run them, and return the result."""
        (case.folder / "out").mkdir()
        for folder in (*self.folders, *self.links.values(), *self.environ.values(), self.cwd):
            case.path(folder).mkdir(parents=True, exist_ok=True)
        for link, target in self.links.items():
            case.path(link).symlink_to(case.path(target))
        for destination, source in self.copies.items():
            copy(case.path(source), case.path(destination))
        environ = {variable: case.text(folder) for variable, folder in self.environ.items()}
        output = ""
        for command in self.commands:
            words = [case.text(word) for word in command.split()]
            output = case.run(*words, environ=environ, cwd=case.path(self.cwd), codes=self.codes)
        return self.result(case, output)


def copy(source: Path, destination: Path) -> None:
    """Copy a file or a folder."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, destination)
    else:
        shutil.copy(source, destination)


def left(workdir: str, step: int) -> Callable[[Case, str], Any]:
    """Return a result: the rows and the digests of arrays that a run has left at a step."""
    return lambda case, output: tiny_runs.left(case.path(workdir), step)


def arrays(workdir: str, step: int) -> Callable[[Case, str], Any]:
    """Return a result: the digests of arrays that a workdir has at a step."""
    return lambda case, output: tiny_runs.left_arrays(case.path(workdir), step)


def weights(folder: str) -> Callable[[Case, str], Any]:
    """Return a result: the digests of the files of weights in a folder."""
    return lambda case, output: digests(case.path(folder), ".safetensors")


def numbers(file: str) -> Callable[[Case, str], Any]:
    """Return a result: the numbers of a JSON file."""
    return lambda case, output: json_numbers(case.path(file))


def printed(output: str, *texts: str) -> list[bool]:
    """Return which texts are in an output."""
    return [text in output for text in texts]


def names_in(folder: Path, endings: Sequence[str] = ("",)) -> list[str]:
    """Return the names of a folder with one of these endings."""
    return sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(tuple(endings)))


def two_processes(case: Case) -> Any:
    """Train with two processes that save together."""
    shutil.copy(case.inputs.text(), case.folder / "text.txt")
    name = "".join(case.name.split())  # a session's command line is split at spaces
    session = tiny_runs.Session(tiny_runs.Case("decoder", 2), case.folder, name, 20)
    codes = session.wait(240)
    outcome = judge(Ended(max(codes), session.output(), 0.0), [0])
    if outcome.verdict != "ok":
        raise Failed(outcome)
    return tiny_runs.left_arrays(case.folder / name, 20)


def serve(case: Case) -> Any:
    """Serve a run, and ask for text."""
    copy(case.inputs.decoder(), case.place)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    out = case.folder / "serve.out"
    pid = fork(["serve", str(case.place), "--port", str(port)], out, None, case.folder)
    address = f"http://127.0.0.1:{port}/v1/completions"
    body = json.dumps({"prompt": "def", "max_tokens": 8, "temperature": 0}).encode()
    request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
    answer: Any = None
    until = time.monotonic() + 120
    while answer is None and time.monotonic() < until:
        with suppress(OSError):
            answer = json.loads(urllib.request.urlopen(request, timeout=90).read())["choices"][0][
                "text"
            ]
        time.sleep(0.1)
    os.kill(pid, signal.SIGINT)
    outcome = judge(Ended(forks.wait(pid, 60), output_of(out), 60.0), [0, 130])
    if outcome.verdict != "ok":
        raise Failed(outcome)
    return answer


def config_file(case: Case, file: Path) -> Path:
    """Write a run's config to a file, and return the file."""
    file.parent.mkdir(exist_ok=True)
    file.write_text(case.run(*case.words(f"{TRAIN} --print-config")))
    return file


def config_in_a_folder(case: Case) -> Any:
    """Train by a config file in a folder."""
    file = config_file(case, case.place / "c.yaml")
    workdir = case.folder / "run"
    case.run("train", "--config", file, "--steps", "4", "--workdir", workdir)
    return tiny_runs.left(workdir, 4)


def config_by_its_name(case: Case) -> Any:
    """Read a config file that has the name."""
    file = config_file(case, case.path("{folder}/{short}.yaml"))
    return numbers_of(json.loads(case.run("train", f"--config={file}", "--print-config")))


def relative_name(case: Case) -> Any:
    """Give the bare name, as a shell's tab key would, after `./` where it begins with a dash or means a home folder."""
    word = f"./{case.name}" if case.name[0] in "-~" or ":" in case.name else case.name
    case.run(*case.words(f"{TRAIN} --steps 4"), "--workdir", word)
    case.run("eval", word)
    return tiny_runs.left(case.place, 4)


def workdir_as(word: str, place: str = "{place}", **more: Any) -> Act:
    """Return commands that train and evaluate a workdir as it is written."""
    return Act((f"{TRAIN} --steps 4 --workdir {word}", f"eval {word}"), left(place, 4), **more)


def train_on(data: str, more: str = "", **fields: Any) -> Act:
    """Return a command that trains on data, with more flags."""
    command = f"train {DECODER} --data.name={data} --steps 4 --workdir {{folder}}/run {more}"
    return Act((command,), left("{folder}/run", 4), **fields)


_RUN = {"{place}": "{decoder}"}
"""The decoder's run is copied under the name."""
_TEXT = {"{place}": "{text}"}
_PICTURES = "{folder}/pictures/{name}"
_IMAGES = "--data.eval-examples 2 --steps 4 --workdir {folder}/run"
_STUDY = f"{DECODER} --data.name text:{{text}} --steps 4"
_TUNE = "--over lr --points 3 --batch 2 --seeds 1 --confirm 0 --minutes 5"
_CACHES = ("MUPAX_DATA", "MUPAX_HOME", "XDG_CACHE_HOME", "JAX_COMPILATION_CACHE_DIR", "TMPDIR")
TRAINED = "train"
MANY = 6
"""Further names that a quick command is tried with."""
ACTS: dict[str, Callable[[Case], Any]] = {
    TRAINED: Act((f"{TRAIN} --steps 4 --workdir={{place}}",), left("{place}", 4)),
    "train, resume": Act(
        [
            f"{TRAIN} --ema.decay 0.9 --resume --workdir={{place}} --steps {steps}"
            for steps in (4, 8)
        ],
        left("{place}", 8),
    ),
    "two processes": two_processes,
    "resume a moved run": Act(
        ("train --resume --workdir {place} --steps 12",), left("{place}", 12), _RUN
    ),
    "train --dry-run": Act(
        (f"{TRAIN} --dry-run --workdir {{place}}",), lambda case, _: case.place.exists()
    ),
    "relative names": relative_name,
    "eval WORKDIR --json": Act(("eval {place} --json {out}",), numbers("{out}"), _RUN),
    "eval WORKDIR/checkpoints/STEP": Act(
        ("eval {place}/checkpoints/4 --json {folder}/e.json",), numbers("{folder}/e.json"), _RUN
    ),
    "eval --data.name": Act(
        ("eval {decoder} --data.name=text:{place} --json {folder}/e.json",),
        numbers("{folder}/e.json"),
        _TEXT,
    ),
    "generate": Act(
        ("generate {place} --prompt def --tokens 12 --seed 3",), lambda case, output: output, _RUN
    ),
    "serve": serve,
    "export --out": Act(("export {decoder} --out {place}",), weights("{place}")),
    "export WORKDIR": Act(("export {place} --out {folder}/hf",), weights("{folder}/hf"), _RUN),
    "import": Act(
        ("import {folder}/from/{name} --out {place}",),
        weights("{place}"),
        {"{folder}/from/{name}": "{exported}"},
    ),
    "convert --out": Act(
        ("convert {decoder} --form mean-field --out {place}",), arrays("{place}", 8)
    ),
    "convert WORKDIR": Act(
        ("convert {place} --form mean-field --out {out}",), arrays("{out}", 8), _RUN
    ),
    "grow": Act(
        ("grow {place} --set width=32 --out {out}", "train --resume --workdir {out} --steps 10"),
        left("{out}", 10),
        _RUN,
    ),
    "checkpoints": Act(("checkpoints {place} --verify --json {out}",), numbers("{out}"), _RUN),
    "noise": Act(
        ("noise {place} --batches 4 --json {folder}/n.json",), numbers("{folder}/n.json"), _RUN
    ),
    "text:FILE": train_on("text:{place}", copies=_TEXT),
    "text:FOLDER": train_on(
        "text:{place}", copies={"{place}/{name}/a.txt": "{text}", "{place}/b.txt": "{text}"}
    ),
    "files in text:FOLDER": train_on(
        "text:{folder}/texts", copies={"{folder}/texts/{name}": "{text}"}
    ),
    "records:FOLDER": train_on("records:{place}", copies={"{place}/rows.jsonl": "{rows}"}),
    "images:FOLDER": Act(
        (f"train {IMAGES} --data.name=images:{_PICTURES} {_IMAGES}",),
        left("{folder}/run", 4),
        {_PICTURES: "{pictures}"},
    ),
    "classes in images:FOLDER": Act(
        (f"train {IMAGES} --data.name=images:{{folder}}/set {_IMAGES}", "eval {folder}/run"),
        lambda case, _: {
            name: x["shape"] for name, x in tiny_runs.left_arrays(case.folder / "run", 4).items()
        },
        {"{folder}/set/{name}": "{pictures}/red", "{folder}/set/zzz": "{pictures}/green"},
    ),
    "predict": Act(
        (f"predict {{place}} {_PICTURES} one.png --json",),
        lambda case, output: [numbers_of(json.loads(line)) for line in output.splitlines()],
        {
            "{place}": "{images}",
            _PICTURES: "{pictures}",
            "{folder}/one.png": "{pictures}/red/0.png",
        },
    ),
    "finetune": Act(
        (
            f"finetune {_PICTURES} --from {{place}} --steps 3 --data.batch-size 4 --workdir {{folder}}/tuned",
        ),
        left("{folder}/tuned", 3),
        {"{place}": "{images}", _PICTURES: "{pictures}"},
    ),
    "--init-from": train_on("text:{text}", "--init-from={place}", copies={"{place}": "{imported}"}),
    "--config in a folder": config_in_a_folder,
    "--config FILE": config_by_its_name,
    "sweep": Act(
        (f"sweep {_STUDY} --lr 2^-9:2^-7:2 --out {{place}}",),
        lambda case, _: sorted(
            point["loss"] for point in json.loads((case.place / "sweep.json").read_text())["points"]
        ),
    ),
    "tune": Act((f"tune {_STUDY} {_TUNE} --out {{place}}",), lambda case, _: names_in(case.place)),
    "transfer": Act(
        (
            f"transfer {_STUDY} --grow head_dim=4,8 --seeds 2 --max-seeds 2 --minutes 1 --out {{place}}",
        ),
        lambda case, _: names_in(case.place, (".html", ".png")),
    ),
    "plan --out": Act(
        (f"plan {DECODER} --data.name text:{{text}} --out {{place}}",),
        lambda case, _: json.loads(case.place.read_text()).keys() != set(),
    ),
    "check --json --figure": Act(
        ("check lm-proxy --sizes 2 --seeds 2 --json {place} --figure {folder}/out/{short}.png",),
        lambda case, _: [
            json_numbers(case.place),
            case.path("{folder}/out/{short}.png").stat().st_size > 0,
        ],
        codes=(0, 1),
    ),
    "balance": Act(
        (
            "presets balance vit-proxy --optimizer sgd --out {folder}/{short}.json",
            "presets table {folder}/{short}.json --model vit-proxy --optimizer sgd",
        ),
        numbers("{folder}/{short}.json"),
    ),
    "data prepare": Act(
        ("data prepare text:{place}",), lambda case, output: printed(output, "token"), _TEXT
    ),
    "data show": Act(
        ("data show text:{place}",), lambda case, output: len(output.splitlines()) > 1, _TEXT
    ),
    "data tokenizer": Act(
        ("data tokenizer text:{out}/t.txt --size 300 --out {folder}/{short}.json",),
        lambda case, _: list(digests(case.folder, f"{case.name[:250]}.json").values()),
        {"{out}/t.txt": "{text}"},
    ),
    "--data.tokenizer": Act(
        (
            f"{TRAIN} --steps 4 --workdir {{folder}}/run --data.tokenizer={{place}}/tokenizer.json --model.vocab-size 300",
            "generate {folder}/run --prompt def --tokens 4",
        ),
        left("{folder}/run", 4),
        {"{place}/tokenizer.json": "{tokenizer}"},
    ),
    "push --dry-run": Act(
        ("push {place} --to user/name --dry-run",),
        lambda case, output: printed(output, "model.safetensors", "config.json"),
        _RUN,
    ),
    "--data.data-dir": train_on("text:{text}", "--data.data-dir={place}"),
    "folders named in the environment": train_on(
        "text:{text}", environ={variable: f"{{place}}/{variable}" for variable in _CACHES}
    ),
    "working directory": Act(
        (
            f"train {DECODER} --data.name text:t.txt --steps 4",
            "generate runs/lm-tiny --prompt a --tokens 4",
        ),
        left("{place}/runs/lm-tiny", 4),
        {"{place}/t.txt": "{text}"},
        cwd="{place}",
    ),
}
"""Every command with its trials' name."""
QUICK = (
    *(
        "eval WORKDIR --json",
        "eval WORKDIR/checkpoints/STEP",
        "eval --data.name",
        "export --out",
        "export WORKDIR",
    ),
    *(
        "import",
        "convert --out",
        "convert WORKDIR",
        "checkpoints",
        "--config FILE",
        "plan --out",
        "data prepare",
    ),
    *("data show", "data tokenizer", "push --dry-run"),
)
"""Commands of about a second."""
SLOW = (
    *(
        "train, resume",
        "two processes",
        "resume a moved run",
        "grow",
        "images:FOLDER",
        "classes in images:FOLDER",
    ),
    *(
        "predict",
        "finetune",
        "sweep",
        "tune",
        "transfer",
        "check --json --figure",
        "balance",
        "working directory",
    ),
    *("folders named in the environment", "--data.data-dir", "--init-from"),
)
"""Commands that are tried with two names."""
_DEEP = "/".join(["{folder}", *["[d]" * 60] * 9, "{name}"])
WAYS: dict[str, Callable[[Case], Any]] = {
    "absolute": workdir_as("{place}"),
    "trailing slash": workdir_as("{place}/"),
    "two slashes": workdir_as("{folder}//{name}"),
    "a dot": workdir_as("{folder}/./{name}"),
    "one up": workdir_as("{folder}/side/../{name}", folders=("{folder}/side",)),
    "up from a link": workdir_as(
        "{folder}/link/../{name}",
        "{folder}/far/{name}",
        links={"{folder}/link": "{folder}/far/deep"},
    ),
    "link": workdir_as("{place}", "{folder}/[real]", links={"{place}": "{folder}/[real]"}),
    "this folder": Act((f"{TRAIN} --steps 4 --workdir .",), left("{place}", 4), cwd="{place}"),
    "home": Act(
        (f"{TRAIN} --steps 4 --workdir ~/{{name}}",),
        left("{place}", 4),
        environ={"HOME": "{folder}"},
    ),
    "1,800 characters": workdir_as(_DEEP, _DEEP),
}
"""Ways of writing the workdir, whose folder has a plain name."""
