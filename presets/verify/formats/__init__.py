"""Files of other code as dumps, one file a format; `read` finds out which format a file has."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mupax.presets.roles import PresetError
from mupax.presets.verify.formats import cerebras, huggingface, megatron, microsoft, nanogpt, olmo
from mupax.presets.verify.formats.decoder import Reading
from mupax.presets.verify.formats.dump import Dump, of_json, read_json

FORMATS = (
    "a dump or a config.json of Hugging Face (.json), a Cerebras or OLMo config (.yaml), microsoft/mup's base shapes (.bsh), or a file "
    "with the command line or arguments of Megatron (--hidden-size) or nanoGPT-mup (--n_embd)"
)


def read(paths: Sequence[Path]) -> list[Dump]:
    """The dumps that files hold. One file alone brings its base too, where it names one.

    Args:
        paths: of files.

    Raises:
        PresetError: a file that cannot be read, of no format known, or whose numbers are none.
    """
    shapes = [path for path in paths if path.suffix == ".bsh"]
    if len(shapes) > 1:
        raise PresetError(
            "give one file of base shapes (.bsh), and the dump of the model that has them as its base"
        )
    readings = [_read(path) for path in paths if path.suffix != ".bsh"]
    if shapes and len(readings) != 1:
        raise PresetError(
            f"{shapes[0].name} has shapes alone; give it with one dump of the model that it is the base of"
        )
    if shapes:
        target = readings[0].dump()
        return [microsoft.base(_yaml(shapes[0]), shapes[0].name, target), target]
    if len(readings) == 1 and (base := readings[0].base()) is not None:
        return [base, readings[0].dump()]
    return [reading.dump() for reading in readings]


def _read(path: Path) -> Reading:
    if path.suffix == ".json":
        contents = read_json(path)
        if huggingface.fits(contents):
            return huggingface.Config(contents, path.name)
        return _Written(of_json(contents, path.name))
    if path.suffix in (".yaml", ".yml"):
        contents = _yaml(path)
        if cerebras.fits(contents):
            return cerebras.Config(contents, path.name)
        if olmo.fits(contents):
            return olmo.Config(contents, path.name)
        raise PresetError(
            f"{path.name} is no config of Cerebras (model: hidden_size) or OLMo (model: d_model); files are {FORMATS}"
        )
    try:
        text = path.read_text()
        words = (
            shlex.split(text.replace("\\\n", " "), comments=True) if path.suffix != ".py" else []
        )
    except (OSError, ValueError) as error:
        raise PresetError(
            f"{path} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from None
    if path.suffix == ".py" or nanogpt.fits(words):
        return nanogpt.Config(text if path.suffix == ".py" else words, path.name)
    if megatron.fits(words):
        return megatron.CommandLine(words, path.name)
    raise PresetError(f"{path.name} is of no format known; files are {FORMATS}")


def _yaml(path: Path) -> Any:
    import yaml

    try:
        return yaml.safe_load(path.read_text())
    except OSError as error:
        raise PresetError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise PresetError(f"{path} is no YAML: {error}") from None
    except yaml.YAMLError as error:
        raise PresetError(f"{path} is no YAML: {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise PresetError(f"{path} is no YAML of a model: nested too deep") from None


class _Written(Reading):
    """A dump, as it was written."""

    def __init__(self, dump: Dump) -> None:
        self._dump = dump

    def dump(self) -> Dump:
        return self._dump
