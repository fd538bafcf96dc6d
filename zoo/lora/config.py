"""Which matrices of a model have a low-rank adapter, of what rank and scale. Imports no JAX."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from mupax.config_fields import Affects
from mupax.presets.roles import ParamSpec
from mupax.zoo.families import ConfigError

Branch = Literal["attention", "mlp"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters (LoRA, Hu et al. 2021): a matrix W of a block computes x W + (alpha / rank) x A B."""

    rank: Annotated[int | None, Affects("model", 2, given={"freeze": ("bias",)})] = None
    """Numbers between A and B; no adapters unless given."""
    alpha: Annotated[float, Affects("model", 16.0, given={"freeze": ("bias",), "model.lora.rank": 2})] = 32.0
    """Scale of what adapters add, over their rank: of another rank the same learning rate serves."""
    on: Annotated[tuple[Branch, ...], Affects("model", ("mlp",), given={"freeze": ("bias",), "model.lora.rank": 2})] = (
        "attention",
        "mlp",
    )
    """Branches whose matrices have them."""

    def __post_init__(self) -> None:
        if self.rank is not None and self.rank < 1:
            raise ConfigError(f"lora.rank is {self.rank}; write a whole number of at least 1, such as 8")
        if not 0 < self.alpha < math.inf:
            raise ConfigError(f"lora.alpha is {self.alpha}; write a number above 0, such as 32")
        wrong = [branch for branch in self.on if branch not in get_args(Branch)]
        if wrong or not self.on:
            raise ConfigError(f"lora.on is {' '.join(wrong) or 'nothing'}; write attention, mlp or both")
        if self.rank is None and any(getattr(self, of.name) != of.default for of in dataclasses.fields(self)):
            raise ConfigError(
                "lora.alpha and lora.on are of adapters, and there are none; write lora.rank too, such as 8"
            )

    @property
    def scale(self) -> float:
        """What the product of both is taken times."""
        return self.alpha / (self.rank or 1)

    def sizes(self) -> dict[str, int]:
        """The axis that adapters add to a model's."""
        return {"rank": self.rank} if self.rank else {}

    def declared(self, matrices: Mapping[str, ParamSpec]) -> dict[str, ParamSpec]:
        """The adapters of a stack, by name.

        Args:
            matrices: of the stack, by name.
        """
        if self.rank is None:
            return {}
        from mupax.presets.adapters import pair

        adapted = [name for name in matrices if name.startswith(tuple(f"block.{branch}." for branch in self.on))]
        return {
            f"{name}_lora.{which}": of for name in adapted for which, of in zip("ab", pair(matrices[name]), strict=True)
        }

    def modules(self, init: Any, *names: str) -> tuple[Any, ...]:
        """The adapters (`mupax.zoo.lora.layer.Lora`) of matrices, None for each that has none.

        Args:
            init: of the matrices' module.
            *names: of the matrices.
        """
        if self.rank is None:
            return (None,) * len(names)
        from mupax.zoo.lora.layer import Lora

        scopes = [init.scope(f"{name}_lora") for name in names]
        return tuple(Lora(self.scale, scope) if scope.has("a") else None for scope in scopes)
