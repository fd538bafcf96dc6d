"""`mupax push RUN|FOLDER --to USER/NAME`: send a model to a repository of Hugging Face.

A run or imported weights are exported first, with a model card.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro import conf

from mupax import MupaxError, MupaxFailure, command_line, terminal
from mupax.command_line import Switch
from mupax.disk import links_outside
from mupax.terminal import counted

if TYPE_CHECKING:
    from huggingface_hub import HfApi

SENT = (".json", ".safetensors", ".md", ".txt", ".model", ".jinja")
"""Endings of the files that are sent: weights, and small files that are read with them."""


class PushError(MupaxError):
    """Error for a model that cannot be sent to the hub. The message says what to write instead."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Push:
    """A run or weights as a repository of Hugging Face: weights as `transformers` reads them, tokenizer or preprocessing, model card.

    A new repository is private unless --public is there, and one that is public already is refused
    without it. The token is that of HF_TOKEN or of `hf auth login`, the address HF_ENDPOINT's where
    it is set.
    """

    path: Annotated[conf.Positional[command_line.Place], conf.arg(metavar="PATH")]
    """A run, one of its steps, an imported folder, or a folder of Hugging Face, which goes as it
    is."""
    to: Annotated[str, conf.arg(metavar="USER/NAME")]
    """The repository, made where there is none."""
    step: Annotated[int | Literal["best"] | None, conf.arg(metavar="N|best")] = None
    """Step of a workdir's checkpoint, or the best by its evaluations; the newest by default."""
    no_ema: Switch = False
    """Write the parameters themselves, not the moving average, if the run keeps one."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of the stored weights."""
    tokenizer: Annotated[command_line.Place | None, conf.arg(metavar="FILE")] = None
    """tokenizer.json to add if the run's own is not on this machine."""
    separator: Annotated[str | None, conf.arg(metavar="TOKEN")] = None
    """Token of --tokenizer that ends a text, for weights without a run, if it has none of the usual
    names."""
    licence: Annotated[str | None, conf.arg(aliases=("--license",), metavar="ID")] = None
    """Licence of the weights, for the model card: apache-2.0, mit, cc-by-4.0, or another that
    Hugging Face knows, in upper or lower case."""
    public: Switch = False
    """Make the repository public."""
    dry_run: Switch = False
    """List the files and send nothing."""


def main(argv: Sequence[str]) -> int:
    """Send the files, print their address, and return the exit code, 0.

    With `--dry-run`, the files are only listed and nothing is sent.

    Raises:
        PushError: a wrong name, no token, or a repository that is public or refuses writing.
        MupaxFailure: the hub does not answer, or fails.
        WeightsError, WorkdirError: no model at the path.
    """
    args = command_line.parse(Push, "mupax push", argv)
    _check_name(args.to)
    # A dry run needs no token.
    api = None if args.dry_run else _client()
    with _files(args) as (folder, names):
        for name in names:
            terminal.say(f"{(folder / name).stat().st_size:>12,}  {name}")
        if api is None:
            visibility = "public" if args.public else "private"
            terminal.say(
                f"{counted(len(names), 'file')} for {args.to}, {visibility}; nothing was sent"
            )
            return 0
        _open(api, args.to, args.public)
        terminal.say(
            f"{counted(len(names), 'file is', plural='files are')} "
            f"at {_sent(api, args, folder, names)}"
        )
    return 0


@contextmanager
def _files(args: Push) -> Iterator[tuple[Path, list[str]]]:
    """Yield a folder, and the names of the files in it that `mupax push` sends.

    A folder of Hugging Face is not converted: its files with an ending in `SENT` are sent. Other
    models are exported into a temporary folder, which is deleted at exit, and notes on the export
    are printed.

    Raises:
        PushError: export flags for a folder of Hugging Face, or links out of that folder.
        MupaxError: no model at the path, or one that cannot be exported.
    """
    from mupax.train.checkpoints.making import scratch
    from mupax.train.reuse import trained
    from mupax.train.reuse.huggingface import licences
    from mupax.train.reuse.huggingface.export import exported
    from mupax.zoo.huggingface.tensorfile import Tensors, check_whole

    place = trained.locate(args.path)
    if place.kind == "published":
        folder = place.folder
        has_flags = args.step or args.no_ema or args.tokenizer or args.separator or args.licence
        if has_flags or args.dtype != "float32":
            flags = "--step, --no-ema, --dtype, --tokenizer, --separator and --licence"
            raise PushError(f"{args.path} holds weights that go as they are; leave {flags} out")
        names = []
        for entry in folder.iterdir():
            is_sent = entry.name.endswith(SENT) and not entry.name.startswith(".")
            if is_sent and entry.is_file():
                names.append(entry.name)
        names.sort()
        _check_links(folder, names)
        if not any(name.endswith(".safetensors") for name in names):
            # `Tensors` raises the error that every command gives for a folder without weights.
            Tensors(folder)
        check_whole(folder)
        yield folder, names
        return

    with scratch() as target:
        licence = licences.identifier(args.licence) if args.licence else args.licence
        name = args.to.partition("/")[2]
        _, notes = exported(
            args.path,
            target,
            args.step,
            args.dtype,
            args.tokenizer,
            name=name,
            licence=licence,
            separator=args.separator,
            plain=args.no_ema,
        )
        for note in notes:
            terminal.say(note)
        yield target, sorted(file.name for file in target.iterdir())


