"""Annotations that say which part of a run a config field affects, and a walk over all fields.

A field is declared as `Annotated[T, Affects(...)]`. Resume, the names of sweep points, help,
tests/train/inputs.md and tests read the annotation, so that a new field is declared only once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import sys
import types
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")
Effect = Literal[
    "model", "start", "data", "batches", "step", "rounding", "layout",
    "compiler", "course", "guards", "reports", "origin", "session", "processes",
]  # fmt: skip


class Consequence(NamedTuple):
    """Consequences of changing a field's value: for the run, on resume, and in a sweep."""

    meaning: str
    """Part of the run that changes, in words for the documentation."""
    on_resume: Literal["refused", "announced", "silent"]
    """Reaction of a resume to a value that differs from the recorded one."""
    names_point: bool
    """`True` if runs with different values are different points of a sweep, with other names."""


CONSEQUENCES: dict[Effect, Consequence] = {
    "model": Consequence("parameters, the model's function and a preset's values", "refused", True),
    "start": Consequence("initial parameters", "refused", True),
    "data": Consequence("examples and their order", "refused", True),
    "batches": Consequence("how batches are made of examples", "announced", True),
    "step": Consequence("optimizer, schedule and loss", "announced", True),
    "rounding": Consequence("last bits of the step", "announced", True),
    "layout": Consequence(
        "place of arrays on devices, and so last bits of the step", "announced", False
    ),
    "compiler": Consequence("flags of the compiler", "silent", True),
    "course": Consequence("checkpoints, evaluation sets and an early end", "announced", False),
    "guards": Consequence("what mupax refuses, and when a fault ends the run", "announced", False),
    "reports": Consequence("what a run logs, and how often it evaluates", "silent", False),
    "origin": Consequence("recipe and weights that a run starts from", "silent", True),
    "session": Consequence("a run's folder, and how it resumes", "silent", False),
    "processes": Consequence("how processes find each other", "silent", False),
}
"""Consequence of changing a field, by the effect that the field declares (`Affects.effect`)."""


@dataclasses.dataclass(frozen=True)
class Affects:
    """Annotation of a config field: the effect of its value, and how tests show the effect.

    Args:
        effect: Part of a run that changes with the value.
        example: Value with which tests show the effect. It is neither the default nor the value of
            the tests' small runs.
        given: Values of other fields, by dotted path, without which this field is not read.
        test: File below tests/ that tests the field by its flag, if an example is not enough.
    """

    effect: Effect
    example: Any = None
    # tyro hashes annotations, and a dict has no hash.
    given: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    test: str = ""

    @property
    def consequence(self) -> Consequence:
        """Consequence of changing the field's value, from `CONSEQUENCES`."""
        return CONSEQUENCES[self.effect]


class Listed(Affects):
    """Annotation of a config field that the short help of a recipe lists."""


class ConfigField(NamedTuple):
    """A field of a config that is a value, not a section."""

    path: str
    """Dotted path from the config, such as `model.compute.dtype`."""
    value: Any
    default: Any
    """Default of the field, `dataclasses.MISSING` if the field is required."""
    affects: Affects | None
    """Declaration of the field, `None` for the fields of a plugin's model, for example."""


