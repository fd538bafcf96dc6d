"""What settings of any kind are checked for: numbers in range, paths of this machine, patterns that mean parameters."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from mupax import terminal
from mupax.disk import ADDRESS, PathError, path_of
from mupax.presets.roles import ParamSpec, Role
from mupax.zoo.configs import ConfigError

_TEXT_FLAGS = ("--prompt", "--system")
"""Flags whose value is a person's words, not a path."""
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
"""Flags whose value may be in a bucket; the empty one is a word without a flag."""


def at_least(owner: str, config: object, smallest: float, *names: str) -> None:
    """Raise ConfigError where a field of a config is a number below, or none; None is no number.

    Args:
        owner: what stands before a field's name in the message, such as `optimizer.` or `--`.
        config: has the fields.
        smallest: number that they may have, itself included.
        *names: of the fields.
    """
    for name in names:
        value = getattr(config, name)
        if value is not None and not smallest <= value < math.inf:
            raise ConfigError(f"{owner}{name} is {value}; write a number of at least {smallest}")


def check_local(name: str, path: str | None) -> None:
    """Raise ConfigError where a path is an address: pathlib would make a folder here of gs://bucket/run, without a word.

    Args:
        name: of the field, flag or variable, for the message.
        path: what it says; text:, images: and measured: may stand before it.
    """
    if path is not None and (address := ADDRESS.match(path)):
        raise ConfigError(
            f"{name} is {path}, and {address[1]}:// is no folder of this machine, the only place that it can name; "
            "mount the bucket (gcsfuse, mount-s3) or copy the files here, and write the path of that folder"
        )


def check_place(name: str, path: str | None) -> None:
    """Raise ConfigError where a path is an address of another kind than gs://, or one that cannot be read on this machine.

    Args:
        name: of the field or flag, for the message.
        path: what it says; text: or images: may stand before it.
    """
    if path is None or not (address := ADDRESS.match(path)):
        return
    if address[1] != "gs":
        raise ConfigError(
            f"{name} is {path}, and {address[1]}:// is no folder of this machine and not gs://, the one kind of bucket that is "
            "read and written; mount the bucket (gcsfuse, mount-s3) or copy the files here, and write the path of that folder"
        )
    try:
        path_of(path[address.start(1) :])
    except PathError as error:
        raise ConfigError(f"{name}: {error}") from error


def check_words(argv: Sequence[str], *, is_local: bool = False) -> None:
    """Apply `check_place` to every word of a command line that may name a bucket, and `check_local` to the others.

    Args:
        argv: words of the command line.
        is_local: the command writes many small files, or pages about them, so only its config may be in a bucket.
    """
    before = ""
    for word in argv:
        if before in _TEXT_FLAGS:  # the text itself, which may begin with dashes
            before = ""
            continue
        flag, _, value = word.partition("=") if word.startswith("--") else (before, "", word)
        if flag not in _TEXT_FLAGS:
            check = (
                check_place
                if flag == "--config" or (flag.replace("_", "-") in _PLACE_FLAGS and not is_local)
                else check_local
            )
            check(flag or "the path", value)
        before = word if word.startswith("--") else ""


def note_warmup(steps: int, warmup: int) -> None:
    """Says so, on standard error, where a run is shorter than its warm-up: the learning rate rises to its end.

    Args:
        steps: of the run.
        warmup: steps of its warm-up.
    """
    if steps < warmup:
        terminal.note(
            f"note: all {steps} steps are warm-up, which has {warmup} in this config; see --optimizer.warmup-steps"
        )


def chosen(patterns: Sequence[str], specs: Mapping[str, ParamSpec], flag: str) -> set[str]:
    """Names of the parameters that any pattern means.

    Args:
        patterns: each a role (`readout`: the matrix and its bias; `bias`: all of them), a row of the preset's table
            (`block.query`), or a name such as `block.mlp.*`.
        specs: name to declaration.
        flag: where they were written, for the message.

    Raises:
        ConfigError: a pattern that means none; the text has what comes nearest.
    """
    names: set[str] = set()
    for pattern in patterns:
        hit = {n for n, s in specs.items() if pattern in _words(s) or fnmatchcase(n, pattern)}
        if not hit:
            roles = [
                role.value for role in Role if any(role.value in _words(s) for s in specs.values())
            ]
            near = difflib.get_close_matches(pattern, [*roles, *specs], n=3) or roles
            raise ConfigError(
                f"{flag} {pattern}: no parameter has this role or name; did you mean {', '.join(near)}?"
            )
        names |= hit
    return names


def trained(
    train_only: Sequence[str], freeze: Sequence[str], specs: Mapping[str, ParamSpec]
) -> dict[str, ParamSpec]:
    """The parameters that a run trains: those of `train_only` (all where it is empty) without those of `freeze`.

    Args:
        train_only: patterns of `chosen`.
        freeze: the same.
        specs: name to declaration.

    Raises:
        ConfigError: a pattern that means none, or nothing left to train.
    """
    left = chosen(train_only, specs, "--train-only") if train_only else set(specs)
    left -= chosen(freeze, specs, "--freeze")
    if not left:
        raise ConfigError(
            "--freeze and --train-only leave no parameter to train; write fewer patterns"
        )
    return {name: spec for name, spec in specs.items() if name in left}


def _words(spec: ParamSpec) -> set[str]:
    """Words that mean a parameter."""
    return {spec.role.value, (spec.of or spec.role).value, spec.group}
