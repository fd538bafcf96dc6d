"""What each config field affects, declared beside the field as `Annotated[T, Affects(...)]`, and a walk over all fields.

Resume, names of sweep points, help, tests/train/inputs.md and tests read the declaration, so a new field is declared once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeVar, get_type_hints

T = TypeVar("T")
Effect = Literal[
    "model", "start", "data", "batches", "step", "rounding", "layout",
    "compiler", "course", "guards", "reports", "origin", "session", "processes",
]  # fmt: skip


class Consequence(NamedTuple):
    """Treatment of a field whose value changes."""

    meaning: str
    """What the field changes, for the documentation."""
    on_resume: Literal["refused", "announced", "silent"]
    """What a resume does if the value is not the recorded one."""
    names_point: bool
    """Whether another value makes another point of a sweep. Otherwise points have the default."""


CONSEQUENCES: dict[Effect, Consequence] = {
    "model": Consequence("parameters, their function and the numbers of a preset", "refused", True),
    "start": Consequence("initial parameters", "refused", True),
    "data": Consequence("examples and their order", "refused", True),
    "batches": Consequence("what batches are made of the examples", "announced", True),
    "step": Consequence("optimizer, schedule and loss", "announced", True),
    "rounding": Consequence("last bits of the step", "announced", True),
    "layout": Consequence("place of arrays on devices, and so last bits", "announced", False),
    "compiler": Consequence("flags of the compiler", "silent", True),
    "course": Consequence("checkpoints, evaluation sets and an early end", "announced", False),
    "guards": Consequence("what is refused, and when a fault ends the run", "announced", False),
    "reports": Consequence("what a run logs, and how often it evaluates", "silent", False),
    "origin": Consequence("recipe and weights that a run starts from", "silent", True),
    "session": Consequence("where a run lies, and how it goes on", "silent", False),
    "processes": Consequence("how processes find each other", "silent", False),
}
"""Effect to what follows from it."""


@dataclasses.dataclass(frozen=True)
class Affects:
    """What a config field affects, and how a test shows that it does.

    Args:
        effect: the part of a run that another value changes.
        example: value that changes it, neither the default nor what the tests' small runs have.
        given: other fields, by dotted path, that the field needs in order to be read.
        test: file below tests/ that shows the field by its flag, if an example is not enough.
    """

    effect: Effect
    example: Any = None
    # tyro hashes annotations.
    given: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    test: str = ""

    @property
    def consequence(self) -> Consequence:
        """What follows from the effect."""
        return CONSEQUENCES[self.effect]


class Listed(Affects):
    """Effect of a config field whose flag is one of the most used: the short help of a recipe lists it."""


class ConfigField(NamedTuple):
    """A field of a config that is no section."""

    path: str
    """Dotted path from the config: model.compute.dtype."""
    value: Any
    default: Any
    """`dataclasses.MISSING` if the field is required."""
    affects: Affects | None
    """None if the field declares nothing, as the fields of a plugin's model."""


def config_fields(config: Any, prefix: str = "") -> Iterator[ConfigField]:
    """Yield every field of a config and of its sections.

    Args:
        config: instance of a dataclass.
        prefix: of the paths, with a dot at its end.
    """
    marks = declared(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        path = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            yield from config_fields(value, f"{path}.")
        else:
            yield ConfigField(path, value, field.default, marks.get(field.name))


def with_defaults(config: T, effects: Collection[Effect]) -> T:
    """Return a config whose fields of some effects have their defaults.

    Args:
        config: instance of a dataclass.
        effects: effects of fields that all have defaults.
    """
    marks = declared(type(config))
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(config):  # pyright: ignore[reportArgumentType]
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            changes[field.name] = with_defaults(value, effects)
        elif field.name in marks and marks[field.name].effect in effects:
            changes[field.name] = field.default
    return dataclasses.replace(config, **changes)  # pyright: ignore[reportArgumentType, reportCallIssue, reportReturnType]


def names_with(owner: type, effect: Effect) -> frozenset[str]:
    """Return the names of the fields of a dataclass that declare an effect."""
    return frozenset(name for name, mark in declared(owner).items() if mark.effect == effect)


def affects_of(hint: Any) -> Affects | None:
    """Return what the type of a field declares, with all annotations, or `None`."""
    marks = [mark for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, Affects)]
    return marks[0] if marks else None


@functools.cache
def declared(owner: type) -> dict[str, Affects]:
    """Return what the fields of a dataclass declare, by name. Sections and fields that declare nothing are left out."""
    hints = get_type_hints(owner, include_extras=True)
    marks = {name: affects_of(hint) for name, hint in hints.items()}
    return {name: mark for name, mark in marks.items() if mark is not None}