def _check_links(folder: Path, names: Sequence[str]) -> None:
    """Raise `PushError` for a link out of the folder: its target may be private."""
    for name, target in links_outside(folder, names).items():
        raise PushError(
            f"{folder / name} links to {target}, outside of the folder; copy the file into the "
            "folder if it is to be sent, or remove the link"
        )


def _check_name(repository: str) -> None:
    """Raise `PushError` for a repository name that is not a valid USER/NAME."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    user, slash, name = repository.partition("/")
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise PushError(f"--to {repository}: {error}") from error
    # `validate_repo_id` also accepts a name without a user, such as that of the hub's old models.
    if not (slash and user and name):
        raise PushError(
            f"--to {repository} is no USER/NAME; write your name at Hugging Face before it, as in "
            f"--to you/{repository}"
        )


def _client() -> HfApi:
    """Return a client of the hub with the user's token. Raises PushError if there is no token."""
    import huggingface_hub

    token = huggingface_hub.get_token()
    if token is None:
        raise PushError(
            "no token of Hugging Face is here; write one that may write into HF_TOKEN, or log in "
            "by `hf auth login` (--dry-run needs none)"
        )
    return huggingface_hub.HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None, token=token)


def _open(api: HfApi, repository: str, public: bool) -> None:
    """Create the repository, private unless `public`, if it does not exist.

    A private repository that exists stays private, and a note says so if `public`.

    Raises:
        PushError: the repository exists and is public without `public`.
    """
    with _answered(repository):
        api.create_repo(repository, private=not public, exist_ok=True)
        private = api.repo_info(repository).private
    # A repository that exists keeps its visibility, whatever `create_repo` is asked for.
    if not public and private is False:
        raise PushError(
            f"{repository} is there and public; add --public to write into it, or give another "
            "name as --to"
        )
    if public and private:
        terminal.note(
            f"note: {repository} was there and private, and stays so; its settings at Hugging "
            "Face make it public"
        )


def _sent(api: HfApi, args: Push, folder: Path, names: Sequence[str]) -> str:
    """Send the files in one commit. Return the address of the repository."""
    from huggingface_hub import CommitOperationAdd

    added = [
        CommitOperationAdd(path_in_repo=name, path_or_fileobj=str(folder / name)) for name in names
    ]
    model_name = args.to.partition("/")[2]
    with _answered(args.to):
        # One commit, so that nobody downloads a model with half of its files.
        api.create_commit(args.to, added, commit_message=f"{model_name}, written by mupax")
    return f"{api.endpoint}/{args.to}"


@contextmanager
def _answered(repository: str) -> Iterator[None]:
    """Context manager that turns errors of the hub into PushError or MupaxFailure.

    PushError stands for a refusal (401, 403, 404), MupaxFailure for other errors and no answer.
    """
    from huggingface_hub import errors

    # The error of the HTTP client that the installed huggingface_hub uses.
    connection_error: Any = errors.HTTPError  # pyright: ignore[reportPrivateImportUsage]
    try:
        yield
    except errors.HfHubHTTPError as error:
        code = error.response.status_code
        message = error.server_message or str(error).strip().partition("\n")[0]
        # The hub answers 404, too, if a token may not see a repository.
        if code in (401, 403, 404):
            raise PushError(
                f"{repository}: Hugging Face refused it ({code}: {message}); the token must be "
                "one that may write there"
            ) from error
        raise MupaxFailure(f"{repository}: Hugging Face answered {code}: {message}") from error
    except connection_error as error:
        raise MupaxFailure(
            f"{repository}: Hugging Face does not answer ({error}); nothing more was sent"
        ) from error
