"""`pip install` leaves one name in site-packages, a command that trains, and a light API.

The wheel lies in an environment of its own, which borrows the dependencies of this one.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import urllib.request
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mupax import __version__
from tests.fixtures.xla import QUICKLY
from tests.test_readme import files_of_other_programs

ROOT = Path(__file__).resolve().parent.parent
DATA = {".html", ".json", ".npz", ".typed"}
"""Suffixes of what the product reads beside its code."""

pytestmark = pytest.mark.slow


def execute(words: list[str], folder: Path, timeout_s: float = 300, **variables: str) -> str:
    """Run a command that must succeed, with the checkout on no path, and return its output.

    Args:
        **variables: Environment variables in addition to those of this process.
    """
    environment = {**os.environ, "XLA_FLAGS": " ".join(QUICKLY), **variables}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        words,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def product() -> set[str]:
    """Return the files of the checkout that belong into a distribution, as its paths."""
    command = "git ls-files -co --exclude-standard -- mupax presets zoo train"
    listed = execute(shlex.split(command), ROOT).splitlines()
    files = {name for name in listed if (ROOT / name).is_file()}  # the links to folders are none
    assert {Path(name).suffix for name in files} == {".py", *DATA}
    return {name if name.startswith("mupax/") else f"mupax/{name}" for name in files}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the sdist, and the wheel from it, as an index would have both."""
    folder = tmp_path_factory.mktemp("distributions")
    build = [sys.executable, "-m", "hatchling", "build", "-d", str(folder), "-t"]
    execute([*build, "sdist"], ROOT)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as sdist:
        assert [member.name for member in sdist.getmembers() if not member.isfile()] == []
        names = {member.name.partition("/")[2] for member in sdist.getmembers()}
        sdist.extractall(folder, filter="data")
    extra_files = {
        "PKG-INFO",
        ".gitignore",
        "pyproject.toml",
        "README.md",
        "CHANGELOG.md",
        "LICENSE",
    }
    assert names - extra_files == product()
    execute([*build, "wheel"], archive.with_name(archive.name.removesuffix(".tar.gz")))
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel into an environment, and return the folder of its programs."""
    folder = tmp_path_factory.mktemp("environment")
    execute([sys.executable, "-m", "venv", "--without-pip", str(folder)], folder)
    python = str(folder / "bin" / "python")
    flags = "--quiet --no-deps --no-index --no-compile --disable-pip-version-check"
    install = ["install", *flags.split(), f"{wheel}[serve]"]
    execute([sys.executable, "-m", "pip", "--python", python, *install], folder)
    (packages,) = folder.glob("lib/python*/site-packages")  # lib64 is a link to it
    assert {path.name for path in packages.iterdir()} == {"mupax", f"mupax-{__version__}.dist-info"}
    # Last, so that the installer saw an empty environment. The .pth files of a folder that comes
    # from a .pth are not read, so an editable install of the checkout stays out.
    borrowed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (packages / "dependencies.pth").write_text("\n".join(sorted(borrowed)))
    return folder / "bin"


def test_a_wheel_holds_one_name_and_every_file_of_it(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        links = [entry.filename for entry in archive.infolist() if entry.external_attr >> 28 == 0xA]
    assert names == product()
    assert links == []
    assert {"mupax/py.typed", "mupax/train/studies/check/allowances.json"} < names
    assert wheel.name == f"mupax-{__version__}-py3-none-any.whl"


def test_what_serves_is_an_extra(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(f"mupax-{__version__}.dist-info/METADATA").decode()
    of_extra = re.findall(r"^Requires-Dist: (\w+).*extra == 'serve'", metadata, re.MULTILINE)
    assert sorted(of_extra) == ["h11", "starlette", "uvicorn"]


def test_the_installed_commands_start(environment: Path, tmp_path: Path):
    for command in ([str(environment / "mupax")], [str(environment / "python"), "-m", "mupax"]):
        assert execute([*command, "--version"], tmp_path) == f"mupax {__version__}\n"


PROGRAM = f"""
import sys
import mupax, mupax.presets, mupax.zoo, mupax.train

