"""Commands of `mupax presets` that print presets: lists, tables, limits and comparisons.

The commands that compute more are elsewhere: `joint` in `mupax.presets.analysis.batch_command`,
`balance` and `dynamics` in `mupax.train.studies`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro import conf

from mupax import command_line, presets, terminal
from mupax.command_line import Switch
from mupax.presets import horizon, joint
from mupax.presets.analysis import desiderata, joint_limits, table, verdicts
from mupax.presets.analysis.batch_command import RunFlags, print_json
from mupax.presets.optimizers import OPTIMIZERS
from mupax.presets.papers import choices
from mupax.train.config import cli
from mupax.train.config.preset import ConstantFlags, PresetFlags, preset_for

if TYPE_CHECKING:
    from mupax.presets.tuned import find

PresetName = Annotated[conf.Positional[str], conf.arg(metavar="PRESET")]
OptimizerName = Annotated[str, conf.arg(metavar="|".join(OPTIMIZERS))]
"""Type of an optimizer's name. Help lists all optimizers, also those of plug-ins."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class List:
    """Name and summary of every preset (the default command)."""

    def run(self) -> int:
        rows = [[name, command_line.summary(make)] for name, make in presets.PRESETS.items()]
        print(terminal.table(rows))
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constants:
    """Constants of a preset with their defaults.

    Every value or range is listed with its rule, source and status. Where sources disagree on a
    constant, there are several. Every preset also takes constants of parameter groups, such as
    --preset.rates.readout 4.
    """

    preset: PresetName
    """A preset."""
    json: Switch = False
    """Print JSON."""

    def run(self) -> int:
        name = presets.get(self.preset).name
        # `measured:PATH` reads a preset from a file, and such a preset is not in PRESETS.
        if name not in presets.PRESETS:
            raise presets.PresetError(
                f"{self.preset} takes no constants; all its numbers are in its file"
            )
        parameters = inspect.signature(presets.PRESETS[name]).parameters
        # The constants of a preset are the keyword arguments of its function.
        defaults = {constant: parameter.default for constant, parameter in parameters.items()}
        if self.json:
            entries = {}
            for constant, default in defaults.items():
                published = [
                    dataclasses.asdict(choice) for choice in choices.described(name, constant)
                ]
                entries[constant] = {"default": default, "choices": published}
            return print_json(entries)
        print(table.constants_text(name, defaults))
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table(PresetFlags, RunFlags):
    """Factors of a preset for every parameter: multiplier, std, learning rate, eps and decay.

    Factors are relative to the base model, whose own factors are 1. --absolute prints values.
    """

    preset: PresetName
    """A preset, or measured:PATH."""
    model: Annotated[str, conf.arg(aliases=("--config",), metavar="MODEL|RECIPE|FILE")]
    """A model of `mupax models`, or a recipe or config file that has the model. `--config FILE`
    does the same."""
    optimizer: OptimizerName = "adam"
    """Optimizer whose learning rates and eps are printed."""
    decay: Literal["coupled", "independent"] = "coupled"
    """Kind of weight decay: w -= lr*wd*w (coupled) or w -= wd*w (independent)."""
    absolute: Switch = False
    """Print values (base constant x factor) instead of factors."""
    rules: Switch = False
    """Print power laws in m = size / base size instead of values."""
    joint: horizon.Applied = "none"
    """Also print the optimizer's hyperparameters under this joint rule, from the batch and tokens
    of the base to those of the run."""
    noise_scale: float | None = None
    """Noise scale in examples, from `mupax noise`. The joint rule does not hold above it."""
    json: Switch = False
    """Print JSON."""

    def __post_init__(self) -> None:
        # Comparing NaN by order gives False, so this form refuses NaN. `<= 0` would accept it.
        if self.noise_scale is not None and not self.noise_scale > 0:
            raise presets.PresetError(
                f"--noise-scale is {self.noise_scale}; write a number of examples above 0"
            )
        if self.joint == "none":
            names = ("batch", "tokens", "b1", "b2", "noise_scale")
            command_line.refuse_idle(self, names, "without --joint", "add --joint NAME")
            if self.rules:
                command_line.refuse_idle(self, ("decay",), "with --rules", "leave --rules out")
        super().__post_init__()
        start, stop = self.ends()[0]
        if start == stop:
            cure = "add --batch FROM:TO, such as 8:64"
            command_line.refuse_idle(self, ("noise_scale",), "at the base's batch", cure)
        if self.rules:
            command_line.refuse_idle(self, ("absolute",), "with --rules", "leave --rules out")

    def run(self) -> int:
        model = cli.model_of(self.model)
        preset = preset_for(self.config(self.preset), model)
        sizes = model.sizes()
        # A readout that is tied to the embedding has a multiplier, but no parameter of its own.
        tied = {name: factor.spec for name, factor in model.factors().items() if factor.spec}
        specs = {**dict(sorted(model.parameters().items())), **tied}

        if self.rules:
            rows = table.rule_rows(preset, specs, self.optimizer)
        else:
            rows = table.rows(
                preset, specs, sizes, self.optimizer, self.decay, absolute=self.absolute
            )
        rule = joint.of(self.joint, self.optimizer)
        batch, tokens = self.ends()
        hyperparameters = joint.path(
            rule,
            batch,
            tokens,
            b1=self.b1,
            b2=self.b2,
            decay=self.decay,
            noise_scale=self.noise_scale,
        )
        if self.json:
            has_joint = self.joint != "none"
            return print_json({"parameters": rows, "joint": hyperparameters} if has_joint else rows)

        title = f"{self.model} under {preset.describe()}, {self.optimizer}, {self.decay} decay"
        print(terminal.wrapped(title), table.text(rows), sep="\n\n")
        forward = table.forward_text(preset, sizes)
        if forward:
            print(f"\n{terminal.wrapped(forward)}")
        for caution in preset.cautions(sizes, self.optimizer):
            terminal.say(f"caution: {caution}")
        if self.joint != "none":
            title = f"under the joint rule {self.joint}, over the base's numbers"
            terminal.say(f"\n{title}\n{table.text(hyperparameters)}")
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits(ConstantFlags):
    """Limits as one size grows: exponents and verdicts of activations, logits, updates, gradients.

    They are computed from the preset's rules alone, for a pre-norm transformer.
    """

    preset: PresetName
    """A preset."""
    optimizer: OptimizerName = "adam"
    """Optimizer whose learning rates and eps hold in the limits."""
    joint: horizon.Applied = "none"
    """Joint rule by which the hyperparameters of Adam or Muon follow batch and tokens."""
    experts: Switch = False
    """Print limits of a model of experts: width with the experts' hidden size, number of experts at
    a fixed share of active ones, and hidden size alone."""
    json: Switch = False
    """Print JSON."""

    def run(self) -> int:
        preset = presets.get(self.preset, **self.values())
        rule = joint.of(self.joint, self.optimizer)
        # Joint rules are about Adam, or about the two parts of Muon.
        has_limits = preset.family(self.optimizer) == "adam" or rule.adam_lr is not None
        if self.json:
            rows = dict(verdicts.verdicts(preset, self.optimizer, experts=self.experts))
            if has_limits:
                rows.update(joint_limits.verdicts(rule))
            if rule.adam_lr is not None:
                # Muon leaves some parameters to Adam, whose rule differs.
                adam_part = joint_limits.verdicts(rule.of_adam_part)
                rows.update({f"{row}, Adam part": cells for row, cells in adam_part.items()})
            return print_json({row: _as_dicts(limits) for row, limits in rows.items()})

        title = "size^exponent of each observable as one size grows, the ratios of widths fixed"
        print(terminal.wrapped(f"{preset.describe()}, {self.optimizer}: {title}"), end="\n\n")
        print(terminal.table(verdicts.limits_rows(preset, self.optimizer, experts=self.experts)))
        if has_limits:
            terminal.say(f"\n{joint_limits.limits_text(rule)}")
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Desiderata(ConstantFlags):
    """Dimensions that can grow alone: d_k, d_v, d_ff, d_model, heads, width, positions and depth.

    Each mapping of a block is checked at the first step under SGD. Signal: entries stay. Speed:
    entries move if every weight has an equal part in the loss's decay. Balance: the preset's own
    learning rates make these parts equal. Loss decay: the parts are of order one.
    `mupax check MODEL --desiderata` measures the same.
    """

    preset: PresetName
    """A preset."""
    encoder: Switch = False
    """Print an encoder-decoder: both stacks and cross-attention, and either depth alone."""
    json: Switch = False
    """Print JSON."""

    def run(self) -> int:
        preset = presets.get(self.preset, **self.values())
        if self.json:
            by_dimension = {}
            for dimension in desiderata.growths(encoder=self.encoder):
                cells = desiderata.desiderata(preset, dimension, encoder=self.encoder)
                by_dimension[dimension] = _as_dicts(cells)
            return print_json(by_dimension)

        title = f"{preset.describe()}: dimension^exponent of what does not stay"
        print(terminal.wrapped(title), end="\n\n")
        print(terminal.table(desiderata.rows(preset, encoder=self.encoder)))
        return 0


