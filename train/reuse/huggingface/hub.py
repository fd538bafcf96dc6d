"""Models of the Hugging Face hub (ORG/NAME), downloaded into a folder of this machine.

The folder lies in the cache of `transformers` and `hf download`. Only files that mupax reads are
downloaded: configs, safetensors, the tokenizer and the preprocessor. The config is read first, so
that an unsupported model is refused before its weights are downloaded.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mupax import MupaxError, MupaxFailure, command_line, terminal
from mupax.disk import is_remote, read_json
from mupax.train.checkpoints.workdir import CHECKPOINTS
from mupax.train.reuse.huggingface import tokenizer_files
from mupax.train.reuse.source import CONFIG
from mupax.zoo.configs import ConfigError
from mupax.zoo.huggingface import config as huggingface
from mupax.zoo.huggingface.tensorfile import INDEX, SINGLE, files_of_index

NEAR = (CONFIG, INDEX, *tokenizer_files.NEAR)
"""Small files that are read with weights, among them the index of weights in several files."""
_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)


class HubError(MupaxError):
    """Model of the hub that cannot be used. The message says why and what to write instead.

    The model or its revision does not exist or may not be read, has no config or safetensors, or
    is none that mupax has.
    """


def local(path: Path, revision: str | None) -> Path:
    """Return the path of a model on this machine. A model of the hub is downloaded first.

    A path that exists wins over a model of that name on the hub. A note says so if it is a folder
    that might be meant as ORG/NAME, but not if it is a run. Files of the hub are not downloaded if
    the cache has them.

    Args:
        path: A path, or ORG/NAME of the hub. A missing path also counts as a path if its parent
            folder exists and there is no `revision`.
        revision: Branch, tag or commit on the hub, by default main.

    Raises:
        UsageError: A revision is given with a path.
        HubError: No such model or revision, no permission to read it, no config, no safetensors,
            or a config of a model that mupax does not have.
        JsonError, TensorFileError: A config or an index is damaged.
        MupaxFailure: The hub does not answer, and the cache has no complete copy.
    """
    name = str(path)
    is_name = not is_remote(path) and bool(_NAME.fullmatch(name))
    exists = path.exists()
    if revision is not None and (exists or not is_name):
        reason = "is a path here" if exists else "is no ORG/NAME"
        raise command_line.UsageError(
            f"--revision is for a model of the Hugging Face hub, and {name} {reason}; leave it out"
        )

    is_path = not is_name or exists or (revision is None and path.parent.exists())
    if not is_path:
        return _snapshot(name, revision)
    # A folder with checkpoints is a run, which the hub does not have: no note is needed.
    if is_name and path.is_dir() and not (path / CHECKPOINTS).exists():
        terminal.note(
            f"note: {name} is a folder here, and is read in place of a model of that name on "
            "the hub"
        )
    return path


def _snapshot(name: str, revision: str | None) -> Path:
    """Download all files of a model that mupax reads. Return their folder in the cache.

    The folder is also printed. Files that the cache has are not downloaded.

    Raises:
        HubError: the model has no config or safetensors, or mupax does not have it. The config is
            checked before weights are downloaded.
    """
    folder = _downloaded(name, revision, NEAR)
    commit = folder.name
    model = f"{name} at {commit[:12]}"
    if not (folder / CONFIG).is_file():
        raise HubError(f"{model} has no {CONFIG}; give a model that `transformers` reads")
    try:
        huggingface.from_huggingface(read_json(folder / CONFIG))
    except ConfigError as error:
        raise HubError(f"{model}: {error}") from error

    weights_files = []
    if (folder / INDEX).is_file():
        weights_files = list(files_of_index(folder / INDEX))
    weights_files = weights_files or [SINGLE]
    # The commit of the first download: the branch may have moved meanwhile.
    folder = _downloaded(name, commit, [CONFIG, *weights_files])
    missing = [file for file in weights_files if not (folder / file).is_file()]
    if missing:
        raise HubError(
            f"{model} has no {missing[0]}, and of weights only safetensors is read. Look for a "
            "branch that has it (--revision), or save the model again by `save_pretrained` of "
            "transformers and give the folder"
        )
    terminal.note(f"{model}, of the hub, is in {folder}")
    return folder


def _downloaded(name: str, revision: str | None, files: Any) -> Path:
    """Download those of `files` that a repository has. Return the folder of its snapshot."""
    import huggingface_hub
    from huggingface_hub.utils import disable_progress_bars

    # Progress bars would fill a log file.
    if not sys.stderr.isatty():
        disable_progress_bars()
    with _answered(name, revision):
        # The client itself reads HF_ENDPOINT once, on import, and would take "" for an address.
        endpoint = os.environ.get("HF_ENDPOINT") or None
        folder = huggingface_hub.snapshot_download(
            name, revision=revision, allow_patterns=[*files], endpoint=endpoint
        )
        return Path(folder)


@contextmanager
def _answered(name: str, revision: str | None) -> Iterator[None]:
    """Context manager that turns errors of the hub and its client into HubError or MupaxFailure.

    MupaxFailure stands for a hub that does not answer.
    """
    import huggingface_hub
    from huggingface_hub import errors

    try:
        yield
    except errors.HFValidationError as error:
        raise HubError(f"no folder {name}, and no name of the hub: {error}") from error
    except errors.RevisionNotFoundError as error:
        raise HubError(
            f"{name} has no revision {revision or 'main'}; write a branch, tag or commit of it as "
            "--revision"
        ) from error
    except errors.GatedRepoError as error:
        raise HubError(
            f"{name} is gated: ask for it on its page of the hub, then "
            f"{_token_advice(huggingface_hub.get_token())}"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise HubError(
            f"{name} is no folder here, and no model of the hub that may be read: look up its "
            f"name, or where it is private {_token_advice(huggingface_hub.get_token())}"
        ) from error
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, OSError) as error:
        cause: BaseException = error
        if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__:
            # The client reports a missing cache entry. Its cause says why there was no download.
            cause = error.__cause__
        reason = " ".join(str(cause).split())[:200] or type(cause).__name__
        raise MupaxFailure(
            f"{name} is no folder here, has no whole copy in the cache, and the hub gives none "
            f"({reason}). Where there is a network run `hf download {name} --local-dir FOLDER`, "
            "and give the folder"
        ) from error


def _token_advice(token: str | None) -> str:
    if token is None:
        return (
            "write a token that may read it into HF_TOKEN, or run `hf auth login`; "
            "there is none here"
        )
    return (
        "write another token into HF_TOKEN, or run `hf auth login`; "
        "the one that is here may not read it"
    )
