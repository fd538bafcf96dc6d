"""How tokens go to experts, as data: gates, capacity, balance. Imports no JAX."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Literal, Protocol

from mupax.config_fields import Affects
from mupax.zoo.families import ComputeConfig, ConfigError

Gate = Literal["sigmoid", "softmax", "softmax-all"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutingConfig:
    """How a token's experts are chosen and weighed, what an expert takes at most, and what keeps them evenly used."""

    gate: Annotated[Gate, Affects("model", "softmax", given={"model.experts": 4})] = "sigmoid"
    """Weights of a token's experts: sigmoid of the score over their number (2601.20205), softmax over their scores (Mixtral), or over
    all (Switch)."""
    capacity_factor: Annotated[float | None, Affects("model", 1.0, given={"model.experts": 4})] = None
    """An expert takes at most so many times its even share of an example's tokens, the first ones; it takes all unless given (dropless)."""
    balance: Annotated[Literal["loss", "bias", "none"], Affects("model", "bias", given={"model.experts": 4})] = "loss"
    """loss: of Switch, times balance_weight. bias: added to scores where experts are chosen, moved by their loads
    (`rates.block.router.bias` scales it)."""
    balance_weight: Annotated[float, Affects("model", 0.1, given={"model.experts": 4})] = 0.01
    """Weight of the balance loss, which is 1 where all experts are used alike."""
    z_weight: Annotated[float, Affects("model", 0.1, given={"model.experts": 4})] = 0.001
    """Weight of the mean square of the scores' log-sum-exp (ST-MoE)."""

    def __post_init__(self) -> None:
        if self.capacity_factor is not None and not (0 < self.capacity_factor < math.inf):
            raise ConfigError(
                f"model.routing.capacity_factor is {self.capacity_factor}, and no token would find room; "
                "write a number above 0, such as 1.25, or leave it out, and no token is dropped"
            )
        for name in ("balance_weight", "z_weight"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise ConfigError(f"model.routing.{name} is {value}; write a number of at least 0")

    def capacity(self, tokens: int, experts: int, active: int) -> int | None:
        """Tokens of an example that an expert takes at most; None where it takes all.

        Args:
            tokens: of an example.
            experts: of a layer.
            active: that a token goes to.
        """
        if self.capacity_factor is None:
            return None
        return min(tokens, math.ceil(self.capacity_factor * tokens * active / experts))


class Model(Protocol):
    """What is read of a model's config."""

    @property
    def experts(self) -> int | None: ...
    @property
    def active(self) -> int: ...
    @property
    def expert_dim(self) -> int | None: ...
    @property
    def mlp_dim(self) -> int: ...
    @property
    def routing(self) -> RoutingConfig: ...
    @property
    def compute(self) -> ComputeConfig: ...


def check(model: Model) -> None:
    """Raises ConfigError where a model's experts do not fit together, or fields of theirs are written without experts."""
    if model.experts is None:
        fields = {name: getattr(model, name) for name in ("active_experts", "expert_dim", "shared_experts")}
        fields |= {"routing": None if model.routing == RoutingConfig() else "not the default"}
        for name, value in fields.items():
            if value is not None:
                raise ConfigError(f"model.{name} is {value} and there are no experts; write model.experts too")
        return
    if model.active > model.experts:
        raise ConfigError(
            f"model.active_experts {model.active} is more than the {model.experts} experts there are; "
            f"write active_experts {model.experts} or fewer"
        )
    if model.expert_dim is None and model.mlp_dim % model.active:
        raise ConfigError(
            f"the MLP's {model.mlp_dim} hidden units do not split over {model.active} active experts; "
            f"write expert_dim {max(1, round(model.mlp_dim / model.active))}"
        )
    if model.compute.product_dtype is not None:
        raise ConfigError(
            f"model.compute.product_dtype {model.compute.product_dtype} is for models without experts; leave it out"
        )
