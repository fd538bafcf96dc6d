"""Extensions of a user's own through every command: an optimizer, a preset, a data set and a model family in one module each."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mupax import disk
from mupax import plugins as modules
from mupax.presets.optimizers import OPTIMIZERS
from mupax.presets.papers import PRESETS
from mupax.train.config import record as config_record
from mupax.train.config.data import SOURCES
from mupax.train.config.metrics import METRICS
from mupax.train.config.recipes import RECIPES
from mupax.train.config.record import model_from_json
from mupax.train.pods import topology
from mupax.zoo.configs import CONFIGS, FAMILIES, ConfigError
from tests.fixtures import commands
from tests.fixtures.commands import Done
from tests.fixtures.devices import one_device
from tests.fixtures.programs import shared_programs

__all__ = ["one_device", "shared_programs"]  # fixtures

SIGN = """
import optax
from mupax.presets.optimizers import OPTIMIZERS, Optimizer

def direction(config, specs):
    return optax.chain(optax.trace(config.momentum), optax.scale_by_sign())

OPTIMIZERS["own-sign"] = Optimizer(
    family="lion", direction=direction, reads=frozenset({"momentum"}), moments={"trace": 1}, check_lr=1e-3
)
"""
PRESET = """
from mupax.presets import PRESETS, Preset, Rule
from mupax.presets.rule import ONE, axis, product

def own_preset():
    "A preset of one's own."
    def rule(spec):
        return Rule(init_std=product(spec.fan_in) ** -0.5 if spec.fan_in else ONE, adam=ONE, sgd=ONE)

    return Preset(name="own-preset", rule=rule, logits=axis("head_dim") ** -0.5, no_rule={"muon": "none"})

PRESETS["own-preset"] = own_preset
"""
BARS = """
import numpy as np
from mupax.train.config.data import SOURCES, DataKind
from mupax.train.data import cache, images

class Bars:
    def __len__(self):
        return 32

    def __getitem__(self, i):
        image = np.zeros((8, 8, 1), np.uint8)
        image[i % 8] = 255
        return (image, 0) if i % 2 else (image.swapaxes(0, 1), 1)

def bars(config, model, seed, note):
    images.vision_model("own-bars", model, ["level", "upright"])
    views = (images.as_is, images.as_is)
    facts = {"digest": cache.digest("bars 1")}
    return images.ImageData(
        config, Bars(), Bars(), views=views, seed=seed, class_names=["level", "upright"], facts=facts
    )

SOURCES["own-bars"] = DataKind("own_bars:bars", task="images", reads=frozenset())
"""
PIXELS = """
import dataclasses
import jax
from flax import nnx
from mupax.presets.roles import ParamSpec, Role, block_matrix
from mupax.train.config.recipes import RECIPES
from mupax.train.config.record import model_from_json
from mupax.train.data.__main__ import main as data_main
from mupax.train.pods import topology
from mupax.train.config.run import PresetConfig
from mupax.zoo.configs import CONFIGS
from mupax.zoo.definition import Init
from mupax.zoo.families import ImageModel

@dataclasses.dataclass(frozen=True, kw_only=True)
class PixelsConfig(ImageModel):
    width: int
    depth: int

    def base_sizes(self):
        return {"embed": self.width, "mlp": 4 * self.width, "layers": self.depth}

    def parameters(self):
        return {
            "read": ParamSpec(role=Role.PATCH_EMBEDDING, axes=("patch", "embed"), fan_in=("patch",)),
            "up": block_matrix(Role.MLP_IN, ("embed", "mlp"), ("embed",)),
            "down": block_matrix(Role.MLP_OUT, ("mlp", "embed"), ("mlp",)),
            "readout": ParamSpec(role=Role.READOUT, axes=("embed", "classes"), fan_in=("embed",)),
        }

    def module(self, rngs):
        return Pixels(self, rngs)

class Pixels(nnx.Module):
    def __init__(self, config, rngs):
        init = Init(config, rngs)
        self.read, self.up, self.down, self.readout = map(init.param, config.parameters())

    def __call__(self, images_BHWC):
        h_BD = images_BHWC.reshape(len(images_BHWC), -1) @ self.read[...]
        for up_DF, down_FD in zip(self.up[...], self.down[...], strict=True):
            h_BD = h_BD + jax.nn.relu(h_BD @ up_DF) @ down_FD
        return h_BD @ self.readout[...]

CONFIGS["own-pixels"] = PixelsConfig(width=8, depth=1, image_size=8, patch_size=8, channels=1, num_classes=10)

