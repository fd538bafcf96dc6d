"""`mupax models roles MODEL`: what every parameter is, found in the loss, and whether it is what its declaration says."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from tyro import conf

from mupax import command_line, terminal
from mupax.command_line import Switch, UsageError
from mupax.presets.roles import ParamSpec
from mupax.table import function_of
from mupax.train.config import cli
from mupax.zoo import configs

if TYPE_CHECKING:
    from mupax.train.studies.roles.deduce import Roles


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """Roles, axes and fan-in of every parameter, found in the loss without running it, and held against declarations.

    A recipe, a config file, a model of `mupax models`, or MODULE:FUNCTION of one's own, which gets sizes and returns its parameters' shapes,
    loss(params, batch) and the batch's shapes (docs/concepts/roles.md). What is not certain is refused by name, with what to write.
    Exit codes: 0 all is found and as declared, 1 something is refused or differs, 2 bad input.
    """

    name: Annotated[conf.Positional[str], conf.arg(metavar="MODEL|RECIPE|FILE|MODULE:FUNCTION")]
    """What is traced."""
    sizes: Annotated[str | None, conf.arg(metavar="AXIS=SIZE,...")] = None
    """Sizes that a function of one's own is called with, by logical axis; each is doubled alone."""
    json: Switch = False
    """Print JSON."""


def main(argv: Sequence[str]) -> int:
    """0 when all is found and as declared, 1 otherwise; raises UsageError and ConfigError for bad input."""
    args = command_line.parse(Command, "mupax models roles", cli.with_file_first(argv))
    declared, roles, differing = (_own if ":" in args.name else _zoo)(args)
    if args.json:
        print(json.dumps(as_json(declared, roles, differing), indent=2))
    else:
        print(text(declared, roles, differing))
    return int(bool(roles.refused or differing))


def _zoo(args: Command) -> tuple[Mapping[str, ParamSpec], Roles, dict[str, str]]:
    if args.sizes is not None:
        raise UsageError(
            "--sizes is for a MODULE:FUNCTION; a model of the zoo has sizes of its own"
        )
    config = cli.recipe(args.name)().model if cli.is_recipe(args.name) else configs.get(args.name)
    from mupax.train.studies.roles import models

    roles = models.roles_of_config(config)
    return config.parameters(), roles, models.differences(config, roles)


def _own(args: Command) -> tuple[Mapping[str, ParamSpec], Roles, dict[str, str]]:
    if args.sizes is None:
        raise UsageError(
            f"{args.name} needs --sizes, such as --sizes embed=32,heads=4,head_dim=8,mlp=128,vocab=64,position=16"
        )
    sizes: dict[str, int] = {}
    for part in args.sizes.split(","):
        axis, _, size = (word.strip() for word in part.partition("="))
        if not (axis and size.isascii() and size.isdigit() and int(size) > 1) or axis in sizes:
            raise UsageError(
                f"--sizes {args.sizes}: {part!r} is no AXIS=N of at least 2; write each axis once, as embed=32,heads=4"
            )
        sizes[axis] = int(size)
    sys.path.insert(0, os.getcwd())
    try:
        build: Any = function_of(args.name)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{args.name} cannot be imported here: {error}") from None
    finally:
        sys.path.remove(os.getcwd())
    from mupax.train.studies.roles import models

    return {}, models.roles_of(build, sizes), {}


def text(declared: Mapping[str, ParamSpec], roles: Roles, differing: Mapping[str, str]) -> str:
    """A table of what was found, then what was refused and what differs, then a sentence.

    Args:
        declared: declarations, none for a model of one's own.
        roles: what was found.
        differing: by parameter.
    """
    rows = [["parameter", "group", "axes", "fan-in", "why"]]
    rows += [
        [name, spec.group, " ".join(spec.axes), " ".join(spec.fan_in), roles.evidence[name]]
        for name, spec in roles.specs.items()
    ]
    lines = [terminal.table(rows, left=rows[0])]
    lines += [f"refused: {name}: {reason}" for name, reason in roles.refused.items()]
    lines += [f"differs: {name}: {words}" for name, words in differing.items()]
    count = len(roles.specs) + len(roles.refused)
    same = (
        f", {sum(name in roles.specs for name in declared) - len(differing)} as declared"
        if declared
        else ""
    )
    lines.append(f"{len(roles.specs)} of {count} parameters found{same}")
    return "\n".join(lines)


def as_json(
    declared: Mapping[str, ParamSpec], roles: Roles, differing: Mapping[str, str]
) -> dict[str, Any]:
    """The same as plain values.

    Args:
        declared, roles, differing: as of `text`.
    """

    def plain(spec: ParamSpec) -> dict[str, Any]:
        fields = dataclasses.asdict(spec) | {
            "role": spec.role.value,
            "of": spec.of and spec.of.value,
            "group": spec.group,
        }
        return {name: value for name, value in fields.items() if name != "start"}

    return {
        "parameters": {
            name: {**plain(spec), "evidence": roles.evidence[name]}
            for name, spec in roles.specs.items()
        },
        "tied_readout": roles.tied and plain(roles.tied),
        "refused": roles.refused,
        "differs": dict(differing),
        "declared": len(declared),
    }