def _as_dicts(cells: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return a dict of dataclasses with each converted to a dict, for JSON."""
    return {name: dataclasses.asdict(cell) for name, cell in cells.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compare:
    """Verdicts of several presets side by side.

    There is a row for each growing size and observable that is not stable in some preset.
    """

    names: Annotated[conf.Positional[tuple[str, ...]], conf.arg(metavar="PRESET ...")]
    """Presets, each with its default constants, or tuned presets."""
    optimizer: OptimizerName = "adam"
    """Optimizer whose learning rates and eps hold in the verdicts."""
    summary: Switch = False
    """Print one row per preset: each verdict, with the observable that shows it most."""
    markdown: Switch = False
    """Print a Markdown table."""
    json: Switch = False
    """Print JSON."""

    def __post_init__(self) -> None:
        if not self.names:
            raise command_line.UsageError(
                "compare needs presets, such as compare mup sp; `mupax presets` has all"
            )
        if self.json:
            command_line.refuse_idle(self, ("markdown",), "with --json", "leave --json out")

    def run(self) -> int:
        # A preset that is written twice is one.
        names = list(dict.fromkeys(self.names))
        compared = [presets.get(name) for name in names]
        # A tuned preset has the name of the preset it belongs to, which may be compared, too.
        if self.summary:
            head, *body = verdicts.summary_rows(compared, self.optimizer)
            rows = [head]
            for name, row in zip(names, body, strict=True):
                rows.append([name, *row[1:]])
            keys = 1  # the preset
        else:
            head, *body = verdicts.compare_rows(compared, self.optimizer)
            keys = 2  # the growing size and the observable
            rows = [[*head[:keys], *names], *body]

        if self.json:
            head, *body = rows
            return print_json([dict(zip(head, row, strict=True)) for row in body])
        if self.markdown:
            print(verdicts.markdown(rows))
        else:
            print(terminal.table(rows, keys=keys))
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuned:
    """Tuned presets: presets with the base, constants and optimizer that a study found best.

    `mupax train RECIPE --preset PRESET:NAME` uses a tuned preset. The list has the tuned presets
    that come with mupax, those in the folder `tuned` here, and those in ~/.config/mupax/tuned.
    Those that were measured with mupax come first, then those with published numbers.
    """

    name: Annotated[conf.Positional[str | None], conf.arg(metavar="PRESET:NAME")] = None
    """Print everything about one tuned preset."""
    json: Switch = False
    """Print JSON."""

    def run(self) -> int:
        from mupax.presets.tuned import find

        if self.name:
            tuned = find.find(self.name)
            if self.json:
                return print_json(dataclasses.asdict(tuned))
            terminal.say(find.described(tuned))
            return 0

        listed: list[tuple[find.Tuned, Path]] = []
        unread = 0
        for path in find.files().values():
            try:
                listed.append((find.load(path), path))
            except presets.PresetError as error:  # one bad file must not hide all others
                unread += 1
                terminal.note(f"left out: {error}")
        if self.json:
            print_json([{**dataclasses.asdict(tuned), "path": str(path)} for tuned, path in listed])
        elif listed:
            measured = [entry for entry in listed if not entry[0].is_published]
            published = [entry for entry in listed if entry[0].is_published]
            _print_tuned("measured here", measured)
            _print_tuned("published, and not measured here", published)
        else:
            terminal.say("no preset is tuned yet; `mupax transfer ... --save-tuned NAME` makes one")
        # A bad file is only left out of the list, so a script needs the exit code to see that.
        return 2 if unread else 0


def _print_tuned(head: str, listed: Sequence[tuple[find.Tuned, Path]]) -> None:
    """Print tuned presets, each with its origin, below a head. Print nothing if there are none."""
    from mupax.presets.tuned import find

    if not listed:
        return
    rows = [[tuned.use, find.origin(path), find.summary(tuned)] for tuned, path in listed]
    print(f"{head}\n{terminal.table(rows)}\n")