light = [name for name in ("jax", "flax", "numpy") if name in sys.modules]
assert not light, f"importing mupax imports {{light}}"
for package in (mupax.presets, mupax.zoo, mupax.train):
    for name in package.__all__:
        assert getattr(package, name) is not None
modules = {{name: module for name, module in sys.modules.items() if name.split(".")[0] == "mupax"}}
outside = [m.__file__ for m in modules.values() if not m.__file__.startswith(sys.prefix)]
assert len(modules) > 20 and not outside, f"not of the wheel: {{outside}}"
assert not any(sys.modules.get(name) for name in ("presets", "zoo", "train"))
assert {str(ROOT)!r} not in sys.path
print(mupax.__version__)

from mupax.__main__ import main
sys.exit(main(sys.argv[1:]))
"""
"""One process for the API and a run, since each would import JAX."""


def test_the_installed_api_comes_from_the_wheel_is_light_and_trains(
    environment: Path, tmp_path: Path
):
    words = (
        "train lm-tiny --steps 2 --model.width 32 --model.num-heads 2 --model.depth 1 "
        "--data.batch-size 2 --data.eval-examples 4 --optimizer.warmup-steps 1 "
        "--log.no-samples --preset.base None"
    )
    command = [str(environment / "python"), "-I", "-c", PROGRAM, *words.split()]
    assert execute(command, tmp_path).splitlines()[0] == __version__
    assert (tmp_path / "runs" / "lm-tiny" / "checkpoints" / "2").is_dir()


@pytest.mark.release
def test_a_notebook_runs_from_the_wheel(environment: Path, tmp_path: Path):
    text = (ROOT / "docs" / "notebooks" / "mup_in_ten_minutes.md").read_text()
    cells = re.findall(
        r"^```\{code-cell\}\n(?::\w+:.*?\n)*(.*?)^```$", text, re.MULTILINE | re.DOTALL
    )
    outside = "import mupax, sys; assert mupax.__file__.startswith(sys.prefix), mupax.__file__\n"
    assert len(cells) > 4
    (tmp_path / "notebook.py").write_text(outside + "\n".join(cells))
    execute([str(environment / "python"), "-I", "notebook.py"], tmp_path, MPLBACKEND="agg")


@pytest.mark.release
def test_the_notebook_for_colab_runs_from_the_wheel(environment: Path, tmp_path: Path):
    notebook = json.loads((ROOT / "examples" / "colab.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["outputs"] for cell in cells] == [[]] * len(cells)
    install, *sources = ["".join(cell["source"]) for cell in cells]
    assert install == '%pip install -q "mupax[cuda]"'
    assert len(sources) == 6
    for source in sources:
        if source.startswith("!"):
            text = source.removeprefix("!").replace("2^-9:2^-3:7", "2^-9:2^-3:3")
            text = re.sub(r"warmup-steps \d+", "warmup-steps 2", text)
            text = re.sub(r"--steps \d+", "--steps 8 --data.eval-examples 8", text)
            program, *words = shlex.split(text)
            command = [str(environment / program), *words]
        else:
            command = [str(environment / "python"), "-I", "-c", source]
        execute(command, tmp_path, MPLBACKEND="agg", MUPAX_HOME=str(tmp_path / "home"))
    record = json.loads((tmp_path / "runs" / "large" / "config.json").read_text())
    assert record["config"]["model"]["width"] == 256
    # The tuned preset brings the base that it was tuned at.
    assert record["config"]["preset"]["base"].startswith("embed=64,")
    assert (tmp_path / "runs" / "large" / "checkpoints" / "8").is_dir()


EXAMPLES = {
    "own_images": (
        "main('--steps 150')",
        150,
        r"(1[2-9]\d|200) of 200 images are called what their folder is",
    ),
    "own_text": (
        "warmup = ' --optimizer.warmup-steps 5'\n"
        "main(small='--steps 30' + warmup, large='--steps 40' + warmup)",
        40,
        r"\$ mupax serve runs/mine --port 0\nthe server answers ['\"].+['\"]",
    ),
}
"""Name to the call that runs it, steps of the run that it leaves, and what it prints."""


@pytest.mark.release
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_from_the_wheel(environment: Path, tmp_path: Path, name: str):
    call, steps, pattern = EXAMPLES[name]
    path = str(ROOT / "examples" / f"{name}.py")
    program = f"import runpy\nmain = runpy.run_path({path!r})['main']\n{call}"
    command = [str(environment / "python"), "-I", "-c", program]
    cache = tmp_path.with_name(f"{tmp_path.name}-cache")
    variables = {
        "MUPAX_DATA": str(cache),
        "HF_HUB_OFFLINE": "1",
        "XLA_FLAGS": "",
    }  # it computes for longer than it compiles
    printed = execute(command, tmp_path, timeout_s=1800, **variables)
    assert re.search(pattern, printed), printed
    run = tmp_path / "runs" / "mine"
    assert json.loads((run / "config.json").read_text())["config"]["steps"] == steps
    assert (run / "checkpoints" / str(steps)).is_dir()
    assert (tmp_path / "exported" / "model.safetensors").stat().st_size > 10_000
    absent = [
        module for module in ("torch", "transformers") if importlib.util.find_spec(module) is None
    ]
    if absent:
        assert printed.startswith(
            f"not installed: {' and '.join(absent)}; the last part is left out"
        )
    else:
        assert "transformers says the same" in printed or "transformers writes the same" in printed


TINY = (
    "--model.width 32 --model.num-heads 2 --model.depth 1 --model.seq-len 64 "
    "--data.batch-size 8 --data.eval-examples 32 --optimizer.warmup-steps 5 "
    "--log.no-samples --log.no-tensorboard --log.no-progress"
)
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def own_data(folder: Path) -> None:
    """Write texts and records into one folder, another text, and conversations."""
    library = Path(sysconfig.get_path("stdlib"))
    sources = sorted(library.glob("[a-m]*.py"))[:40]
    mixed = folder / "mine"
    (mixed / "deep").mkdir(parents=True)
    for number, source in enumerate(sources):
        target = mixed if number % 2 else mixed / "deep"
        (target / source.name).write_bytes(source.read_bytes())
    records = [
        json.dumps({"text": f"record {number} is like record {number % 7}. " * 8})
        for number in range(300)
    ]
    (mixed / "records.jsonl").write_text("\n".join(records))
    (folder / "other.txt").write_bytes((library / "typing.py").read_bytes())
    with (folder / "chat.jsonl").open("w") as file:
        for number in range(400):
            question = {"role": "user", "content": f"say {number}"}
            answer = {"role": "assistant", "content": f"it is {number % 7}."}
            file.write(json.dumps({"messages": [question, answer]}) + "\n")
    (folder / "chat.jinja").write_text(CHAT_TEMPLATE)


@contextlib.contextmanager
def served(mupax: str, folder: Path, model: str, **variables: str) -> Iterator[str]:
    """Serve a model on a free port while entered, and give the server's address."""
    command = [mupax, "serve", model, "--port", "0"]
    environment = {**os.environ, **variables, "PYTHONUNBUFFERED": "1"}
    environment.pop("PYTHONPATH", None)
    server = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert server.stdout is not None
    printed = []
    try:
        for line in server.stdout:
            printed.append(line)
            address = re.search(r"http://[^\s;]+", line)
            if address:
                yield address[0].rstrip("/")
                return
        raise AssertionError("".join(printed))
    finally:
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=60)