def recipe():
    "Digits by a model of one's own."
    preset = PresetConfig(name="mup", base="own-pixels")
    return dataclasses.replace(RECIPES["vit-digits"](), recipe="own-recipe", model=CONFIGS["own-pixels"], preset=preset)

RECIPES["own-recipe"] = recipe
"""
TINY = (
    "--model.width 16 --model.depth 1 --model.num-heads 2 --model.no-bias --preset.base vit-proxy"
)
SHORT = (
    "--steps 2 --optimizer.warmup-steps 1 --data.batch-size 8 --data.eval-examples 8 "
    "--log.no-tensorboard --log.no-progress --log.no-samples"
)
RUNS = {
    "own_sign": f"vit-digits {TINY} --optimizer.name own-sign",
    "own_preset": f"vit-digits {TINY} --preset.name own-preset",
    "own_bars": f"vit-digits {TINY} --data.name own-bars --model.num-classes 2",
    "own_pixels": "own-recipe",
}
SOURCE_OF = {"own_sign": SIGN, "own_preset": PRESET, "own_bars": BARS, "own_pixels": PIXELS}
TABLES = (OPTIMIZERS, PRESETS.data, SOURCES, FAMILIES, CONFIGS, RECIPES.data, METRICS)


def forget(path: list[str]) -> None:
    """Undo what plugins did to this process, as if a new one began."""
    for table, lines in zip(TABLES, BEFORE, strict=True):
        table.clear()
        table.update(lines)
    for name in SOURCE_OF:
        sys.modules.pop(name, None)
    config_record._registered_by.clear()
    sys.path[:] = path


BEFORE = [dict(table) for table in TABLES]


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A working folder and a home folder of the test's own; tables, modules and the path are restored."""
    path = [*sys.path]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MUPAX_HOME", str(tmp_path / "home"))
    yield
    forget(path)


def command(words: str, plugin: str | None = None) -> Done:
    """Run a command as a process of its own would: nothing of an earlier one is known."""
    forget([*sys.path])
    return commands.command(words, f"--plugin {plugin}" if plugin else "")


