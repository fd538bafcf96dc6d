"""Readers of other programs' files, one file per format. `read` detects the format.

A reader returns a `Dump`, the values that the program gives each parameter of one model.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mupax.presets.roles import PresetError
from mupax.presets.verify.formats import cerebras, huggingface, megatron, microsoft, nanogpt, olmo
from mupax.presets.verify.formats.decoder import ModelFile
from mupax.presets.verify.formats.dump import Dump, parse_dump, read_json

FORMATS = (
    "a dump or a config.json of Hugging Face (.json), a Cerebras or OLMo config (.yaml), "
    "microsoft/mup's base shapes (.bsh), or a file with the command line or arguments of Megatron "
    "(--hidden-size) or nanoGPT-mup (--n_embd)"
)
"""List of the formats that `read` takes, for messages."""


def read(paths: Sequence[Path]) -> list[Dump]:
    """Read files that describe a model at several sizes, and return one dump per size.

    Dumps are in the order of the files. A single file that names its base model yields two dumps,
    the base and the model. A `.bsh` file of base shapes needs one other file. The result is then
    the base and the model, too.

    Args:
        paths: Files of any format in `FORMATS`.

    Raises:
        PresetError: A file cannot be read, has no known format, or has a value that is no number.
    """
    base_shapes = [path for path in paths if path.suffix == ".bsh"]
    if len(base_shapes) > 1:
        raise PresetError(
            "give one file of base shapes (.bsh), "
            "and the dump of the model that has them as its base"
        )

    files = [_read_file(path) for path in paths if path.suffix != ".bsh"]
    if base_shapes:
        path = base_shapes[0]
        if len(files) != 1:
            raise PresetError(
                f"{path.name} has shapes alone; "
                "give it with one dump of the model that it is the base of"
            )
        target = files[0].dump()
        return [microsoft.base(_read_yaml(path), path.name, target), target]

    if len(files) == 1:
        base = files[0].base()
        if base is not None:
            return [base, files[0].dump()]
    return [file.dump() for file in files]


def _read_file(path: Path) -> ModelFile:
    if path.suffix == ".json":
        return _read_json_file(path)
    if path.suffix in (".yaml", ".yml"):
        return _read_yaml_file(path)
    return _read_text_file(path)


def _read_json_file(path: Path) -> ModelFile:
    contents = read_json(path)
    if huggingface.fits(contents):
        return huggingface.Config(contents, path.name)
    return _DumpFile(parse_dump(contents, path.name))


def _read_yaml_file(path: Path) -> ModelFile:
    contents = _read_yaml(path)
    if cerebras.fits(contents):
        return cerebras.Config(contents, path.name)
    if olmo.fits(contents):
        return olmo.Config(contents, path.name)
    raise PresetError(
        f"{path.name} is no config of Cerebras (model: hidden_size) or OLMo (model: d_model); "
        f"files are {FORMATS}"
    )


def _read_text_file(path: Path) -> ModelFile:
    """Read a Python config of nanoGPT, or a file with a command line of nanoGPT or Megatron.

    Raises:
        PresetError: The file cannot be read or parsed, or its command line is of neither program.
    """
    is_python = path.suffix == ".py"
    words: list[str] = []
    try:
        text = path.read_text()
        if not is_python:
            # A shell joins lines that end in a backslash, but `shlex` does not.
            words = shlex.split(text.replace("\\\n", " "), comments=True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PresetError(f"{path} cannot be read: {reason}") from None

    # nanoGPT's config files are Python. No other format here is.
    if is_python:
        return nanogpt.Config(text, path.name)
    if nanogpt.fits(words):
        return nanogpt.Config(words, path.name)
    if megatron.fits(words):
        return megatron.CommandLine(words, path.name)
    raise PresetError(f"{path.name} has an unknown format; write {FORMATS}")


def _read_yaml(path: Path) -> Any:
    # Imported here because only some formats are YAML.
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


class _DumpFile(ModelFile):
    """Dump that was written in mupax's own JSON format."""

    def __init__(self, dump: Dump) -> None:
        self._dump = dump

    def dump(self) -> Dump:
        return self._dump
