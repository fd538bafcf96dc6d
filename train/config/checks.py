"""Checks of settings: numbers in range, paths of this machine, patterns that name parameters."""

from __future__ import annotations

import difflib
import math
import numbers
import os
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from mupax import terminal
from mupax.disk import ADDRESS, PathError, path_of
from mupax.mappings import select_keys
from mupax.presets.roles import ParamSpec, Role
from mupax.zoo.configs import ConfigError

_TEXT_FLAGS = ("--prompt", "--system")
"""Flags whose value is text that a person wrote, not a path."""
_PLACE_FLAGS = (
    "",
    "--workdir",
    "--init-from",
    "--data.name",
    "--data.data-dir",
    "--data.tokenizer",
    "--tokenizer",
    "--out",
    "--config",
)
"""Flags whose value may be a path in a bucket. The empty one stands for a word without a flag."""


def at_least(owner: str, config: object, smallest: float, *names: str) -> None:
    """Raise ConfigError if a field of a config is less than `smallest`, infinite or NaN.

    A field that is `None` passes.

    Args:
        owner: Text before a field's name in the message, such as "optimizer." or "--".
        smallest: Least value that passes, such as 0 or 1.
        names: Fields of `config` to check.
    """
    for name in names:
        value = getattr(config, name)
        if value is None:
            continue
        if not isinstance(value, numbers.Real):
            raise ConfigError(f"{owner}{name} is {value!r}; write a number of at least {smallest}")
        # Comparing NaN by order gives False, so this form refuses NaN. `value < smallest` would
        # accept it.
        if not smallest <= float(value) < math.inf:
            raise ConfigError(f"{owner}{name} is {value}; write a number of at least {smallest}")


def check_outputs(command: object, *names: str, pictures: Sequence[str] = ()) -> None:
    """Raise ConfigError if a file that a command writes at its end cannot be written.

    Call this before the work, which would be lost. A missing folder of a file is made.

    Args:
        command: Flags of a command as a dataclass, whose field names are the flags' names.
        names: Flags with the path of such a file, or `None`, such as "json".
        pictures: Flags with the path of a picture, such as "figure_panels". Its ending has to be
            one that matplotlib writes.
    """
    for name in (*names, *pictures):
        word = getattr(command, name)
        if word is None:
            continue
        path = Path(word)
        flag = f"--{name.replace('_', '-')} {path}"
        reason = _why_unwritable(path)
        if reason:
            raise ConfigError(f"cannot write {flag}: {reason}; write the path of another file")
        ending = path.suffix.removeprefix(".").lower()
        # matplotlib adds .png to a name without an ending.
        if name in pictures and ending and ending not in _picture_endings():
            raise ConfigError(f"{flag} ends in .{ending}, and no picture does; write .png")


def _why_unwritable(path: Path) -> str:
    """Return why a file cannot be written, or "" if it can. A missing folder of it is made."""
    # pathlib writes gs://bucket as gs:/bucket, and would make a local folder of that name.
    scheme, colon, _ = str(path).partition(":/")
    if colon and scheme.isalnum():
        return f"{scheme}:// is no folder of this machine"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"its folder cannot be made ({error.strerror})"
    if path.is_dir():
        return "it is a folder"
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return "no permission"
    return ""


def _picture_endings() -> Collection[str]:
    """Return the endings of the pictures that matplotlib writes, such as "png"."""
    from matplotlib.backend_bases import FigureCanvasBase

    return FigureCanvasBase.get_supported_filetypes()


def check_local(name: str, path: str | None) -> None:
    """Raise ConfigError if a path is an address, such as gs://bucket/run.

    pathlib would silently make a local folder of that name. `None` passes.

    Args:
        name: Field, flag or variable for the message.
        path: A path or an address, which may begin with `text:`, `images:` or `measured:`.
    """
    if path is None:
        return
    address = ADDRESS.match(path)
    if address is not None:
        raise ConfigError(
            f"{name} is {path}, and {address[1]}:// is no folder of this machine, "
            "the only place that it can name; mount the bucket (gcsfuse, mount-s3) "
            "or copy the files here, and write the path of that folder"
        )


def check_place(name: str, path: str | None) -> None:
    """Raise ConfigError if a path is an address that mupax cannot read or write.

    The only usable address is gs://BUCKET/FOLDER without the wildcard characters # ? [ ] and *.
    If the optional package for gs:// is not installed, every address is refused. `None` and paths
    of this machine pass.

    Args:
        path: A path or an address, which may begin with `text:` or `images:`.
    """
    if path is None:
        return
    if not isinstance(path, str):
        raise ConfigError(f"{name} is {path!r}; write the path as text, such as {str(path)!r}")
    address = ADDRESS.match(path)
    if address is None:
        return
    if address[1] != "gs":
        raise ConfigError(
            f"{name} is {path}, and {address[1]}:// is no folder of this machine and not gs://, "
            "the one kind of bucket that is read and written; mount the bucket (gcsfuse, "
            "mount-s3) or copy the files here, and write the path of that folder"
        )
    try:
        # The slice drops a prefix such as `text:`, which is not part of the address.
        path_of(path[address.start(1) :])
    except PathError as error:
        raise ConfigError(f"{name}: {error}") from error