def written(name: str, folder: Path = Path()) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(SOURCE_OF[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_ones_own_extension_is_read_by_every_command(
    name: str, fresh: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    train = f"train {RUNS[name]} {SHORT}"
    written(name, tmp_path / "code")
    monkeypatch.chdir(tmp_path / "code")
    assert command(f"{train} --workdir ../run", plugin=name).code == 0
    record = json.loads(Path("../run/config.json").read_text())
    assert [*record["plugins"]] == [name]
    monkeypatch.chdir(tmp_path)
    # Trained on this account: from any folder, without a flag.
    assert command("eval run --json scores.json").code == 0
    assert json.loads(Path("scores.json").read_text())["step"] == 2
    exported = command("export run --out out")
    assert exported.code == (2 if name == "own_pixels" else 0), exported.err
    # The flags of a resume name the extension.
    assert command(f"{train} --steps 3 --resume --workdir run").code == 2
    # Without recipe and flags the run's own record says which module to import.
    resume = "train --resume --workdir run --resume-change schedule --steps"
    if name in ("own_preset", "own_bars"):
        resumed = command(f"{resume} 3")
        assert resumed.code == 0, resumed.err
        assert "3" in {path.name for path in Path("run/checkpoints").iterdir()}
    # Of somebody else: refused in a line that names the flag, before the module's code runs.
    shutil.rmtree("home")
    for words in ("eval run", f"{resume} 4"):
        refused = command(words)
        assert refused.code == 2
        assert f"--plugin {name}" in refused.err
        assert name not in sys.modules
    # Named by the user, and changed since the run.
    monkeypatch.chdir(tmp_path / "code")
    with Path(f"{name}.py").open("a") as file:
        file.write("\nCHANGED = True\n")
    changed = command("eval ../run", plugin=name)
    assert changed.code == 0
    assert f"caution: {name} has changed" in changed.err


CHIPS = "--chips v5e:4x4 --out plan.json"


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("own_sign", "check vit-proxy --optimizer own-sign --sizes 2 --seeds 1 --dry-run"),
        ("own_preset", "check vit-proxy --preset own-preset --sizes 2 --seeds 1 --dry-run"),
        ("own_sign", f"plan {RUNS['own_sign']} {CHIPS}"),
        ("own_bars", f"plan {RUNS['own_bars']} {CHIPS}"),
        ("own_pixels", f"plan own-recipe {CHIPS}"),
        ("own_pixels", "train own-recipe --print-config"),
    ],
)
def test_a_plugin_reaches_studies_and_plans(
    name: str, line: str, fresh: None, monkeypatch: pytest.MonkeyPatch
):
    def absent(topology_name: str) -> None:
        raise topology.TopologyError("no compiler here")

    monkeypatch.setattr(topology, "ready", absent)
    written(name)
    done = command(line, plugin=name)
    assert done.code == 0
    if line.startswith("plan"):
        assert f"--plugin {name}" in done.out
    # A data set of an unknown name may be one of TFDS, which a plan does not open.
    if name != "own_bars":
        assert command(line).code == 2  # the control: without the flag nobody knows the name


PREPARE = """
def prepare(data_dir, note):
    note("written")

SOURCES["own-bars"] = SOURCES["own-bars"]._replace(prepare="own_bars:prepare")
"""


def test_a_data_set_of_ones_own_is_prepared(fresh: None):
    written("own_bars")
    done = command("data prepare own-bars", plugin="own_bars")
    assert done.code == 0
    assert "nothing to prepare" in done.out
    with Path("own_bars.py").open("a") as file:
        file.write(PREPARE)
    done = command("data prepare own-bars", plugin="own_bars")
    assert done.code == 0
    assert "written" in done.out


@pytest.mark.parametrize(("group", "name"), [("presets", "own_preset"), ("models", "own_pixels")])
def test_presets_and_models_of_ones_own_are_listed(group: str, name: str, fresh: None):
    written(name)
    done = command(f"{group} list", plugin=name)
    assert done.code == 0
    assert name.replace("_", "-") in done.out


@pytest.mark.parametrize(
    ("source", "words", "named"),
    [
        (None, "--plugin not_there", "not_there"),
        ("raise ValueError('broken')", "--plugin mine", "mine.py, line 1"),
        ("import not_installed_anywhere", "--plugin=mine", "not_installed_anywhere"),
        ("import sys; sys.exit(3)", "--plugin mine", "mine"),
        ("", "--plugin", "--plugin"),
        ("", "--plugin mine.py", "--plugin mine"),
        ("", "--plugin ../mine", "../mine"),
        ("from mupax.train.run import loop\nloop.run(None)", "--plugin mine", "__main__"),
    ],
)
def test_a_plugin_that_cannot_be_imported_is_named(
    source: str | None, words: str, named: str, fresh: None
):
    if source is not None:
        Path("mine.py").write_text(source)
    done = commands.command("train vit-digits --print-config", words)
    sys.modules.pop("mine", None)
    assert done.code == 2
    assert named in done.err


def test_a_module_that_adds_nothing_is_told(fresh: None):
    Path("mine.py").write_text("")
    done = commands.command("train vit-digits --print-config --plugin mine")
    sys.modules.pop("mine", None)
    assert done.code == 0
    assert "caution: --plugin mine" in done.err


def test_the_family_of_a_script_is_named_by_its_file(fresh: None):
    """As `python own_pixels.py` has it, where the class is of `__main__`."""
    written("own_pixels")
    defined = runpy.run_path("own_pixels.py", run_name="__main__")
    assert defined["PixelsConfig"].family == "own_pixels:PixelsConfig"


def test_a_record_cannot_choose_what_is_imported(fresh: None):
    """A stranger's record that carries the name of a run of this account, and another module."""
    Path("trap.py").write_text("raise SystemExit('the trap was sprung')")
    modules.remember("abc123", {"own_sign": str(Path.cwd())})
    trap = {"run": "abc123", "plugins": {"trap": {"digest": None, "provides": ["optimizer trap"]}}}
    with pytest.raises(modules.PluginError, match="--plugin trap"):
        config_record.restore(trap)
    with pytest.raises(ConfigError, match="--plugin trap"):
        model_from_json({"family": "trap:Model"})
    assert "trap" not in sys.modules


@pytest.mark.parametrize("error", [PermissionError("read-only"), disk.DiskError("disk full")])
def test_a_folder_that_cannot_be_written_ends_no_run(
    fresh: None, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(disk, "write_whole", refuse)
    modules.remember("def456", {"own_sign": "somewhere"})
    assert modules.trusted("def456") == {}


def test_an_entry_point_is_imported(fresh: None, monkeypatch: pytest.MonkeyPatch):
    written("own_sign")
    monkeypatch.setattr(config_record, "_entry_points", lambda: ("own_sign",))
    assert command(f"train {RUNS['own_sign']} --print-config").code == 0
