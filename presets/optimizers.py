"""Table of optimizers: one row each, with everything that the rest of the project asks about one by name. Pure data.

To add one, write the function that makes its direction and a row here; docs/howto/add_an_optimizer.md is an example.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from mupax.presets.roles import ParamSpec
from mupax.table import Lazy

if TYPE_CHECKING:
    from mupax.train.config.run import OptimizerConfig

Direction = Callable[["OptimizerConfig", Mapping[str, ParamSpec]], Any]
"""Function of a config and the declarations of the parameters that are trained. It returns an optax transformation."""
Family = Literal["adam", "sgd", "muon", "lion"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Row of the table: what presets, configs, studies and checkpoints need to know about an optimizer.

    Attributes:
        family: whose learning rates it follows, in presets' tables and in `limits`. sgd: updates are as large as gradients;
            adam: gradients are divided by their size; lion: their sign is taken; muon: matrices are orthogonalized and all
            else is on Adam. Optimizers of one family can be given one learning rate.
        direction: makes the optax transformation of gradients into the direction of an update, before decay, learning rate
            and sign. MODULE:FUNCTION may stand for a function, which is imported when it is needed.
        reads: the fields of `OptimizerConfig` that it reads and not every optimizer does. Any other is refused as a flag.
        moments: fields of its state that hold one array per parameter, and the power of the gradient that each is: 1 for a
            mean of gradients, 2 for a mean of their squares, 0 for a mean of normalized gradients.
        first_moment: the one of `moments` that `OptimizerConfig.moment_dtype` stores in fewer bits. None for an optimizer
            whose moments all need float32: the field is then refused.
        still_steps: number of first updates that move nothing, because they only fill the state.
        check_lr: peak learning rate at which ten steps move the small models of `mupax check` visibly and stay in
            their linear regime.
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
            raise ValueError(
                f"first_moment is {self.first_moment!r}, which is none of the moments {', '.join(self.moments)}"
            )


def _import_directions():
    from mupax.train.core import optimizer

    return optimizer


_DECAY = {"weight_decay", "decay"}
_ADAM_READS, _ADAM_MOMENTS = frozenset({"b1", "b2", "eps"}), {"mu": 1, "nu": 2}
_ADAM = Optimizer(
    family="adam",
    direction=Lazy(lambda: _import_directions().adam),
    reads=_ADAM_READS,
    moments=_ADAM_MOMENTS,
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
    "momentum": dataclasses.replace(_SGD, check_lr=0.05),
    "muon": dataclasses.replace(
        _ADAM,
        family="muon",
        direction=Lazy(lambda: _import_directions().muon),
        reads=_ADAM_READS | _SGD_READS,
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
"""Rows by name. adam is adamw without decay; momentum and sgd are one (heavy ball without dampening scales as SGD)."""

_UNVERIFIED = "no source's table of its rates could be verified: 2512.05620 and 2603.00541 have theirs as images"
WITHOUT_RULES = {"shampoo": _UNVERIFIED, "soap": _UNVERIFIED}
"""Optimizers that people ask for by name, and why they are refused."""


def refused(name: str) -> str:
    """A name that is none of `OPTIMIZERS`, for a message, with the reason where there is one."""
    return f"{name!r} ({why})" if (why := WITHOUT_RULES.get(name.lower())) else repr(name)
