"""`measured`: a parameterization that is a table of numbers, measured on one model at one size, and its JSON file.

What `mupax.train.studies.check.balance` derives from a backward pass (Chizat and Netrapalli 2023, arXiv 2311.18718) for a model that nobody
wrote a preset for. Keyed by (group, layer), a group being a `ParamSpec.group` such as `block.query`, never by path.
It has no power laws: another size is another table.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import json
import operator
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from mupax import disk
from mupax.presets.optimizers import OPTIMIZERS
from mupax.presets.preset import Preset
from mupax.presets.roles import AXES, CROSSED, ENCODER, OWN, Branch, ParamSpec, PresetError, Stack
from mupax.presets.rule import ONE, Decay, Form, Number, Rule, Scales
from mupax.presets.tuned import schema

FORMAT = "measured scales 1"
"""First entry of the file; another layout gets another number."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """Measured numbers.

    Attributes:
        scales: group to its numbers, absolute; each one number or one per layer of the stack. `weight_decay` is the
            independent decay: the coupled one is this over `lr`.
        logits: what attention logits are multiplied by.
        residual: per layer (skip, branch) of attention, of the MLP, and between them of attention to an encoder; empty: all are 1.
        encoder_residual: the same of an encoder's layers.
        sizes: size of every logical axis of the measured model.
        optimizer: whose rates these are, a name in `mupax.presets.optimizers.OPTIMIZERS`.
        source: where the numbers come from, for a person.
    """

    scales: Mapping[str, Scales]
    logits: float
    residual: tuple[tuple[tuple[float, float], ...], ...]
    sizes: Mapping[str, int]
    optimizer: str
    source: str = ""
    encoder_residual: tuple[tuple[tuple[float, float], ...], ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.source, str):
            _bad(f"source is {self.source!r:.60}; write a text")
        if not isinstance(self.optimizer, str) or self.optimizer not in OPTIMIZERS:
            _bad(f"no optimizer is named {self.optimizer!r}; write {', '.join(OPTIMIZERS)}")
        for axis, size in self.sizes.items():
            if axis not in AXES or type(size) is not int or not 1 <= size < 2**53:
                _bad(
                    f"size {axis}={size!r}: write a logical axis ({', '.join(AXES)}) and a whole number of at least 1"
                )
        decoder = CROSSED if ENCODER.axis in self.sizes else OWN
        _check("logits", self.logits)
        for what, stack, residual in (
            ("residual", decoder, self.residual),
            ("encoder_residual", ENCODER, self.encoder_residual),
        ):
            layers, branches = self.sizes.get(stack.axis), len(stack.branches)
            if residual and len(residual) != layers:
                _bad(
                    f"{what} has {len(residual)} layers and sizes say {layers}; write one entry per layer"
                )
            for layer, pairs in enumerate(residual):
                if [len(pair) for pair in pairs] != [2] * branches:
                    which = f"{', '.join(stack.branches[:-1])} and mlp"
                    _bad(
                        f"{what} {layer} must be {('two', 'three')[branches - 2]} pairs, (skip, branch) of {which}"
                    )
                for number in (number for pair in pairs for number in pair):
                    _check(f"{what} {layer}", number, zero=True)
        for group, scales in self.scales.items():
            layers = self.sizes.get((ENCODER if group.startswith("encoder.") else OWN).axis)
            for column, value in vars(scales).items():
                if isinstance(value, tuple) and len(value) != layers:
                    _bad(
                        f"{group} {column} has {len(value)} numbers for {layers} layers; write one number, or one per layer"
                    )
                for number in value if isinstance(value, tuple) else (value,):
                    _check(
                        f"{group} {column}",
                        number,
                        zero=column in ("init_std", "weight_decay", "eps"),
                    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured(Preset):
    """The preset of a `Table`; made by `measured`."""

    table: Table

    def scales(
        self,
        spec: ParamSpec,
        sizes: Mapping[str, int],
        optimizer: str = "adam",
        decay: Decay = "coupled",
    ) -> Scales:
        """The table's numbers; as `Preset.scales`, and PresetError for another size or optimizer, or a group not measured.

        Args:
            spec: the parameter's declaration.
            sizes: of the model.
            optimizer: whose update the table is for.
            decay: coupled or independent.
        """
        self.family(optimizer)
        for axis, size in self.table.sizes.items():
            if sizes.get(axis) != size:
                raise PresetError(
                    f"measured: the table is for {axis}={size} and the model has {sizes.get(axis)}; "
                    "measured numbers hold at one size, so measure this model (mupax presets balance)"
                )
        if spec.group not in self.table.scales:
            near = difflib.get_close_matches(spec.group, self.table.scales, n=1)
            hint = f"{spec.group!r}" + (f" (the nearest is {near[0]!r})" if near else "")
            raise PresetError(
                f"measured: the table has no row {hint}; measure this model (mupax presets balance)"
            )
        scales = self.table.scales[spec.group]
        return (
            scales
            if decay == "independent"
            else dataclasses.replace(scales, weight_decay=_per_rate(scales))
        )

    factors = scales
    """Nothing here is relative."""

    def logit_scale(self, sizes: Mapping[str, int]) -> float:
        return self.table.logits

    def residual_scale(
        self, sizes: Mapping[str, int], layer: int, branch: Branch, stack: Stack = OWN
    ) -> tuple[float, float]:
        residual = (
            self.table.encoder_residual if stack.axis == ENCODER.axis else self.table.residual
        )
        return residual[layer][stack.branches.index(branch)] if residual else (1.0, 1.0)

    def with_form(self, form: Form) -> NoReturn:
        """Refused: moving multipliers needs the rules behind the numbers."""
        raise PresetError(
            f"measured: a table of numbers has no form {form!r}; measure a preset that is in that form"
        )


def measured(table: Table) -> Measured:
    """The table as a preset, for the optimizers whose update is the one it was measured with."""
    family, why = OPTIMIZERS[table.optimizer].family, f"it was measured with {table.optimizer}"
    return Measured(
        name="measured",
        rule=_no_rule,
        logits=ONE,
        no_rule={other.family: why for other in OPTIMIZERS.values() if other.family != family},
        baseless=True,
        choices={"optimizer": table.optimizer},
        table=table,
    )


def save(table: Table, path: str | Path) -> None:
    """Write the table as JSON.

    Args:
        table: what was measured.
        path: of the file, in a folder that is there.
    """
    disk.write_whole(
        Path(path), json.dumps({"format": FORMAT, **dataclasses.asdict(table)}, indent=1) + "\n"
    )


def load(path: str | Path) -> Table:
    """Read a table back, number for number.

    Raises:
        PresetError: the file cannot be read, or an entry is missing, unknown or not a number it can be.
    """
    hint = "no table of measured scales ({error}); write one with mupax.presets.tuned.measured.save"
    return schema.load(path, _table, hint)


def _table(contents: Any) -> Table:
    if not isinstance(contents, dict) or contents.get("format") != FORMAT:
        _bad(f'not a table of this version; its first entry must be "format": "{FORMAT}"')
    contents = {
        "encoder_residual": [],
        **contents,
    }  # files of models without an encoder may lack it
    named, columns = (
        sorted(field.name for field in dataclasses.fields(kind)) for kind in (Table, Scales)
    )
    schema.same_keys("a table of measured scales", contents.keys() - {"format"}, named)
    if not all(isinstance(contents[name], dict) for name in ("scales", "sizes")):
        _bad("scales and sizes must be objects")
    for group, row in contents["scales"].items():
        schema.same_keys(
            f"a table of measured scales: {group}", row if isinstance(row, dict) else (), columns
        )
    rows = {
        group: Scales(**{c: _tuples(x) for c, x in row.items()})
        for group, row in contents["scales"].items()
    }
    residuals: dict[str, Any] = {
        name: _tuples(contents[name]) for name in ("residual", "encoder_residual")
    }
    for what, residual in residuals.items():
        if not isinstance(residual, tuple) or not all(
            isinstance(pairs, tuple) and all(isinstance(pair, tuple) for pair in pairs)
            for pairs in residual
        ):
            _bad(f"{what} must be a list of pairs of pairs")
    return Table(**{**{name: contents[name] for name in named}, "scales": rows, **residuals})


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _check(what: str, number: Any, *, zero: bool = False) -> None:
    if not schema.is_number(number) or number < 0 or (number == 0 and not zero):
        _bad(
            f"{what} is {number!r}; write a finite number {'of at least' if zero else 'above'} 0, from {schema.SMALLEST} to {schema.LARGEST}"
        )


def _per_rate(scales: Scales) -> Number:
    wd, lr = scales.weight_decay, scales.lr
    if isinstance(wd, tuple):
        return tuple(
            map(operator.truediv, wd, lr if isinstance(lr, tuple) else itertools.repeat(lr))
        )
    return tuple(wd / rate for rate in lr) if isinstance(lr, tuple) else wd / lr


def _no_rule(spec: ParamSpec) -> Rule:
    raise PresetError(
        f"measured: {spec.group} has numbers at one size and no power law behind them, so nothing can be said of another "
        "size; measure that one too (mupax presets balance)"
    )


def _bad(why: str) -> NoReturn:
    raise PresetError(f"a table of measured scales: {why}")
