"""Trials of commands with folders and files whose names trip shells, globs, URLs and encodings.

A trial runs a command with an odd name and with a plain one. Both must end well and give the same:
the digests of all arrays, the rows of metrics, the text or the numbers.
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
# Characters that mean something in URLs, globs, shells, flags or Markdown.
EVERYTHING = "%41 [a]*?#|\\$HOME~'\"`;&=,@!{}()<>"
COMMON = {
    "all at once": EVERYTHING,
    # Python holds such a name as surrogates, which no text stream can print.
    "not UTF-8": os.fsdecode(b"caf\xe9\xff"),
    "newline and tab": "a\nb\tc",
    # A flag of `mupax train`.
    "leading dashes": "--resume",
    # The longest name that file systems of Linux take.
    "255 bytes": "n" * 255,
    # Looks like the address of a bucket.
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
    # Flags that take several values separate them by such characters.
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
    # A terminal would obey it.
    "escape code": "\x1b[31mred",
    "one dash": "-a",
    "hidden": ".a",
    "three dots": "...",
    # The next two are one word to a reader. Neither may be turned into the other.
    "composed": "caf\u00e9",
    "decomposed": "cafe\u0301",
    "emoji": "\U0001f525\U0001f469\u200d\U0001f4bb",
    # The override character turns the order of what follows on the screen.
    "right to left": "\u05d0\u05d1\u202eabc",
    # `str.splitlines` ends a line here.
    "line separator": "a\u2028b",
    # Rich would take it for a style.
    "markup": "[bold red]a",
    "format": "{0}%s%d",
    # Looks like a URL, or like a kind of data.
    "address": "http:",
    "kind of data": "text:a",
    # The next three are names inside of a workdir.
    "best": "best",
    "digits": "10",
    "checkpoints": "checkpoints",
    "None": "None",
    # Commands take a path with such an ending for a file.
    "ends as a file": "a.json",
    # Looks like a repository of the hub with a revision.
    "repository": "org--name@main",
}
NAMES = COMMON | RARE_NAMES

VOLATILE = {"seconds", "command", "workdir", "path", "versions", "git", "time", "created", "run"}
"""Fields of JSON that differ from one run to the next."""
DECODER = (
    "lm-tiny --model.width 16 --model.depth 1 --model.num-heads 2 --model.seq-len 16 "
    "--data.batch-size 16 --data.eval-batch-size 32 --data.eval-examples 64 "
    "--optimizer.warmup-steps 2 --log.eval-every-steps 8 --checkpoint.every-steps 4 "
    "--log.no-samples --optimizer.schedule constant"
)
IMAGES = (
    "vit-digits --model.width 16 --model.depth 1 --model.num-heads 2 --data.batch-size 16 "
    "--data.eval-batch-size 16 --data.eval-examples 32 --optimizer.warmup-steps 2 "
    "--checkpoint.every-steps 4 --optimizer.schedule constant"
)
TRAIN = f"train {DECODER} --data.name=text:{{text}}"


class Failed(Exception):
    """Error for a command that ended with a fault. It carries the outcome of the trial."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.detail)
        self.outcome = outcome


@dataclass(frozen=True)
class Case:
    """Place where a trial's commands run, with the name that their files and folders get.

    Attributes:
        folder: Folder of the trial, with a plain name. Commands run in it.
        name: Odd name for folders and files; a plain one for the expected result.
        inputs: Inputs that all trials share.
    """

    folder: Path
    name: str
    inputs: Inputs

    @property
    def place(self) -> Path:
        """Path with the odd name in the folder of the trial."""
        return self.folder / self.name

    def run(
        self,
        *words: str | Path,
        environ: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        codes: Sequence[int] = (0,),
    ) -> str:
        """Run `mupax` with these words, and return its standard output.

        Args:
            environ: Variables in addition to those of this process.
            cwd: Working directory. Default: the folder of the trial.
            codes: Exit codes that are right. Default: 0 only.

        Raises:
            Failed: The command ended with another code, or showed another fault.
        """
        return run(self.folder, [str(word) for word in words], environ, cwd, codes)

    def text(self, template: str) -> str:
        """Return a text with paths in place of words in braces (see `Act`)."""
        return template.format_map(_Paths(self))

    def words(self, command: str) -> list[str]:
        """Return the words of a command line, with paths in place of words in braces."""
        return [self.text(word) for word in command.split()]

    def path(self, template: str) -> Path:
        """Return a path from a template with words in braces (see `Act`)."""
        return Path(self.text(template))


