"""Parameters chosen on a command line: by role, or by name with * and ? in it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from mupax.presets import ParamSpec, Role
from mupax.zoo.configs import ConfigError


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
            roles = [role.value for role in Role if any(role.value in _words(s) for s in specs.values())]
            near = difflib.get_close_matches(pattern, [*roles, *specs], n=3) or roles
            raise ConfigError(f"{flag} {pattern}: no parameter has this role or name; did you mean {', '.join(near)}?")
        names |= hit
    return names


def trained(train_only: Sequence[str], freeze: Sequence[str], specs: Mapping[str, ParamSpec]) -> dict[str, ParamSpec]:
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
        raise ConfigError("--freeze and --train-only leave no parameter to train; write fewer patterns")
    return {name: spec for name, spec in specs.items() if name in left}


def _words(spec: ParamSpec) -> set[str]:
    """Words that mean a parameter."""
    return {spec.role.value, (spec.of or spec.role).value, spec.group}