def config_fields(config: Any, prefix: str = "") -> Iterator[ConfigField]:
    """Yield every field of a config and of its sections, in order.

    Args:
        prefix: Beginning of the dotted paths, such as `model.`.
    """
    marks = declared(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        path = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            yield from config_fields(value, f"{path}.")
        else:
            yield ConfigField(path, value, _default(field), marks.get(field.name))


def _default(field: dataclasses.Field[Any]) -> Any:
    """Return the default of a field, `dataclasses.MISSING` if the field is required."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def integer_problem(config: Any, prefix: str = "") -> str | None:
    """Return a sentence on the first integer field with another number, or `None` without one.

    Python does not check the types of fields, and a float that a comparison accepts fails later, or
    trains with other durations. Values that are no numbers pass: the fields' own checks name them.

    Args:
        prefix: Beginning of the field's dotted path, such as `model.`.
    """
    integers = _integer_fields(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        path = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            problem = integer_problem(value, f"{path}.")
            if problem is not None:
                return problem
        # `type`, because bool is a subclass of int, and JSON cannot hold NumPy's integers.
        elif field.name in integers and isinstance(value, numbers.Real) and type(value) is not int:
            near = max(1, int(float(value))) if math.isfinite(value) else 1
            return f"{path} is {value!r}; write a whole number as Python's int, such as {near}"
    return None


@functools.cache
def _integer_fields(owner: type) -> frozenset[str]:
    """Return the names of a dataclass's fields whose declared type has `int` and no `float`."""
    hints = field_types(owner)
    names = set()
    for name, hint in hints.items():
        parts = get_args(hint) or (hint,)
        is_tuple = get_origin(hint) is tuple
        if int in parts and float not in parts and not is_tuple:
            names.add(name)
    return frozenset(names)


def with_defaults(config: T, effects: Collection[Effect]) -> T:
    """Return a copy of a config in which all fields with certain effects have their defaults.

    Fields of sections are reset too. A required field, which has no default, keeps its value.

    Args:
        effects: Effects that the fields to reset declare (`Affects.effect`).
    """
    marks = declared(type(config))
    changes: dict[str, Any] = {}
    instance: Any = config
    for field in dataclasses.fields(instance):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            changes[field.name] = with_defaults(value, effects)
        elif field.name in marks and marks[field.name].effect in effects:
            default = _default(field)
            if default is not dataclasses.MISSING:
                changes[field.name] = default
    return dataclasses.replace(instance, **changes)


def names_with(owner: type, effect: Effect) -> frozenset[str]:
    """Return the names of a dataclass's fields whose `Affects` declares this effect.

    Fields of sections (fields that are dataclasses themselves) are left out.
    """
    return frozenset(name for name, mark in declared(owner).items() if mark.effect == effect)


def affects_of(hint: Any) -> Affects | None:
    """Return the `Affects` in the annotation of a field, or `None` if it has none.

    Args:
        hint: Type of the field, with all annotations.
    """
    marks = [mark for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, Affects)]
    return marks[0] if marks else None


@functools.cache
def field_types(owner: type, include_extras: bool = False) -> dict[str, Any]:
    """Return the types of a dataclass's fields by name. The result is cached.

    A type that Python cannot look up is `Any`. A user's config may import the names of its types
    for type checkers only.

    Args:
        include_extras: Keep what `Annotated` adds to a type, such as `Affects`.
    """
    try:
        return get_type_hints(owner, include_extras=include_extras)
    except Exception:  # an annotation may be any expression
        hints = {}
        for base in reversed(owner.__mro__):
            for name, annotation in vars(base).get("__annotations__", {}).items():
                hints[name] = _looked_up(base, annotation, include_extras)
        return hints


def _looked_up(owner: type, annotation: Any, include_extras: bool) -> Any:
    """Return the type that an annotation in a class names, or `Any` if it cannot be looked up."""
    holder = types.SimpleNamespace(__annotations__={"field": annotation})
    # A module that was run by its path may be gone.
    module = sys.modules.get(owner.__module__)
    names_of_module = vars(module) if module else {}
    names_of_class = dict(vars(owner))
    try:
        hints = get_type_hints(holder, names_of_module, names_of_class, include_extras)
    except Exception:
        return Any
    return hints["field"]


@functools.cache
def declared(owner: type) -> dict[str, Affects]:
    """Return the `Affects` of a dataclass's fields by name. The result is cached.

    Fields without an `Affects` are left out, and so are the fields of sections.
    """
    hints = field_types(owner, include_extras=True)
    marks = {name: affects_of(hint) for name, hint in hints.items()}
    return {name: mark for name, mark in marks.items() if mark is not None}