class _Paths(dict[str, Any]):
    """Mapping from words in braces to paths. Inputs are made on their first use."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self["place"] = case.place
        self["folder"] = case.folder
        self["name"] = case.name
        # The longest name has 255 bytes, and some are left for an ending.
        self["short"] = case.name[:250]
        self["out"] = case.folder / "out" / case.name
        self._inputs = case.inputs

    def __missing__(self, word: str) -> Path:
        return getattr(self._inputs, word)()


class Inputs:
    """Runs, weights, texts and images that commands read, made in `shared` on their first use."""

    def __init__(self, shared: Path) -> None:
        self.folder = shared
        self._results: dict[str, Any] = {}
        tiny_runs.prepare_forks(shared)
        rows = [json.dumps({"text": f"row {i} says so"}) + "\n" for i in range(900)]
        (shared / "rows.jsonl").write_text("".join(rows))
        (shared / "home").mkdir()
        os.environ["MUPAX_HOME"] = str(shared / "home")

    def text(self) -> Path:
        """Return the path of a small text."""
        return self.folder / "text.txt"

    def rows(self) -> Path:
        """Return the path of a file of 900 records."""
        return self.folder / "rows.jsonl"

    def decoder(self) -> Path:
        """Return the workdir of a decoder that was trained for eight steps."""
        return self._made_by(
            "decoder", f"train {DECODER} --data.name text:{self.text()} --steps 8 --workdir"
        )

    def images(self) -> Path:
        """Return the workdir of a vision transformer that was trained for eight steps."""
        return self._made_by("images", f"train {IMAGES} --steps 8 --workdir")

    def exported(self) -> Path:
        """Return the folder of the decoder's weights in the format of Hugging Face."""
        return self._made_by("exported", f"export {self.decoder()} --out")

    def imported(self) -> Path:
        """Return the folder of the weights that `mupax import` made of `exported`."""
        return self._made_by("imported", f"import {self.exported()} --out")

    def tokenizer(self) -> Path:
        """Return the path of a tokenizer.json with 300 tokens."""
        return self._made_by(
            "tokenizer.json", f"data tokenizer text:{self.text()} --size 300 --out"
        )

    @cache  # noqa: B019 - one for the campaign
    def _made_by(self, name: str, command: str) -> Path:
        """Run a `mupax` command on its first use, and return the path of its output.

        Args:
            name: Name of the output in the shared folder.
            command: Words after `mupax`, to which the path of the output is appended.
        """
        path = self.folder / name
        run(self.folder, [*command.split(), str(path)])
        return path

    @cache  # noqa: B019 - one for the campaign
    def pictures(self) -> Path:
        """Return a folder of two classes with twelve images each."""
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
        """Return the result of a command under a plain name, computed once for each label."""
        if label not in self._results:
            # A forked session would remove a TemporaryDirectory when it exits.
            folder = Path(tempfile.mkdtemp(dir=self.folder, prefix="control-"))
            self._results[label] = act(Case(folder, PLAIN, self))
            shutil.rmtree(folder)
        return self._results[label]


