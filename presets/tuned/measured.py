"""`measured`: a parameterization measured on one model at one size, as a table, and its JSON file.

The parameterization has no power laws, only the values of each parameter group, so another size
needs another table. `mupax.train.studies.check.balance` derives the table from a backward pass
(Chizat and Netrapalli 2023, arXiv 2311.18718), for a model that no preset covers. Rows are keyed by
`ParamSpec.group`, such as `block.query`, never by path, and may hold one value per layer.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
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
"""Value of the entry "format" in a file of measured scales. Another layout gets another number."""

Residual = tuple[tuple[tuple[float, float], ...], ...]
"""Factors (skip, branch) of the residual additions, indexed by layer and then by branch."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """Measured parameterization of one model, as values of each parameter group.

    Attributes:
        scales: Absolute values by `ParamSpec.group`, each one number or one per layer of the stack.
            `weight_decay` is independent weight decay; coupled is `weight_decay` / `lr`.
        logits: Factor on attention logits.
        residual: Pairs (skip, branch) of factors in residual additions, per layer. Each layer has
            one for attention, one for attention to an encoder if the model has it, and one for the
            MLP. If empty, all factors are 1.
        sizes: Size of every logical axis of the measured model.
        optimizer: Key of `mupax.presets.optimizers.OPTIMIZERS` that the learning rates are for.
        source: Origin of the values, for a reader.
        encoder_residual: Pairs (skip, branch) per layer of an encoder. If empty, all are 1.
    """

    scales: Mapping[str, Scales]
    logits: float
    residual: Residual
    sizes: Mapping[str, int]
    optimizer: str
    source: str = ""
    encoder_residual: Residual = ()

    def __post_init__(self) -> None:
        if not isinstance(self.source, str):
            _refuse(f"source is {self.source!r:.60}; write a text")
        if not isinstance(self.optimizer, str) or self.optimizer not in OPTIMIZERS:
            _refuse(f"no optimizer is named {self.optimizer!r}; write {', '.join(OPTIMIZERS)}")
        for axis, size in self.sizes.items():
            # A bool is an int, but no size.
            is_size = type(size) is int and 1 <= size < 2**53
            if axis not in AXES or not is_size:
                axes = ", ".join(AXES)
                _refuse(
                    f"size {axis}={size!r}: write a logical axis ({axes}) and a whole number of "
                    "at least 1"
                )

        _check_number("logits", self.logits)
        decoder = CROSSED if ENCODER.axis in self.sizes else OWN
        self._check_residual("residual", self.residual, decoder)
        self._check_residual("encoder_residual", self.encoder_residual, ENCODER)
        for group in self.scales:
            self._check_scales(group)

    def _check_residual(self, name: str, residual: Residual, stack: Stack) -> None:
        """Raise `PresetError` if residual factors do not fit the sizes of their stack.

        Unless they are empty, they need one entry per layer, with a pair (skip, branch) for each
        branch of the stack. Every number must be at least 0 and in the range of float32.

        Args:
            name: Field that has the factors, for the message.
            stack: Stack of the factors, the encoder or the decoder.
        """
        layers = self.sizes.get(stack.axis)
        if residual and len(residual) != layers:
            _refuse(
                f"{name} has {len(residual)} layers and sizes say {layers}; "
                "write one entry per layer"
            )

        num_branches = len(stack.branches)
        for layer, pairs in enumerate(residual):
            if [len(pair) for pair in pairs] != [2] * num_branches:
                count = "two" if num_branches == 2 else "three"
                branches = f"{', '.join(stack.branches[:-1])} and mlp"
                _refuse(f"{name} {layer} must be {count} pairs, (skip, branch) of {branches}")
            for skip, branch in pairs:
                # A branch of 0 switches a block off, and a skip of 0 makes a network without
                # residual connections. Both are allowed.
                _check_number(f"{name} {layer}", skip, may_be_zero=True)
                _check_number(f"{name} {layer}", branch, may_be_zero=True)

    def _check_scales(self, group: str) -> None:
        """Raise `PresetError` if a group's values do not fit the number of layers or float32.

        Only `init_std`, `weight_decay` and `eps` may be 0.
        """
        stack = OWN
        if group.startswith("encoder."):
            stack = ENCODER
        layers = self.sizes.get(stack.axis)
        for column, value in vars(self.scales[group]).items():
            numbers = (value,)
            if isinstance(value, tuple):
                numbers = value
            if isinstance(value, tuple) and len(value) != layers:
                _refuse(
                    f"{group} {column} has {len(value)} numbers for {layers} layers; "
                    "write one number, or one per layer"
                )
            # A learning rate of 0 would make coupled weight decay infinite.
            may_be_zero = column in ("init_std", "weight_decay", "eps")
            for number in numbers:
                _check_number(f"{group} {column}", number, may_be_zero=may_be_zero)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured(Preset):
    """Preset that reads its values from a `Table`, at one size. Made by `measured`."""

    table: Table

    def scales(
        self,
        spec: ParamSpec,
        sizes: Mapping[str, int],
        optimizer: str = "adam",
        decay: Decay = "coupled",
    ) -> Scales:
        """Return the measured values for one parameter, in place of the rules of `Preset.scales`.

        Args:
            spec: Declaration of the parameter. Its group selects the values.
            sizes: Sizes of the model by axis, which must be the table's.
            optimizer: Key of `OPTIMIZERS`, of the same family as the table's.
            decay: Kind of weight decay, "coupled" or "independent". The default is coupled.

        Raises:
            PresetError: The table is for another size or optimizer, or lacks the group.
        """
        # Called for the error: it refuses an optimizer of another family.
        self.family(optimizer)
        for axis, size in self.table.sizes.items():
            if sizes.get(axis) != size:
                model_size = sizes.get(axis)
                raise PresetError(
                    f"measured: the table is for {axis}={size} and the model has {model_size}; "
                    "measured numbers hold at one size, so measure this model "
                    "(mupax presets balance)"
                )

        if spec.group not in self.table.scales:
            near = difflib.get_close_matches(spec.group, self.table.scales, n=1)
            hint = ""
            if near:
                hint = f" (the nearest is {near[0]!r})"
            raise PresetError(
                f"measured: the table has no row {spec.group!r}{hint}; "
                "measure this model (mupax presets balance)"
            )
        scales = self.table.scales[spec.group]
        if decay == "independent":
            return scales
        return dataclasses.replace(scales, weight_decay=_coupled_decay(scales))

    # Measured values are absolute, so there is nothing relative to a base.
    factors = scales

    def logit_scale(self, sizes: Mapping[str, int]) -> float:
        return self.table.logits

    def residual_scale(
        self, sizes: Mapping[str, int], layer: int, branch: Branch, stack: Stack = OWN
    ) -> tuple[float, float]:
        residual = self.table.residual
        if stack.axis == ENCODER.axis:
            residual = self.table.encoder_residual
        if not residual:
            return 1.0, 1.0
        return residual[layer][stack.branches.index(branch)]

    def with_form(self, form: Form) -> NoReturn:
        """Raise `PresetError` for every form: a table has no rules to move multipliers by."""
        raise PresetError(
            f"measured: a table of numbers has no form {form!r}; "
            "measure a preset that is in that form"
        )


def measured(table: Table) -> Measured:
    """Make a preset from a table. It supports optimizers of the family used in the measurement."""
    family = OPTIMIZERS[table.optimizer].family
    refused = {}
    for row in OPTIMIZERS.values():
        if row.family != family:
            refused[row.family] = f"it was measured with {table.optimizer}"
    return Measured(
        name="measured",
        rule=_no_rule,
        logits=ONE,
        no_rule=refused,
        baseless=True,
        choices={"optimizer": table.optimizer},
        table=table,
    )


def save(table: Table, path: str | Path) -> None:
    """Write a table to a JSON file. An existing file is replaced. The folder must exist.

    Raises:
        DiskError: The file cannot be written.
    """
    contents = {"format": FORMAT, **dataclasses.asdict(table)}
    disk.write_whole(Path(path), json.dumps(contents, indent=1) + "\n")


def load(path: str | Path) -> Table:
    """Read a table from a file that `save` wrote. Numbers are read back exactly.

    Raises:
        PresetError: The file cannot be read, an entry is missing or unknown, or a value is one that
            the entry cannot have.
    """
    hint = "no table of measured scales ({error}); write one with mupax.presets.tuned.measured.save"
    return schema.load(path, _table, hint)


def _table(contents: Any) -> Table:
    """Make a `Table` from the parsed JSON of a file that `save` wrote.

    Raises:
        PresetError: The file is of another format, an entry is missing or unknown, or a value is
            one that the entry cannot have.
    """
    if not isinstance(contents, dict) or contents.get("format") != FORMAT:
        _refuse(f'not a table of this version; its first entry must be "format": "{FORMAT}"')
    # Files of models without an encoder may lack this entry.
    entries = {"encoder_residual": [], **contents}
    names = sorted(field.name for field in dataclasses.fields(Table))
    schema.same_keys("a table of measured scales", entries.keys() - {"format"}, names)
    if not isinstance(entries["scales"], dict) or not isinstance(entries["sizes"], dict):
        _refuse("scales and sizes must be objects")

    columns = sorted(field.name for field in dataclasses.fields(Scales))
    for group, row in entries["scales"].items():
        # A row that is no object counts as one without keys, and is refused for the keys that it
        # lacks.
        keys = row if isinstance(row, dict) else ()
        schema.same_keys(f"a table of measured scales: {group}", keys, columns)
    scales = {}
    for group, row in entries["scales"].items():
        values = {column: _tuples(value) for column, value in row.items()}
        scales[group] = Scales(**values)

    arguments = {name: entries[name] for name in names}
    arguments["scales"] = scales
    for name in ("residual", "encoder_residual"):
        arguments[name] = _residual(name, entries[name])
    return Table(**arguments)


def _residual(name: str, value: Any) -> Residual:
    """Convert residual factors from nested JSON lists to nested tuples.

    Args:
        name: Name of the entry in the file, for the message.

    Raises:
        PresetError: The value is not a list of lists of lists.
    """
    residual = _tuples(value)
    if not isinstance(residual, tuple):
        _refuse(f"{name} must be a list of pairs of pairs")
    for pairs in residual:
        if not isinstance(pairs, tuple) or not all(isinstance(pair, tuple) for pair in pairs):
            _refuse(f"{name} must be a list of pairs of pairs")
    return residual


def _tuples(value: Any) -> Any:
    """Return a parsed JSON value with tuples in place of lists, at any depth."""
    if isinstance(value, list):
        return tuple(_tuples(entry) for entry in value)
    return value


def _check_number(name: str, number: Any, *, may_be_zero: bool = False) -> None:
    """Raise `PresetError` unless the value is a number above 0 that float32 can hold.

    Args:
        name: Name of the value, for the message.
        may_be_zero: Whether 0 is allowed, too.
    """
    is_zero = number == 0
    if schema.is_number(number) and number >= 0 and (may_be_zero or not is_zero):
        return
    limit = "of at least" if may_be_zero else "above"
    _refuse(
        f"{name} is {number!r}; write a finite number {limit} 0, "
        f"from {schema.SMALLEST} to {schema.LARGEST}"
    )


def _coupled_decay(scales: Scales) -> Number:
    """Return the coupled weight decay, `weight_decay` / `lr`, as one value or one per layer."""
    weight_decay = scales.weight_decay
    lr = scales.lr
    if isinstance(weight_decay, tuple):
        rates = lr if isinstance(lr, tuple) else (lr,) * len(weight_decay)
        return tuple(decay / rate for decay, rate in zip(weight_decay, rates, strict=True))
    if isinstance(lr, tuple):
        return tuple(weight_decay / rate for rate in lr)
    return weight_decay / lr


def _no_rule(spec: ParamSpec) -> Rule:
    raise PresetError(
        f"measured: {spec.group} has numbers at one size and no power law behind them, "
        "so nothing can be said of another size; measure that one too (mupax presets balance)"
    )


def _refuse(reason: str) -> NoReturn:
    raise PresetError(f"a table of measured scales: {reason}")