def answered(url: str, body: dict[str, object]) -> dict[str, Any]:
    """Return the JSON that a server answers to a request."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


@pytest.mark.release
def test_a_language_model_lives_without_its_data(environment: Path, tmp_path: Path):
    """Train, tune and serve a model. Only training needs the data, and nothing the cache."""
    mupax = str(environment / "mupax")
    home = tmp_path / "home"
    second_home = tmp_path / "there"
    home.mkdir()
    second_home.mkdir()
    own_data(home)

    def run(line: str, folder: Path = home) -> str:
        # Each place has a cache and settings of its own, as another machine has.
        variables = {"MUPAX_DATA": str(folder / ".cache"), "MUPAX_HOME": str(folder / ".settings")}
        return execute(
            [mupax, *shlex.split(line)], folder, timeout_s=600, HF_HUB_OFFLINE="1", **variables
        )

    run("data tokenizer text:mine --size 600 --out tokenizer.json")
    data = "--data.name text:mine --data.tokenizer tokenizer.json --model.vocab-size 600"
    run(f"sweep lm-tiny {data} {TINY} --steps 20 --lr 2^-9:2^-1:9 --out sweep --save-tuned small")
    assert "mup:small" in run("presets tuned")
    run(f"train lm-tiny {data} {TINY} --preset mup:small --steps 40 --workdir runs/base")
    run("train --resume --workdir runs/base --steps 60 --resume-change schedule")
    chat = "--data.chat-template chat.jinja --model.seq-len 64 --data.batch-size 8"
    chat += " --log.no-samples --log.no-tensorboard"
    run(f"finetune chat.jsonl --from runs/base --steps 20 {chat} --workdir runs/chat")

    # Another machine: the runs alone.
    shutil.copytree(home / "runs", second_home / "runs")
    shutil.copy(home / "other.txt", second_home)
    shutil.rmtree(home)
    assert len(run("generate runs/base --prompt 'def ' --tokens 8", second_home)) > 8
    run(
        "eval runs/base --data.name text:other.txt --data.eval-examples 20 --json scores.json",
        second_home,
    )
    scores = json.loads((second_home / "scores.json").read_text())
    assert scores["step"] == 60
    assert 0 < scores["bits_per_byte"] < 8
    run("export runs/base --out exported", second_home)
    run("export runs/chat --out exported-chat", second_home)
    for name in ("exported", "exported-chat"):
        assert (second_home / name / "generation_config.json").is_file()
        assert (second_home / name / "tokenizer.json").read_bytes() == (
            second_home / "runs" / "base" / "assets" / "tokenizer.json"
        ).read_bytes()
    assert (second_home / "exported-chat" / "chat_template.jinja").read_text() == CHAT_TEMPLATE
    run("import exported --out imported", second_home)
    run("import exported-chat --out imported-chat", second_home)
    written = [
        run(f"generate {name} --prompt 'def ' --tokens 8 --temperature 0", second_home)
        for name in PLACES
    ]
    assert written[0].splitlines()[0] == written[1].splitlines()[0] == written[2].splitlines()[0]
    run(
        "eval imported --data.name text:other.txt --data.eval-examples 20 --json imported.json",
        second_home,
    )
    imported = json.loads((second_home / "imported.json").read_text())
    assert imported["loss"] == pytest.approx(scores["loss"], abs=2e-4)
    variables = {
        "MUPAX_DATA": str(second_home / ".cache"),
        "MUPAX_HOME": str(second_home / ".settings"),
    }
    question = {
        "messages": [{"role": "user", "content": "say 3"}],
        "max_tokens": 12,
        "temperature": 0,
    }
    answers = []
    for model in ("runs/chat", "imported-chat"):
        with served(mupax, second_home, model, **variables) as address:
            reply = answered(f"{address}/v1/chat/completions", question)
        answers.append(reply["choices"][0]["message"]["content"])
    assert answers[0] == answers[1] != ""


PLACES = ("runs/base", "exported", "imported")
"""The same weights as a run, as an export and as an import of that."""


TYPED = """
from typing import assert_type

