"""Parameters chosen on a command line: by role, or by name with * and ? in it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from presets import ParamSpec, Role
from zoo.configs import ConfigError


def chosen(patterns: Sequence[str], specs: Mapping[str, ParamSpec], flag: str) -> set[str]:
    """Names of the parameters that any pattern means.

    Args:
        patterns: each a role (`readout`: the matrix and its bias), or a name such as `block.mlp.*`.
        specs: name to declaration.
        flag: where they were written, for the message.

    Raises:
        ConfigError: a pattern that means none; the text has what comes nearest.
    """
    found: set[str] = set()
    for pattern in patterns:
        hit = {n for n, s in specs.items() if (s.of or s.role).value == pattern or fnmatchcase(n, pattern)}
        if not hit:
            roles = [role.value for role in Role if any((s.of or s.role) is role for s in specs.values())]
            near = difflib.get_close_matches(pattern, [*roles, *specs], n=3) or roles
            raise ConfigError(f"{flag} {pattern}: no parameter has this role or name; did you mean {', '.join(near)}?")
        found |= hit
    return found
