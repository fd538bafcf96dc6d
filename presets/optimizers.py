"""Table of optimizers, with everything that other modules need to know of an optimizer by name.

To add an optimizer, write the function that makes its direction and a row of `OPTIMIZERS`.
docs/howto/add_an_optimizer.md is an example.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from mupax.mappings import Lazy
from mupax.presets.roles import ParamSpec

if TYPE_CHECKING:
    from mupax.train.config.run import OptimizerConfig

Direction = Callable[["OptimizerConfig", Mapping[str, ParamSpec]], Any]
"""Function from a config and the trained parameters' declarations to an optax transformation.

The transformation takes gradients to the direction of an update.
"""
Family = Literal["adam", "sgd", "muon", "lion"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Properties of one optimizer, a row of `OPTIMIZERS`.

    Attributes:
        family: Family whose learning rates the optimizer follows, in presets' tables and in
            `limits`. Optimizers of one family can share a learning rate. In "sgd", updates are as
            large as gradients; in "adam", gradients are divided by their size; in "lion", only
            their sign counts; in "muon", matrices are orthogonalized and all else is on Adam.
        direction: Function that makes the optax transformation from gradients to the direction of
            an update, before decay, learning rate and sign. MODULE:FUNCTION may stand for a
            function, which is then imported when needed.
        reads: Fields of `OptimizerConfig` that only some optimizers read, and this one does. A flag
            for such a field is refused under an optimizer that does not read it.
        moments: Power of the gradient that a field of the optimizer's state averages, by name of
            the field: 1 for a mean of gradients, 2 for a mean of their squares, 0 for a mean of
            normalized gradients. Only fields with one array per parameter are listed.
        check_lr: Peak learning rate at which ten steps move the small models of `mupax check`
            visibly and stay in their linear regime.
        first_moment: Key of `moments` that `OptimizerConfig.moment_dtype` stores in fewer bits.
            `None` if all moments need float32: `moment_dtype` is then refused.
        still_steps: Number of first updates that only fill the state and move nothing.
    """

    family: Family
    direction: Direction | str
    reads: frozenset[str]
    moments: dict[str, int]
    check_lr: float
    first_moment: str | None = None
    still_steps: int = 0

    def __post_init__(self) -> None:
        if self.first_moment is not None and self.first_moment not in self.moments:
            moments = ", ".join(self.moments)
            raise ValueError(
                f"first_moment is {self.first_moment!r}, which is none of the moments {moments}"
            )


def _import_directions():
    # Imported late: presets work without JAX.
    from mupax.train.core import optimizer

    return optimizer


def _import_muon():
    from mupax.train.core import muon

    return muon


_DECAY = {"weight_decay", "decay"}
_ADAM_READS = frozenset({"b1", "b2", "eps"})
_ADAM = Optimizer(
    family="adam",
    direction=Lazy(lambda: _import_directions().adam),
    reads=_ADAM_READS,
    moments={"mu": 1, "nu": 2},
    check_lr=2e-3,
    first_moment="mu",
)
_SGD_READS = frozenset({"momentum", *_DECAY})
_SGD = Optimizer(
    family="sgd",
    direction=Lazy(lambda: _import_directions().sgd),
    reads=_SGD_READS,
    moments={"trace": 1},
    check_lr=0.2,
    first_moment="trace",
)

OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": dataclasses.replace(_ADAM, reads=_ADAM_READS | _DECAY),
    "adam": _ADAM,
    "sgd": _SGD,
    # Heavy ball without dampening scales as SGD.
    "momentum": dataclasses.replace(_SGD, check_lr=0.05),
    "muon": dataclasses.replace(
        _ADAM,
        family="muon",
        direction=Lazy(lambda: _import_muon().muon),
        reads=_ADAM_READS | _SGD_READS | {"adam_lr", "orthogonalizer"},
    ),
    "lion": Optimizer(
        family="lion",
        direction=Lazy(lambda: _import_directions().lion),
        reads=frozenset({"b1", "b2", *_DECAY}),
        moments={"mu": 1},
        check_lr=1e-3,
        first_moment="mu",
    ),
}
"""Properties of each optimizer, by the name that configs use.

adam is adamw without decay. momentum and sgd differ only in `check_lr`.
"""

_UNVERIFIED = (
    "no source's table of its rates could be verified: "
    "2512.05620 and 2603.00541 have theirs as images"
)
WITHOUT_RULES = {"shampoo": _UNVERIFIED, "soap": _UNVERIFIED}
"""Optimizers that users ask for and that are refused, each with the reason."""


def refused(name: str) -> str:
    """Return the name of an unknown optimizer for a message, with the reason if it has one.

    The name is in quotes. Reasons are in `WITHOUT_RULES`.
    """
    reason = WITHOUT_RULES.get(name.lower())
    if reason is None:
        return repr(name)
    return f"{name!r} ({reason})"