from mupax import presets, train, zoo

assert_type(presets.get("mup"), presets.Preset)
assert_type(zoo.get("gpt2").sizes(), dict[str, int])
assert_type(train.RECIPES["lm-tiny"](), train.Config)
assert_type(train.assemble(train.RECIPES["lm-tiny"]()), train.Program)
assert_type(train.fit(train.RECIPES["lm-tiny"]()), train.Run)
"""


def test_a_type_checker_resolves_the_api_where_it_is_installed(environment: Path, tmp_path: Path):
    (tmp_path / "theirs.py").write_text(TYPED)
    (tmp_path / "wrong.py").write_text(TYPED.replace("dict[str, int]", "dict[str, str]"))
    check = [sys.executable, "-m", "pyright", "--pythonpath", str(environment / "python")]
    # The only error is the control's.
    with pytest.raises(AssertionError, match=r"wrong\.py:\d+:\d+ - error: .*assert_type") as raised:
        execute([*check, "theirs.py", "wrong.py"], tmp_path, PYRIGHT_PYTHON_GLOBAL_NODE="0")
    assert "1 error, " in str(raised.value)


@pytest.fixture(scope="module")
def presets_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the presets alone."""
    folder = tmp_path_factory.mktemp("presets")
    execute([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)], PRESETS)
    (built,) = folder.glob("*.whl")
    return built


