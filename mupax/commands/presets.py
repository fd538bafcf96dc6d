"""Commands of `mupax presets` that print what presets say: lists, tables, limits and comparisons."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Annotated, Literal

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

PresetName = Annotated[conf.Positional[str], conf.arg(metavar="PRESET")]
OptimizerName = Annotated[str, conf.arg(metavar="|".join(OPTIMIZERS))]
"""Name of an optimizer. Help lists those that there are, also those of plugins."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class List:
    """Name and one line of every preset (what no command does)."""

    def run(self) -> int:
        print(
            terminal.table(
                [[name, command_line.summary(make)] for name, make in presets.PRESETS.items()]
            )
        )
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constants:
    """A preset's constants, their defaults, and of those that sources disagree on each value: its rule, source and status.

    Every preset takes those of parameter groups too, as --preset.rates.readout 4.
    """

    preset: PresetName
    """A preset."""
    json: Switch = False
    """Print JSON."""

    def run(self) -> int:
        name = presets.get(self.preset).name
        if name not in presets.PRESETS:
            raise presets.PresetError(
                f"{self.preset} takes no constants; all its numbers are in its file"
            )
        defaults = {
            n: p.default for n, p in inspect.signature(presets.PRESETS[name]).parameters.items()
        }
        if self.json:
            listed = {
                n: [dataclasses.asdict(choice) for choice in choices.of(name, n)] for n in defaults
            }
            return print_json(
                {n: {"default": x, "choices": listed[n]} for n, x in defaults.items()}
            )
        print(table.constants_text(name, defaults))
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table(PresetFlags, RunFlags):
    """Every parameter's factors under a preset: forward multiplier, initial std, learning rate, eps and weight decay.

    Factors are relative to the base (1 where the model is the base); --absolute shows values instead.
    """

    preset: PresetName
    """A preset, or measured:PATH."""
    model: Annotated[str, conf.arg(aliases=("--config",), metavar="MODEL|RECIPE|FILE")]
    """A model of `mupax models`, or a recipe or config file, for its model; `--config FILE` says the same."""
    optimizer: OptimizerName = "adam"
    """Optimizer whose learning rates and eps hold."""
    decay: Literal["coupled", "independent"] = "coupled"
    """How weight decay enters."""
    absolute: Switch = False
    """Values (base constant x factor), not factors."""
    rules: Switch = False
    """The power laws in m = size / base size, not their values."""
    joint: horizon.Applied = "none"
    """Also what this rule makes of the optimizer's numbers between the batch and tokens of the base and those of the run."""
    noise_scale: float | None = None
    """Examples, from `mupax noise`; above it the rule does not hold."""
    json: Switch = False
    """Print JSON."""

    def run(self) -> int:
        model = cli.model_of(self.model)
        preset = preset_for(self.config(self.preset), model)
        sizes, tied = (
            model.sizes(),
            {name: factor.spec for name, factor in model.factors().items() if factor.spec},
        )
        specs = {**dict(sorted(model.parameters().items())), **tied}
        if self.rules:
            rows = table.rule_rows(preset, specs, self.optimizer)
        else:
            rows = table.rows(
                preset, specs, sizes, self.optimizer, self.decay, absolute=self.absolute
            )
        rule = joint.of(self.joint, self.optimizer)
        far = joint.path(
            rule,
            *self.ends(),
            b1=self.b1,
            b2=self.b2,
            decay=self.decay,
            noise_scale=self.noise_scale,
        )
        if self.json:
            return print_json(rows if self.joint == "none" else {"parameters": rows, "joint": far})
        title = f"{self.model} under {preset.describe()}, {self.optimizer}, {self.decay} decay"
        print(terminal.wrapped(title), table.text(rows), sep="\n\n")
        if forward := table.forward_text(preset, sizes):
            print(f"\n{terminal.wrapped(forward)}")
        for caution in preset.cautions(sizes, self.optimizer):
            terminal.say(f"caution: {caution}")
        if self.joint != "none":
            terminal.say(
                f"\nunder the joint rule {self.joint}, over the base's numbers\n{table.text(far)}"
            )
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits(ConstantFlags):
    """What each size does on its way to infinity: exponent and verdict of activations, logits, updates, gradients, decay.

    Computed from the preset's rules alone, for a pre-norm transformer.
    """

    preset: PresetName
    """A preset."""
    optimizer: OptimizerName = "adam"
    """Optimizer whose learning rates and eps hold."""
    joint: horizon.Applied = "none"
    """The rule by which the optimizer's numbers follow batch and tokens (of Adam)."""
    experts: Switch = False
    """Of a model of experts: its width with their hidden size, their number at a fixed share of active ones, their size alone."""
    json: Switch = False
    """Print JSON."""

    def run(self) -> int:
        preset = presets.get(self.preset, **self.values())
        adam, rule = preset.family(self.optimizer) == "adam", joint.of(self.joint, self.optimizer)
        if self.json:
            rows = {
                **verdicts.verdicts(preset, self.optimizer, experts=self.experts),
                **(joint_limits.verdicts(rule) if adam else {}),
            }
            entries = {
                row: {limit: dataclasses.asdict(e) for limit, e in at.items()}
                for row, at in rows.items()
            }
            return print_json(entries)
        what = "size^exponent of each observable as one size grows, the ratios of widths fixed"
        print(terminal.wrapped(f"{preset.describe()}, {self.optimizer}: {what}"), end="\n\n")
        print(terminal.table(verdicts.limits_rows(preset, self.optimizer, experts=self.experts)))
        if adam:
            terminal.say(f"\n{joint_limits.limits_text(rule)}")
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Desiderata(ConstantFlags):
    """Which dimensions can be scaled: of d_k, d_v, d_ff, d_model, heads alone, width, positions and depth, by mapping of a block.

    At the first step under SGD: entries stay (signal), they move where every weight has an equal part of the loss's decay (speed),
    the preset's own rates make parts equal (balance) and of order one (loss decay). `mupax check MODEL --desiderata` measures.
    """

    preset: PresetName
    """A preset."""
    encoder: Switch = False
    """Of an encoder-decoder: both stacks and cross-attention, and either depth alone."""
    json: Switch = False
    """Print JSON."""

    def run(self) -> int:
        preset, of = presets.get(self.preset, **self.values()), {"encoder": self.encoder}
        if self.json:
            by_dimension = {
                d: desiderata.desiderata(preset, d, **of) for d in desiderata.growths(**of)
            }
            return print_json(
                {
                    d: {name: dataclasses.asdict(c) for name, c in cells.items()}
                    for d, cells in by_dimension.items()
                }
            )
        print(
            terminal.wrapped(f"{preset.describe()}: dimension^exponent of what does not stay"),
            end="\n\n",
        )
        print(terminal.table(desiderata.rows(preset, **of)))
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compare:
    """Verdicts of several presets side by side: what is not stable in some, a row per growing size and observable."""

    names: Annotated[conf.Positional[tuple[str, ...]], conf.arg(metavar="PRESET ...")]
    """Presets, each with its default constants."""
    optimizer: OptimizerName = "adam"
    """Optimizer whose learning rates and eps hold."""
    summary: Switch = False
    """One row per preset: each verdict with what shows it most."""
    markdown: Switch = False
    """A Markdown table."""
    json: Switch = False
    """Print JSON."""

    def __post_init__(self) -> None:
        if not self.names:
            raise command_line.UsageError(
                "compare needs presets, such as compare mup sp; `mupax presets` has all"
            )

    def run(self) -> int:
        compared = [presets.get(name) for name in self.names]
        rows = (verdicts.summary_rows if self.summary else verdicts.compare_rows)(
            compared, self.optimizer
        )
        if self.json:
            return print_json([dict(zip(rows[0], row, strict=True)) for row in rows[1:]])
        print(
            verdicts.markdown(rows)
            if self.markdown
            else terminal.table(rows, keys=1 if self.summary else 2)
        )
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuned:
    """Presets whose base, constants and optimizer a study found best: the rate, what it was found on, how it transfers.

    `mupax train RECIPE --preset PRESET:NAME` uses one. The list has those that come with mupax, those in the folder
    `tuned` here, and those in ~/.config/mupax/tuned, each with its origin: first those that were measured here, then those
    whose numbers others have published.
    """

    name: Annotated[conf.Positional[str | None], conf.arg(metavar="PRESET:NAME")] = None
    """Say everything about one."""
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
            except presets.PresetError as error:  # a file of the user's does not hide all others
                unread += 1
                terminal.note(f"left out: {error}")
        if self.json:
            print_json([{**dataclasses.asdict(tuned), "path": str(path)} for tuned, path in listed])
        elif listed:
            measured = [entry for entry in listed if not entry[0].is_published]
            published = [entry for entry in listed if entry[0].is_published]
            for head, group in (
                ("measured here", measured),
                ("published, and not measured here", published),
            ):
                if group:
                    rows = [
                        [tuned.use, find.origin(path), find.summary(tuned)] for tuned, path in group
                    ]
                    print(f"{head}\n{terminal.table(rows)}\n")
        else:
            terminal.say("no preset is tuned yet; `mupax transfer ... --save-tuned NAME` makes one")
        return 2 if unread else 0
