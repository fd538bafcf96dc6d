"""`mupax models roles MODEL`: roles of all parameters from the loss, compared with declarations."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, cast

from tyro import conf

from mupax import command_line, terminal
from mupax.command_line import Switch, UsageError
from mupax.mappings import function_of
from mupax.presets.roles import ParamSpec
from mupax.terminal import counted
from mupax.train.config import cli
from mupax.zoo import configs

if TYPE_CHECKING:
    from mupax.train.studies.roles.deduce import Roles


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """Roles, axes and fan-in of every parameter, from the loss, compared with declarations.

    The loss is traced and never runs. MODEL is a recipe, a config file, a model of `mupax models`,
    or your own MODULE:FUNCTION, which gets sizes and returns the shapes of its parameters,
    loss(params, batch) and the shapes of a batch (docs/concepts/roles.md). A parameter whose role
    is not certain is refused by name, with what to write instead.
    Exit codes: 0 all roles are found and as declared, 1 one is refused or differs, 2 bad input.
    """

    name: Annotated[conf.Positional[str], conf.arg(metavar="MODEL|RECIPE|FILE|MODULE:FUNCTION")]
    """Model to trace."""
    sizes: Annotated[str | None, conf.arg(metavar="AXIS=SIZE,...")] = None
    """Sizes for your own MODULE:FUNCTION, by logical axis. Each is doubled alone."""
    json: Switch = False
    """Print JSON."""


def main(argv: Sequence[str]) -> int:
    """Run `mupax models roles`: print roles, refusals and differences, as text or JSON.

    Returns:
        The exit code: 0 if all roles are found and as declared, 1 otherwise.

    Raises:
        UsageError, ConfigError: The model or its sizes cannot be used.
    """
    args = command_line.parse(Command, "mupax models roles", cli.with_file_first(argv))
    if ":" in args.name:
        declared, roles, differing = _function(args)
    else:
        declared, roles, differing = _zoo_model(args)
    if args.json:
        print(json.dumps(as_json(declared, roles, differing), indent=2))
    else:
        print(text(declared, roles, differing))
    return int(bool(roles.refused or differing))


def _zoo_model(args: Command) -> tuple[Mapping[str, ParamSpec], Roles, dict[str, str]]:
    """Return declarations, traced roles and their differences for a recipe or model of the zoo.

    Raises:
        UsageError: `--sizes` is given.
    """
    if args.sizes is not None:
        raise UsageError(
            "--sizes is for a MODULE:FUNCTION; a model of the zoo has sizes of its own"
        )
    if cli.is_recipe(args.name):
        config = cli.recipe(args.name)().model
    else:
        config = configs.get(args.name)
    # Imported after the name is checked, because tracing needs JAX, which takes seconds to import.
    from mupax.train.studies.roles import models

    roles = models.roles_of_config(config)
    return config.parameters(), roles, models.differences(config, roles)


def _function(args: Command) -> tuple[Mapping[str, ParamSpec], Roles, dict[str, str]]:
    """Import a user's MODULE:FUNCTION and return the roles traced from its loss.

    The module is searched in the present directory first. The first and the last value, which are
    declarations and differences from them, are empty.

    Raises:
        UsageError: `--sizes` is missing or wrong, or there is no such function.
    """
    if args.sizes is None:
        raise UsageError(
            f"{args.name} needs --sizes, such as "
            "--sizes embed=32,heads=4,head_dim=8,mlp=128,vocab=64,position=16"
        )
    sizes = _parsed_sizes(args.sizes)
    # The module is looked for in the present directory first, as by `python -m`.
    sys.path.insert(0, os.getcwd())
    try:
        build: Any = function_of(args.name)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{args.name} cannot be imported here: {error}") from None
    finally:
        # Removed again, so that later imports cannot pick up modules of the user's folder.
        sys.path.remove(os.getcwd())
    if not callable(build):
        raise UsageError(f"{args.name} is {build!r:.60}, and no function of the sizes; name one")
    from mupax.train.studies.roles import models

    return {}, models.roles_of(cast("models.Build", build), sizes), {}


def _parsed_sizes(text: str) -> dict[str, int]:
    """Return the sizes of a text such as "embed=32,heads=4", by axis.

    Raises:
        UsageError: A part is no AXIS=N of at least 2, or an axis comes twice.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = (word.strip() for word in part.partition("="))
        is_size = size.isascii() and size.isdigit() and int(size) > 1
        if not axis or not is_size or axis in sizes:
            raise UsageError(
                f"--sizes {text}: {part!r} is no AXIS=N of at least 2; "
                "write each axis once, as embed=32,heads=4"
            )
        sizes[axis] = int(size)
    return sizes


def text(declared: Mapping[str, ParamSpec], roles: Roles, differing: Mapping[str, str]) -> str:
    """Return the report of the command as text.

    It has a table of roles, a line for each refusal (a parameter whose role is not certain) and for
    each difference from the declarations, and a summary.

    Args:
        declared: Declarations by parameter. Empty for a MODULE:FUNCTION, which has none.
        differing: Differences from declarations, in words by parameter. See `models.differences`.
    """
    header = ["parameter", "group", "axes", "fan-in", "why"]
    rows = [header]
    for name, spec in roles.specs.items():
        axes = " ".join(spec.axes)
        fan_in = " ".join(spec.fan_in)
        rows.append([name, spec.group, axes, fan_in, roles.evidence[name]])
    lines = [terminal.table(rows, left=header)]
    refused = []
    for name, reason in roles.refused.items():
        refused.append(f"refused: {name}: {reason}")
    lines += refused
    for name, words in differing.items():
        lines.append(f"differs: {name}: {words}")

    count = len(roles.specs) + len(roles.refused)
    summary = f"{len(roles.specs)} of {counted(count, 'parameter')} found"
    if declared:
        num_equal = sum(name in roles.specs and name not in differing for name in declared)
        summary += f", {num_equal} as declared"
    lines.append(summary)
    return "\n".join(lines)


def as_json(
    declared: Mapping[str, ParamSpec], roles: Roles, differing: Mapping[str, str]
) -> dict[str, Any]:
    """Return the report of the command as values for JSON.

    Keys are `parameters` (found roles by parameter), `tied_readout` (`None` without one), `refused`
    (reasons by parameter), `differs` (differences by parameter), and `declared`, the number of
    declarations.

    Args:
        declared: Declarations by parameter. Empty for a MODULE:FUNCTION, which has none.
        differing: Differences from declarations, in words by parameter. See `models.differences`.
    """
    parameters = {}
    for name, spec in roles.specs.items():
        parameters[name] = {**_spec_as_json(spec), "evidence": roles.evidence[name]}
    return {
        "parameters": parameters,
        "tied_readout": roles.tied and _spec_as_json(roles.tied),
        "refused": roles.refused,
        "differs": dict(differing),
        "declared": len(declared),
    }


def _spec_as_json(spec: ParamSpec) -> dict[str, Any]:
    """Return the `group` of a declaration and all its fields but `start`, as values for JSON."""
    fields = dataclasses.asdict(spec)
    fields["role"] = spec.role.value
    fields["of"] = spec.of and spec.of.value
    fields["group"] = spec.group
    # Tracing a loss cannot find `start`, the initial value of a gain.
    del fields["start"]
    return fields