PRESETS = ROOT / "packaging" / "presets"
NEEDED = (
    "tyro",
    "typeguard",
    "docstring_parser",
    "typing_extensions.py",
    "yaml",
    "rich",
    "pygments",
    "markdown_it",
    "mdurl",
)
"""What its dependencies install."""


def test_the_presets_install_without_jax(presets_wheel: Path, tmp_path: Path):
    venv.create(tmp_path / "alone", symlinks=True)
    (packages,) = (tmp_path / "alone").glob("lib/python*/site-packages")
    python = str(tmp_path / "alone" / "bin" / "python")
    install = "install --quiet --no-deps --no-index --no-compile --disable-pip-version-check"
    execute(
        [sys.executable, "-m", "pip", "--python", python, *install.split(), str(presets_wheel)],
        tmp_path,
    )
    for name in NEEDED:
        (packages / name).symlink_to(Path(sysconfig.get_path("purelib")) / name)
    command = [python, "-m", "mupax"]
    table = ["presets", "table", "mup", "--model", "gpt2-large", "--base", "gpt2"]
    assert "readout" in execute([*command, *table], tmp_path)
    for name in ("small", "large"):
        (tmp_path / f"{name}.json").write_text(files_of_other_programs()[f"{name}.json"])
    assert "nothing is wrong" in execute([*command, "verify", "small.json", "large.json"], tmp_path)
    assert "nothing is wrong" in execute(
        [python, "-m", "mupax.presets", "verify", "small.json", "large.json"], tmp_path
    )
    assert "gpt2-large" in execute([*command, "models", "list"], tmp_path)
    for words in (["presets", "dynamics"], ["train", "lm-tiny"], ["generate", "runs/lm-tiny"]):
        with pytest.raises(AssertionError, match=r"needs mupax\..*; install mupax"):
            execute([*command, *words], tmp_path)
    lacking = "import importlib.util as u; print([n for n in ('jax', 'flax', 'optax', 'numpy') if u.find_spec(n)])"
    assert execute([python, "-c", lacking], tmp_path) == "[]\n"


def test_both_distributions_have_equal_files_and_dependencies(presets_wheel: Path):
    """Whichever is installed last, every file is what the other wrote: those of the checkout."""
    with zipfile.ZipFile(presets_wheel) as part:
        shared = {name for name in part.namelist() if ".dist-info/" not in name}
        assert {name for name in shared if part.read(name) != (ROOT / name).read_bytes()} == set()
    files = product()
    assert (
        {name for name in files if name.startswith(("mupax/presets/", "mupax/train/config/"))}
        < shared
        < files
    )
    whole, own = (
        tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        for folder in (ROOT, PRESETS)
    )
    assert set(own["dependencies"]) < set(whole["dependencies"])
