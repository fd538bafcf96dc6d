"""ORG/NAME of the Hugging Face hub as a folder of this machine: in the cache that `transformers` and `hf download` fill, too.

Only what is read here comes: configs, safetensors, the tokenizer, the preprocessor. The config is read first, so that a model
that nothing here reads is refused before its weights come.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mupax import command_line, terminal
from mupax.disk import is_remote, read_json
from mupax.errors import MupaxError, MupaxFailure
from mupax.train.checkpoints.workdir import CHECKPOINTS
from mupax.train.reuse.huggingface import tokenizer_files
from mupax.train.reuse.source import CONFIG
from mupax.zoo.configs import ConfigError
from mupax.zoo.huggingface import config as huggingface
from mupax.zoo.huggingface.tensorfile import INDEX, SINGLE, files_of_index

NEAR = (CONFIG, INDEX, *tokenizer_files.NEAR)
"""The small files that are read with weights, and where a model in parts has them."""
_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)


class HubError(MupaxError):
    """A name of the hub that gives no weights. The text says why and what to write instead."""


def local(place: Path, revision: str | None) -> Path:
    """A folder for a user's word: itself where it is here, else the snapshot of the model of that name, downloaded where need be.

    Args:
        place: a path, or ORG/NAME. What is here wins, which a note says; so does a path in a folder ORG of this machine,
            unless a revision shows that a name is meant.
        revision: branch, tag or commit; the branch main unless given.

    Raises:
        UsageError: a revision of what is no name.
        HubError: no such model or revision, one that may not be read, or one without a config or safetensors.
        ConfigError, JsonError, TensorFileError: a config or an index that is not read here.
        MupaxFailure: no answer, and no whole copy in the cache.
    """
    name = str(place)
    named, here = not is_remote(place) and bool(_NAME.fullmatch(name)), place.exists()
    if revision is not None and (here or not named):
        what = "is here" if here else "is no ORG/NAME"
        raise command_line.UsageError(
            f"--revision is of a model of the Hugging Face hub, and {name} {what}; leave it out"
        )
    if not named or here or (revision is None and place.parent.exists()):
        if (
            named and place.is_dir() and not (place / CHECKPOINTS).exists()
        ):  # a run can be nothing else
            terminal.note(
                f"note: {name} is a folder here, and is read in place of a model of that name on the hub"
            )
        return place
    return _snapshot(name, revision)


def _snapshot(name: str, revision: str | None) -> Path:
    """The folder of a model in the cache, with all that is read of it."""
    folder = _downloaded(name, revision, NEAR)
    at = f"{name} at {folder.name[:12]}"
    if not (folder / CONFIG).is_file():
        raise HubError(f"{at} has no {CONFIG}; give a model that `transformers` reads")
    try:
        huggingface.from_huggingface(read_json(folder / CONFIG))
    except ConfigError as error:
        raise HubError(f"{at}: {error}") from error
    parts = list(files_of_index(folder / INDEX)) if (folder / INDEX).is_file() else []
    folder = _downloaded(name, folder.name, [CONFIG, *(parts or [SINGLE])])
    if missing := [part for part in parts or [SINGLE] if not (folder / part).is_file()]:
        raise HubError(
            f"{at} has no {missing[0]}, and of weights only safetensors is read. Look for a branch that has it (--revision), or save "
            "the model again by `save_pretrained` of transformers and give the folder"
        )
    terminal.note(f"{at}, of the hub, is in {folder}")
    return folder


def _downloaded(name: str, revision: str | None, files: Any) -> Path:
    """The snapshot's folder, with those of the files that the repository has."""
    import huggingface_hub
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    with _answered(name, revision):
        endpoint = os.environ.get("HF_ENDPOINT") or None
        return Path(
            huggingface_hub.snapshot_download(
                name, revision=revision, allow_patterns=[*files], endpoint=endpoint
            )
        )


@contextmanager
def _answered(name: str, revision: str | None) -> Iterator[None]:
    """Errors of the hub and of its client as one line."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        yield
    except errors.HFValidationError as error:
        raise HubError(f"no folder {name}, and no name of the hub: {error}") from error
    except errors.RevisionNotFoundError as error:
        raise HubError(
            f"{name} has no revision {revision or 'main'}; write a branch, tag or commit of it as --revision"
        ) from error
    except errors.GatedRepoError as error:
        raise HubError(
            f"{name} is gated: ask for it on its page of the hub, then {_token(huggingface_hub.get_token())}"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise HubError(
            f"{name} is no folder here, and no model of the hub that may be read: look up its name, or where it is private "
            f"{_token(huggingface_hub.get_token())}"
        ) from error
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, OSError) as error:
        cause = (
            error.__cause__
            if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__
            else error
        )
        reason = " ".join(str(cause).split())[:200] or type(cause).__name__
        raise MupaxFailure(
            f"{name} is no folder here, has no whole copy in the cache, and the hub gives none ({reason}). Where there is a network run "
            f"`hf download {name} --local-dir FOLDER`, and give the folder"
        ) from error


def _token(token: str | None) -> str:
    if token is None:
        return "write a token that may read it into HF_TOKEN, or run `hf auth login`; there is none here"
    return "write another token into HF_TOKEN, or run `hf auth login`; the one that is here may not read it"