def check_words(argv: Sequence[str], *, is_local: bool = False) -> None:
    """Check every word of a command line, except the values of --prompt and --system.

    The value of a flag that may name a bucket, and a word without a flag, goes through
    `check_place`. Any other word goes through `check_local`.

    Args:
        is_local: `True` if only the config file may be in a bucket, for commands that write many
            small files, or pages about them. `False` by default.

    Raises:
        ConfigError: A word is an address that its flag cannot take.
    """
    previous = ""
    for word in argv:
        if previous in _TEXT_FLAGS:
            # The word is the value of a text flag. It is free text, and dashes in it begin no flag.
            previous = ""
            continue

        if word.startswith("--"):
            flag, _, value = word.partition("=")
        else:
            flag = previous
            value = word
        if flag not in _TEXT_FLAGS:
            # tyro takes --data.data_dir as well as --data.data-dir.
            may_be_in_bucket = flag.replace("_", "-") in _PLACE_FLAGS and not is_local
            name = flag or "the path"
            if flag == "--config" or may_be_in_bucket:
                check_place(name, value)
            else:
                check_local(name, value)
        # After --flag=value the next word is not the flag's value.
        takes_next = word.startswith("--") and "=" not in word
        previous = word if takes_next else ""


def note_warmup(steps: int, warmup: int) -> None:
    """Print a note on standard error if a run is shorter than its warm-up.

    Its learning rate then rises to the end.

    Args:
        steps: Number of optimizer steps of the run.
        warmup: Number of warm-up steps in its config.
    """
    if steps < warmup:
        terminal.note(
            f"note: all {steps} steps are warm-up, which has {warmup} in this config; "
            "see --optimizer.warmup-steps"
        )


def chosen(patterns: Sequence[str], specs: Mapping[str, ParamSpec], flag: str) -> set[str]:
    """Return the names of the parameters that match any pattern.

    Args:
        patterns: Each is a role (`readout` means the matrix and its bias, `bias` all biases), a
            row of the preset's table (`block.query`), or a name such as `block.mlp.*`.
        specs: Declarations of the model's parameters by name.
        flag: Flag that has the patterns, for the message.

    Raises:
        ConfigError: A pattern matches no parameter. The text has the nearest names.
    """
    names: set[str] = set()
    for pattern in patterns:
        matches = set()
        for name, spec in specs.items():
            # Not `fnmatch`, which ignores case on some systems.
            if pattern in _words(spec) or fnmatchcase(name, pattern):
                matches.add(name)
        if not matches:
            roles = _roles_of(specs)
            near = difflib.get_close_matches(pattern, [*roles, *specs], n=3) or roles
            raise ConfigError(
                f"{flag} {pattern}: no parameter has this role or name; "
                f"did you mean {', '.join(near)}?"
            )
        names |= matches
    return names


def _roles_of(specs: Mapping[str, ParamSpec]) -> list[str]:
    """Return the values of `Role` that match at least one parameter, in the order of `Role`.

    A bias matches two roles: `bias`, and the role of the matrix that it belongs to.
    """
    words: set[str] = set()
    for spec in specs.values():
        words |= _words(spec)
    # Words of a group such as block.query are left out: the message names roles.
    return [role.value for role in Role if role.value in words]


def trained(
    train_only: Sequence[str], freeze: Sequence[str], specs: Mapping[str, ParamSpec]
) -> dict[str, ParamSpec]:
    """Return the parameters that a run trains: `train_only` without `freeze`.

    Args:
        train_only: Patterns as in `chosen`. Empty means all parameters.
        freeze: Patterns as in `chosen`.
        specs: Declarations of the model's parameters by name.

    Raises:
        ConfigError: A pattern matches no parameter, or none is left to train, or low-rank adapters
            are all frozen.
    """
    names = set(specs)
    if train_only:
        names = chosen(train_only, specs, "--train-only")
    # After `train_only`, so that a part of what is trained can be frozen again.
    names -= chosen(freeze, specs, "--freeze")
    if not names:
        raise ConfigError(
            "--freeze and --train-only leave no parameter to train; write fewer patterns"
        )
    adapters = {name for name, spec in specs.items() if spec.role in (Role.LORA_A, Role.LORA_B)}
    # Adapters that never move add nothing to the model.
    if adapters and not adapters & names:
        raise ConfigError(
            "--freeze and --train-only leave the adapters of model.lora as they are; "
            "add lora_a lora_b to --train-only, or leave lora.rank out"
        )
    return select_keys(specs, names)


def _words(spec: ParamSpec) -> set[str]:
    """Return the patterns, apart from its own name, that `chosen` takes for a parameter.

    They are its role such as `bias`, for a bias also the role of its matrix such as `readout`, and
    its row in the preset's table such as `block.query`.
    """
    return {spec.role.value, (spec.of or spec.role).value, spec.group}