def trials(shared: Path, seed: int) -> list[Trial]:
    """Return the trials: `train` with every name, quick commands with many, slow ones with two."""
    inputs = cache(lambda: Inputs(shared))
    rare_names = list(RARE_NAMES)
    pairs: list[tuple[str, str]] = []
    for index, label in enumerate(QUICK):
        pairs += [(label, title) for title in COMMON]
        for turn in range(MANY):
            title = rare_names[(seed + MANY * index + turn) % len(rare_names)]
            pairs.append((label, title))
    pairs += [(TRAINED, title) for title in NAMES]
    for title in COMMON:
        for label in ACTS:
            if label not in SLOW:
                pairs.append((label, title))
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
    """Run a command with an odd name, and compare its result with that under a plain name.

    Args:
        label: Name of the command, a key of `ACTS` or `WAYS`.
        act: Function that runs the command and returns its result.
    """
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
    """Return a result after a round trip through JSON, which makes results comparable."""
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

    Args:
        folder: Folder for the files of its output.
        environ: Variables in addition to those of this process.
        cwd: Working directory. Default: `folder`.
        codes: Exit codes that are right. Default: 0 only.

    Raises:
        Failed: The command ended with another code, or showed another fault.
    """
    number = len(list(folder.glob("*.out")))
    log = folder / f"{number}.out"
    began = time.monotonic()
    pid = fork(words, log, environ, cwd or folder)
    code = forks.wait(pid, 240.0)
    ended = Ended(code, output_of(log), time.monotonic() - began)
    outcome = judge(ended, codes)
    if outcome.verdict != "ok":
        raise Failed(Outcome(outcome.verdict, f"{' '.join(words[:2])}: {outcome.detail}"))
    return log.read_text(errors="replace")


def output_of(log: Path) -> str:
    """Return the standard output and the standard error of a command that `fork` started."""
    texts = []
    for file in (log, log.with_suffix(".err")):
        if file.exists():
            texts.append(file.read_text(errors="replace"))
    return "\n".join(texts)


def fork(words: list[str], log: Path, environ: Mapping[str, str] | None, cwd: Path) -> int:
    """Start `mupax` with these words in a fork of this process, and return its process ID.

    Args:
        log: File for standard output. Standard error goes to the same name with `.err`.
    """

    def prepare() -> None:
        # The streams of this process would buffer into its own files.
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stderr = open(  # noqa: SIM115
            2, "w", encoding="utf-8", errors="backslashreplace", closefd=False
        )
        os.chdir(cwd)
        os.environ.update(environ or {})

    return forks.start(words, log, prepare, errors=log.with_suffix(".err"))


# What results are compared by


def numbers_of(value: Any) -> Any:
    """Return a JSON value without `VOLATILE` fields and times, and with `None` for every string."""
    if isinstance(value, dict):
        numbers = {}
        for key, item in value.items():
            if key not in VOLATILE and "seconds" not in key:
                numbers[key] = numbers_of(item)
        return numbers
    if isinstance(value, list):
        return [numbers_of(item) for item in value]
    return None if isinstance(value, str) else value


def json_numbers(file: Path) -> Any:
    """Return the numbers of a JSON file (see `numbers_of`)."""
    return numbers_of(json.loads(file.read_text()))


def digests(folder: Path, ending: str) -> dict[str, str]:
    """Return the SHA-256 of the files below a folder that have an ending, by relative path."""
    digests = {}
    # Path.rglob would read an odd name as a pattern.
    for place, _, names in os.walk(folder):
        for name in names:
            if name.endswith(ending):
                file = Path(place) / name
                digest = hashlib.sha256(file.read_bytes()).hexdigest()
                digests[str(file.relative_to(folder))] = digest
    return digests


# Commands. Each returns a result that must not depend on the name.


@dataclass(frozen=True)
class Act:
    """Commands that are tried with an odd name.

    All texts are templates in which words in braces stand for paths. {folder} is the folder of the
    trial, {name} the odd name, {short} the name cut to 250 characters, {place} the path
    {folder}/{name}, and {out} the path {folder}/out/{name}. Any other word is a method of `Inputs`.

    Attributes:
        commands: Command lines after `mupax`, which must all end well.
        result: Function from the case and the output of the last command to a result, which must
            not depend on the name.
        copies: Paths that are copied before the commands: destination to source.
        links: Symbolic links to folders, which are made before the commands: link to its target.
        folders: Folders that are made before the commands.
        environ: Environment variables whose values are folders, made before the commands.
        cwd: Working directory of the commands.
        codes: Exit codes that are right.
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
        """Make folders, links and copies, run the commands, and return the result."""
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
            words = case.words(command)
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
    """Return a function for `Act.result`: `tiny_runs.run_result` of a run of `step` steps."""
    return lambda case, output: tiny_runs.run_result(case.path(workdir), step)


def arrays(workdir: str, step: int) -> Callable[[Case, str], Any]:
    """Return a function for `Act.result`: the digests of the arrays of a checkpoint."""
    return lambda case, output: tiny_runs.checkpoint_digests(case.path(workdir), step)


def weights(folder: str) -> Callable[[Case, str], Any]:
    """Return a function for `Act.result`: the digests of the safetensors in a folder."""
    return lambda case, output: digests(case.path(folder), ".safetensors")


def numbers(file: str) -> Callable[[Case, str], Any]:
    """Return a function for `Act.result`: the numbers of a JSON file."""
    return lambda case, output: json_numbers(case.path(file))


def printed(output: str, *texts: str) -> list[bool]:
    """Return one flag for each text: true if the output has it."""
    return [text in output for text in texts]


def names_in(folder: Path, endings: Sequence[str] = ("",)) -> list[str]:
    """Return the sorted names in a folder that have one of these endings."""
    names = []
    for entry in folder.iterdir():
        if entry.name.endswith(tuple(endings)):
            names.append(entry.name)
    return sorted(names)


def array_shapes(case: Case, output: str) -> dict[str, Any]:
    """Return the shapes of the arrays that the run in {folder}/run has at step 4."""
    arrays = tiny_runs.checkpoint_digests(case.folder / "run", 4)
    return {name: array["shape"] for name, array in arrays.items()}


def sweep_losses(case: Case, output: str) -> list[float]:
    """Return the sorted losses of the sweep in {place}."""
    points = json.loads((case.place / "sweep.json").read_text())["points"]
    return sorted(point["loss"] for point in points)


def two_processes(case: Case) -> Any:
    """Train with two processes that save together, and return the digests of the arrays."""
    shutil.copy(case.inputs.text(), case.folder / "text.txt")
    # The command line of a session is split at spaces.
    name = "".join(case.name.split())
    session = tiny_runs.Session(tiny_runs.Case("decoder", 2), case.folder, name, 20)
    codes = session.wait(240)
    outcome = judge(Ended(max(codes), session.output(), 0.0), [0])
    if outcome.verdict != "ok":
        raise Failed(outcome)
    return tiny_runs.checkpoint_digests(case.folder / name, 20)


def serve(case: Case) -> Any:
    """Serve a run, ask for eight tokens, and return the text."""
    copy(case.inputs.decoder(), case.place)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = case.folder / "serve.out"
    pid = fork(["serve", str(case.place), "--port", str(port)], log, None, case.folder)
    address = f"http://127.0.0.1:{port}/v1/completions"
    body = json.dumps({"prompt": "def", "max_tokens": 8, "temperature": 0}).encode()
    request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
    answer: Any = None
    deadline = time.monotonic() + 120
    while answer is None and time.monotonic() < deadline:
        # The server refuses connections until it is ready.
        with suppress(OSError):
            content = urllib.request.urlopen(request, timeout=90).read()
            answer = json.loads(content)["choices"][0]["text"]
        time.sleep(0.1)
    os.kill(pid, signal.SIGINT)
    # 130 is 128 and the number of SIGINT.
    outcome = judge(Ended(forks.wait(pid, 60), output_of(log), 60.0), [0, 130])
    if outcome.verdict != "ok":
        raise Failed(outcome)
    return answer


def config_file(case: Case, file: Path) -> Path:
    """Write a run's config to a file, and return the file."""
    file.parent.mkdir(exist_ok=True)
    file.write_text(case.run(*case.words(f"{TRAIN} --print-config")))
    return file


def config_in_a_folder(case: Case) -> Any:
    """Train by a config file in a folder with the odd name."""
    file = config_file(case, case.place / "c.yaml")
    workdir = case.folder / "run"
    case.run("train", "--config", file, "--steps", "4", "--workdir", workdir)
    return tiny_runs.run_result(workdir, 4)


def config_by_its_name(case: Case) -> Any:
    """Print the config of a file with the odd name, and return its numbers."""
    file = config_file(case, case.path("{folder}/{short}.yaml"))
    return numbers_of(json.loads(case.run("train", f"--config={file}", "--print-config")))


def relative_name(case: Case) -> Any:
    """Train and evaluate a workdir by its bare name, as a shell's tab key completes it.

    `./` stands before a name that begins with a dash or a tilde, or has a colon.
    """
    word = case.name
    if word[0] in "-~" or ":" in word:
        word = f"./{word}"
    case.run(*case.words(f"{TRAIN} --steps 4"), "--workdir", word)
    case.run("eval", word)
    return tiny_runs.run_result(case.place, 4)


def workdir_as(word: str, place: str = "{place}", **fields: Any) -> Act:
    """Return commands that train and evaluate a run, and give its workdir as `word`.

    Args:
        word: Workdir as it is written on the command line, with words in braces.
        place: Path at which the run must then lie, with words in braces.
        **fields: Further fields of `Act`.
    """
    return Act((f"{TRAIN} --steps 4 --workdir {word}", f"eval {word}"), left(place, 4), **fields)


def train_on(data: str, flags: str = "", **fields: Any) -> Act:
    """Return a command that trains on `data` with further flags.

    Args:
        **fields: Further fields of `Act`.
    """
    command = f"train {DECODER} --data.name={data} --steps 4 --workdir {{folder}}/run {flags}"
    return Act((command,), left("{folder}/run", 4), **fields)


_RUN = {"{place}": "{decoder}"}
"""Copies that put the decoder's run under the odd name."""
_TEXT = {"{place}": "{text}"}
_PICTURES = "{folder}/pictures/{name}"
_IMAGES = "--data.eval-examples 2 --steps 4 --workdir {folder}/run"
_STUDY = f"{DECODER} --data.name text:{{text}} --steps 4"
_TUNE = "--over lr --points 3 --batch 2 --seeds 1 --confirm 0 --minutes 5"
_CACHES = ("MUPAX_DATA", "MUPAX_HOME", "XDG_CACHE_HOME", "JAX_COMPILATION_CACHE_DIR", "TMPDIR")
TRAINED = "train"
MANY = 6
"""Number of rare names that a quick command is tried with."""
ACTS: dict[str, Callable[[Case], Any]] = {
    TRAINED: Act((f"{TRAIN} --steps 4 --workdir={{place}}",), left("{place}", 4)),
    "train, resume": Act(
        [
            f"{TRAIN} --ema.decay 0.9 --resume --workdir={{place}} --steps 4",
            f"{TRAIN} --ema.decay 0.9 --resume --workdir={{place}} --steps 8",
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
        array_shapes,
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
            f"finetune {_PICTURES} --from {{place}} --steps 3 --data.batch-size 4 "
            "--workdir {folder}/tuned",
        ),
        left("{folder}/tuned", 3),
        {"{place}": "{images}", _PICTURES: "{pictures}"},
    ),
    "--init-from": train_on("text:{text}", "--init-from={place}", copies={"{place}": "{imported}"}),
    "--config in a folder": config_in_a_folder,
    "--config FILE": config_by_its_name,
    "sweep": Act(
        (f"sweep {_STUDY} --lr 2^-9:2^-7:2 --out {{place}}",),
        sweep_losses,
    ),
    "tune": Act((f"tune {_STUDY} {_TUNE} --out {{place}}",), lambda case, _: names_in(case.place)),
    "transfer": Act(
        (
            f"transfer {_STUDY} --grow head_dim=4,8 --seeds 2 --max-seeds 2 --minutes 1 "
            "--out {place}",
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
            f"{TRAIN} --steps 4 --workdir {{folder}}/run "
            "--data.tokenizer={place}/tokenizer.json --model.vocab-size 300",
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
"""Every command by the label of its trials."""
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
"""Labels of commands that take about a second."""
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
"""Labels of commands that are tried with two names only."""
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
"""Ways to write the path of a workdir whose name is plain."""
