"""Config of the pre-norm residual stack that every transformer of the zoo shares. Imports no JAX.

The configs of expert routing and of low-rank adapters (LoRA) come first.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, Protocol, get_args

from mupax.config_fields import Affects, Listed
from mupax.presets.roles import (
    EXPERT_MATRICES,
    MATRICES,
    FactorSpec,
    ParamSpec,
    Role,
    with_value_dim,
)
from mupax.zoo.families import ComputeConfig, ConfigError, ModelConfig, nearest_divisor

Gate = Literal["sigmoid", "softmax", "softmax-all"]

Branch = Literal["attention", "mlp"]

Norm = Literal["layernorm", "rmsnorm"]
Activation = Literal["gelu", "gelu_exact", "relu", "swiglu", "geglu"]
_QKV = ("block.attention.query", "block.attention.key", "block.attention.value")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutingConfig:
    """Router of a mixture of experts: gate, capacity and the losses that balance the load."""

    gate: Annotated[Gate, Affects("model", "softmax", given={"model.experts": 4})] = "sigmoid"
    """Weights of a token's experts. sigmoid: sigmoid of the score, divided by the number of active
    experts (2601.20205). softmax: softmax over the scores of the active experts (Mixtral).
    softmax-all: softmax over the scores of all experts (Switch)."""
    capacity_factor: Annotated[float | None, Affects("model", 1.0, given={"model.experts": 4})] = (
        None
    )
    """Capacity of an expert, as a multiple of its even share of an example's tokens. An expert
    takes the first tokens and drops the rest. By default no token is dropped."""
    balance: Annotated[
        Literal["loss", "bias", "none"], Affects("model", "bias", given={"model.experts": 4})
    ] = "loss"
    """loss: add Switch's balance loss times balance_weight. bias: add a bias to the scores that
    choose experts and move it by their load (`rates.block.router.bias` scales its steps)."""
    balance_weight: Annotated[float, Affects("model", 0.1, given={"model.experts": 4})] = 0.01
    """Weight of the balance loss, which is 1 if all experts are used equally."""
    z_weight: Annotated[float, Affects("model", 0.1, given={"model.experts": 4})] = 0.001
    """Weight of the mean square of the scores' log-sum-exp (ST-MoE)."""

    def __post_init__(self) -> None:
        if self.capacity_factor is not None and not (0 < self.capacity_factor < math.inf):
            raise ConfigError(
                f"model.routing.capacity_factor is {self.capacity_factor}, and no token would find "
                "room; write a number above 0, such as 1.25, or leave it out, and no token is "
                "dropped"
            )
        for name in ("balance_weight", "z_weight"):
            weight = getattr(self, name)
            if not 0 <= weight < math.inf:
                raise ConfigError(f"model.routing.{name} is {weight}; write a number of at least 0")

    def capacity(self, tokens: int, experts: int, active: int) -> int | None:
        """Return the largest number of an example's tokens that one expert takes.

        That is ceil(capacity_factor * T * a / E), at most T. `None`, without a capacity factor,
        means that an expert takes every token sent to it.

        Args:
            tokens: Number of tokens in an example, `T`.
            experts: Number of experts in a layer, `E`.
            active: Number of experts that a token goes to, `a`.
        """
        if self.capacity_factor is None:
            return None
        # A token goes to an expert at most once, so no expert needs room for more than all tokens.
        return min(tokens, math.ceil(self.capacity_factor * tokens * active / experts))


class WithExperts(Protocol):
    """Fields of a model config that `check_experts` reads."""

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


def check_experts(model: WithExperts) -> None:
    """Raise ConfigError if the fields about experts contradict each other.

    A model without experts must leave `active_experts`, `expert_dim`, `shared_experts` and
    `routing` at their defaults. With experts, the number of active ones may not be above that of
    experts, and must divide the MLP's hidden size unless `expert_dim` is given. In addition,
    `compute.product_dtype` must be `None`.
    """
    if model.experts is None:
        values = {
            name: getattr(model, name)
            for name in ("active_experts", "expert_dim", "shared_experts")
        }
        values["routing"] = None
        if model.routing != RoutingConfig():
            values["routing"] = "not the default"
        for name, value in values.items():
            if value is not None:
                raise ConfigError(
                    f"model.{name} is {value} and there are no experts; write model.experts too"
                )
        return
    if model.active > model.experts:
        raise ConfigError(
            f"model.active_experts {model.active} is more than the {model.experts} experts there "
            f"are; write active_experts {model.experts} or fewer"
        )
    if model.expert_dim is None and model.mlp_dim % model.active:
        near = max(1, round(model.mlp_dim / model.active))
        raise ConfigError(
            f"the MLP's {model.mlp_dim} hidden units do not split over {model.active} active "
            f"experts; write expert_dim {near}"
        )
    if model.compute.product_dtype is not None:
        raise ConfigError(
            f"model.compute.product_dtype {model.compute.product_dtype} is for models without "
            "experts; leave it out"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters (LoRA, Hu et al. 2021) of a block's matrices.

    An adapted matrix W computes x W + (alpha / rank) x A B.
    """

    rank: Annotated[int | None, Affects("model", 2, given={"freeze": ("bias",)})] = None
    """Inner dimension of the adapters, between A and B. No adapters by default."""
    alpha: Annotated[
        float, Affects("model", 16.0, given={"freeze": ("bias",), "model.lora.rank": 2})
    ] = 32.0
    """Scale of the adapters' output, divided by their rank. The same learning rate then suits every
    rank."""
    on: Annotated[
        tuple[Branch, ...],
        Affects("model", ("mlp",), given={"freeze": ("bias",), "model.lora.rank": 2}),
    ] = (
        "attention",
        "mlp",
    )
    """Branches whose matrices have adapters."""

    def __post_init__(self) -> None:
        if self.rank is not None and self.rank < 1:
            raise ConfigError(
                f"lora.rank is {self.rank}; write a whole number of at least 1, such as 8"
            )
        if not 0 < self.alpha < math.inf:
            raise ConfigError(f"lora.alpha is {self.alpha}; write a number above 0, such as 32")
        wrong = [branch for branch in self.on if branch not in get_args(Branch)]
        if wrong or not self.on:
            raise ConfigError(
                f"lora.on is {' '.join(wrong) or 'nothing'}; write attention, mlp or both"
            )
        if self.rank is not None:
            return
        for field in dataclasses.fields(self):
            if getattr(self, field.name) != field.default:
                raise ConfigError(
                    f"lora.{field.name} is given, and only adapters read it; write lora.rank too, "
                    f"such as 8, or leave lora.{field.name} out"
                )

    @property
    def scale(self) -> float:
        """Factor on the product x A B: alpha / rank."""
        return self.alpha / (self.rank or 1)

    def sizes(self) -> dict[str, int]:
        """Return the size of the axis "rank" as `{"rank": size}`, or `{}` without adapters."""
        return {"rank": self.rank} if self.rank else {}

    def declared(self, matrices: Mapping[str, ParamSpec]) -> dict[str, ParamSpec]:
        """Return the declarations of A and B for each adapted matrix, or `{}` without adapters.

        The names are that of the matrix plus `_lora.a` and `_lora.b`.

        Args:
            matrices: Declarations of a stack's matrices by name, such as "block.mlp.up".
        """
        if self.rank is None:
            return {}
        # Imported here, so that models without adapters do not load the module.
        from mupax.presets.adapters import pair

        prefixes = tuple(f"block.{branch}." for branch in self.on)
        adapters = {}
        for name, matrix in matrices.items():
            if name.startswith(prefixes):
                a, b = pair(matrix)
                adapters[f"{name}_lora.a"] = a
                adapters[f"{name}_lora.b"] = b
        return adapters

    def modules(self, init: Any, *names: str) -> tuple[Any, ...]:
        """Build the adapter (`mupax.zoo.lora.layer.Lora`) of each named matrix. `None` without one.

        Args:
            init: `mupax.zoo.definition.Init` in the scope of the matrices' module.
            *names: Names of the matrices in that scope, such as "query".
        """
        if self.rank is None:
            return (None,) * len(names)
        # Imported here, because this module imports JAX and configs must load without it.
        from mupax.zoo.lora.layer import Lora

        scopes = [init.scope(f"{name}_lora") for name in names]
        return tuple(Lora(self.scale, scope) if scope.has("a") else None for scope in scopes)


class RopeScaling(NamedTuple):
    """Scaling of the rotary frequencies for a context longer than in the first training."""

    kind: Literal["linear", "llama3"]
    """linear: divide every frequency by the factor (Chen et al. 2023). llama3: divide only the
    frequencies that complete few turns within the original context."""
    factor: float
    low: float = 1.0
    """llama3: a frequency with fewer turns in the original context is divided by the factor."""
    high: float = 4.0
    """llama3: a frequency with more turns is kept. Between `low` and `high` it is interpolated."""
    original: int = 8192
    """llama3: length of the original context, in positions."""


class AttentionSpec(NamedTuple):
    """Positions that a query may attend to, and the soft cap of the attention logits."""

    causal: bool
    """Query t attends to keys 0..t. Otherwise every query attends to every key."""
    window: int | None = None
    """Number of last positions that a causal query attends to, its own included."""
    cap: float | None = None
    """Soft cap: logits become cap * tanh(logits / cap) before softmax. `None` leaves them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig(ModelConfig):
    """Sizes and options of residual blocks of attention and MLP."""

    width: Annotated[int, Listed("model", 32)]
    """Size of the residual stream, D."""
    depth: Annotated[int, Listed("model", 3)]
    """Number of residual blocks, L. One block is attention and MLP."""
    num_heads: Annotated[int, Listed("model", 4)]
    """Number of query heads, H."""
    head_dim: Annotated[int | None, Affects("model", 6)] = None
    """Size of a head, N. width / num_heads by default."""
    value_dim: Annotated[int | None, Affects("model", 3)] = None
    """Size of a head's values. That of its queries and keys by default."""
    num_kv_heads: Annotated[int | None, Affects("model", 1)] = None
    """Number of key and value heads (grouped-query attention). num_heads by default."""
    mlp_ratio: Annotated[float, Affects("model", 3.0)] = 4.0
    """Hidden size of the MLP, F, divided by the width. F must be a whole number."""
    activation: Annotated[Activation, Affects("model", "relu")] = "gelu"
    """gelu: the tanh approximation, as in GPT-2. gelu_exact: the form with erf, which differs by
    1e-3."""
    norm: Annotated[Norm, Affects("model", "rmsnorm")] = "layernorm"
    norm_eps: Annotated[float, Affects("model", 0.001)] = 1e-5
    """Constant added to the variance (rmsnorm: the mean square) that a norm divides by."""
    norm_gain: Annotated[bool, Affects("model", False)] = True
    """Trainable norm gains."""
    bias: Annotated[bool, Affects("model", False)] = True
    """Trainable biases of matrices and of LayerNorm. A key bias exists only if its gradient is not
    always zero, which takes rotary positions or QK-norm."""
    qkv_bias: Annotated[bool, Affects("model", True, given={"model.bias": False})] = False
    """Trainable biases of queries, keys and values only, with `bias` off."""
    qk_norm: Annotated[bool, Affects("model", True)] = False
    """RMS-normalize queries and keys per head, with a gain shared by heads."""
    qk_norm_kind: Annotated[Norm, Affects("model", "layernorm", given={"model.qk_norm": True})] = (
        "rmsnorm"
    )
    """layernorm: also subtract the mean of queries and keys. It has no bias."""
    branch_activation: Annotated[Literal["none", "gelu"], Affects("model", "gelu")] = "none"
    """gelu: a branch reads GELU of its norm's output, as in the language model of Bordelon et al.
    2024."""

    experts: Annotated[int | None, Listed("model", 2, given={"model.experts": 4})] = None
    """Number of experts, E, that replace the MLP of every block. No experts by default."""
    active_experts: Annotated[int | None, Listed("model", 1, given={"model.experts": 4})] = None
    """Number of experts that a token goes to. 2 by default, or 1 if there is only one expert."""
    expert_dim: Annotated[int | None, Affects("model", 8, given={"model.experts": 4})] = None
    """Hidden size of an expert. By default that of the MLP divided by active_experts, so that a
    token costs as much as in the MLP."""
    shared_experts: Annotated[int | None, Affects("model", 1, given={"model.experts": 4})] = None
    """Number of experts that every token goes to, in addition to active_experts. They are one MLP
    of hidden size shared_experts * expert_dim. None by default."""
    routing: RoutingConfig = dataclasses.field(default=RoutingConfig())
    lora: LoraConfig = dataclasses.field(default=LoraConfig())

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_attention()
        self._check_mlp()
        check_experts(self)

    def _check_attention(self) -> None:
        """Raise ConfigError if the fields of attention contradict each other.

        Heads must divide the width unless `head_dim` is given, and key heads the heads. Refused are
        `value_dim` with fused projections, `qkv_bias` with `bias`, and `qk_norm_kind` without
        `qk_norm`.
        """
        if self.head_dim is None and self.width % self.num_heads:
            near = nearest_divisor(self.width, self.num_heads)
            raise ConfigError(
                f"model.width {self.width} is not divisible by model.num_heads {self.num_heads}; "
                f"write num_heads {near}, or give head_dim to have heads of another size than "
                "width / num_heads"
            )
        if self.num_heads % self.kv_heads:
            near = nearest_divisor(self.num_heads, self.kv_heads)
            raise ConfigError(
                f"model.num_heads {self.num_heads} is not a multiple of model.num_kv_heads "
                f"{self.kv_heads}; write num_kv_heads {near}"
            )
        if self.value_dim is not None and self.compute.projections == "fused":
            raise ConfigError(
                "model.value_dim makes values of another size than queries; write projections auto "
                "or separate"
            )
        if self.qkv_bias and self.bias:
            raise ConfigError(
                "model.qkv_bias is there with model.bias already; write bias False to have these "
                "three alone"
            )
        if self.qk_norm_kind != "rmsnorm" and not self.qk_norm:
            raise ConfigError(
                f"model.qk_norm_kind is {self.qk_norm_kind} without model.qk_norm; write qk_norm "
                "True too"
            )

    def _check_mlp(self) -> None:
        """Raise ConfigError unless `mlp_ratio` and `norm_eps` are positive and finite.

        `mlp_ratio` times the width must also be a whole number.
        """
        if not (0 < self.mlp_ratio < math.inf):
            raise ConfigError(f"model.mlp_ratio is {self.mlp_ratio}; write a number above 0")
        if not (0 < self.norm_eps < math.inf):
            raise ConfigError(
                f"model.norm_eps is {self.norm_eps}; write a number above 0, such as 1e-5"
            )
        exact = self.mlp_ratio * self.width
        # A ratio written with few digits, such as 2.6667, need not give a whole number exactly.
        if self.mlp_dim < 1 or not math.isclose(self.mlp_dim, exact, rel_tol=1e-6):
            near = max(1, self.mlp_dim) / self.width
            raise ConfigError(
                f"model.mlp_ratio {self.mlp_ratio} times model.width {self.width} is not a whole "
                f"number; write mlp_ratio {near:.10g}"
            )

    @property
    def mlp_dim(self) -> int:
        return round(self.mlp_ratio * self.width)

    @property
    def active(self) -> int:
        """Number of experts that a token goes to, a. By default 2, or 1 if there is only one."""
        return self.active_experts or min(2, self.experts or 1)

    @property
    def expert_size(self) -> int:
        """Hidden size of an expert: `expert_dim`, or that of the MLP divided by `active`."""
        return self.expert_dim or self.mlp_dim // self.active

    @property
    def dense_dim(self) -> int:
        """Hidden size of the dense part of a block, which every token goes through.

        That part is the MLP, or all shared experts in a model with experts. The size is 0 if there
        are experts but no shared ones.
        """
        if self.experts is None:
            return self.mlp_dim
        # Shared experts read the same input and are summed, so together they are one wider MLP.
        return self.expert_size * (self.shared_experts or 0)

    @property
    def heads_dim(self) -> int:
        """Size of a head's queries and keys, N."""
        if self.head_dim is None:
            return self.width // self.num_heads
        return self.head_dim

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        if self.num_kv_heads is None:
            return self.num_heads
        return self.num_kv_heads

    @property
    def gated(self) -> bool:
        """True for an MLP with a gate: swiglu or geglu."""
        return self.activation in ("swiglu", "geglu")

    @property
    def absorbs_logit_scale(self) -> bool:
        """True if some parameter can absorb a factor on the attention logits.

        None can if queries and keys are normalized and the norms have no gains.
        """
        return self.norm_gain or not self.qk_norm

    @property
    def rotary_theta(self) -> float | None:
        """Base wavelength of rotary positions. `None` if the model has none."""
        return None

    @property
    def rotary_scaling(self) -> RopeScaling | None:
        """Scaling of the rotary frequencies. `None` for frequencies that are not scaled."""
        return None

    def rotary_of(self, attention: AttentionSpec) -> tuple[float | None, RopeScaling | None]:
        """Return the base wavelength and the frequency scaling of layers with this attention.

        By default these are `rotary_theta` and `rotary_scaling` for every layer.
        """
        return self.rotary_theta, self.rotary_scaling

    @property
    def rotary_size(self) -> int:
        """Number of leading entries of a head that rotary positions rotate."""
        return self.heads_dim

    @property
    def parallel_branches(self) -> bool:
        """True if a block's MLP reads the same residual stream as its attention."""
        return False

    @property
    def branch_gains(self) -> float | None:
        """Initial value of trainable gains on each branch's output (layer scale).

        `None` for a model without these gains.
        """
        return None

    @property
    def sight(self) -> AttentionSpec:
        """Attention of the model's first layer."""
        return AttentionSpec(self.causal)

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        """Attention of the first layers, up to the length after which the layers repeat.

        Layer i has `attention_specs[i % len(attention_specs)]`. Most models have a single entry.
        """
        return (self.sight,)

    @property
    def post_norms(self) -> bool:
        """True if each branch's output is normalized before its gain (`branch_gains`)."""
        return False

    def base_sizes(self) -> dict[str, int]:
        sizes = {
            "embed": self.width,
            "heads": self.num_heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.heads_dim,
        }
        if self.value_dim:
            sizes["value_dim"] = self.value_dim
        if self.dense_dim:
            sizes["mlp"] = self.dense_dim
        if self.experts:
            sizes["experts"] = self.experts
            sizes["active"] = self.active
            sizes["expert_dim"] = self.expert_size
        sizes["layers"] = self.depth
        return sizes

    def finite_sizes(self) -> dict[str, int]:
        return self.lora.sizes()

    def stack(self) -> dict[str, ParamSpec]:
        """Return the declarations of the residual stack's parameters, with the norm at its end.

        The keys are parameter names, such as "block.attention.query".
        """
        matrices = self._block_matrices()
        specs = {**matrices, **self.lora.declared(matrices), **self._biases(matrices)}

        initial_gain = self.branch_gains
        if initial_gain is not None:
            for branch, out in (("attention", "attention.out"), ("mlp", "mlp.down")):
                gain = MATRICES[f"block.{out}"].gain
                specs[f"block.{branch}_gain"] = dataclasses.replace(gain, start=initial_gain)

        specs.update(self._norms())
        return specs

    def _block_matrices(self) -> dict[str, ParamSpec]:
        """Return the declarations of the residual blocks' matrices by name, without adapters."""
        matrices = {name: spec for name, spec in MATRICES.items() if spec.in_block}
        if self.value_dim:
            matrices = with_value_dim(matrices)
        if self.experts:
            # Added before the gates below, because experts have a gate, too.
            matrices |= EXPERT_MATRICES
        if not self.dense_dim:
            matrices = {
                name: spec for name, spec in matrices.items() if not name.startswith("block.mlp.")
            }
        if self.gated:
            # A gate is declared like the matrix whose output it multiplies.
            gates = {
                name.replace(".up", ".gate"): spec
                for name, spec in matrices.items()
                if name.endswith(".up")
            }
            matrices |= gates
        return matrices

    def _biases(self, matrices: Mapping[str, ParamSpec]) -> dict[str, ParamSpec]:
        """Return the declarations of the biases that the config gives the matrices, by name.

        A key bias is left out if its gradient would be zero, and a router has none. The bias that
        balances experts (`block.experts.balance`) is added if the config has it.
        """
        if self.bias:
            with_bias = tuple(matrices)
        elif self.qkv_bias:
            with_bias = _QKV
        else:
            with_bias = ()
        biases = {f"{name}_bias": matrices[name].bias for name in with_bias}
        if self.rotary_theta is None and not self.qk_norm:
            # Softmax ignores a shift that all keys share, so the gradient of a key bias would be 0.
            biases.pop("block.attention.key_bias", None)
        # A router has no trained bias. `balance` below is a bias that the experts' load moves.
        biases.pop("block.experts.router_bias", None)
        if self.experts and self.routing.balance == "bias":
            biases["block.experts.balance"] = EXPERT_MATRICES["block.experts.router"].bias
        return biases

    def _norms(self) -> dict[str, ParamSpec]:
        """Return the declarations of the norms' gains and biases, as far as the config has them.

        The norms are those of queries and keys, before each branch, and at the end of the stack.
        """
        norms = {}
        if self.qk_norm and self.norm_gain:
            for name in ("query", "key"):
                norms[f"block.attention.{name}_norm.gain"] = ParamSpec(
                    role=Role.NORM_GAIN,
                    axes=("layers", "head_dim"),
                    in_block=True,
                    of=MATRICES[f"block.attention.{name}"].role,
                )
        for name in ("block.attention_norm", "block.mlp_norm", "norm"):
            in_block = name.startswith("block.")
            axes = ("layers", "embed") if in_block else ("embed",)
            if self.norm_gain:
                norms[f"{name}.gain"] = ParamSpec(role=Role.NORM_GAIN, axes=axes, in_block=in_block)
            if self.bias and self.norm == "layernorm":
                norms[f"{name}.bias"] = ParamSpec(
                    role=Role.BIAS, axes=axes, in_block=in_block, of=Role.NORM_GAIN
                )
        return norms

    def factors(self) -> dict[str, FactorSpec]:
        """Declare the scale of the attention logits and the two scales of every residual addition.

        The logit scale is N^-1/2 until a preset sets it. The scales of the additions are 1.
        """
        return {
            "block.attention.logit_scale": FactorSpec(
                kind="logits", shape=(self.depth,), value=self.heads_dim**-0.5
            ),
            "block.skip": FactorSpec(kind="skip", shape=(self.depth, 2)),
            "block.branch": FactorSpec(kind="branch", shape=(self.depth, 2)),
        }

    def attention_flops(self) -> float:
        """Return the FLOPs per unit of q.k and of the weighted sum of values, in all layers.

        A causal query is counted with half of the context, its average.
        """
        length = self.sizes()["position"]
        period = len(self.attention_specs)
        attended = []
        for index, attention in enumerate(self.attention_specs):
            # Layers index, index + period, ... have this attention.
            layers = self.depth // period + (index < self.depth % period)
            attended.append(self._attended_positions(attention, length) * layers)
        # N for q.k, and the size of a value for the weighted sum.
        entries = self.heads_dim + (self.value_dim or self.heads_dim)
        return 2 * sum(attended) * self.num_heads * entries * (length // self.units)

    def _attended_positions(self, attention: AttentionSpec, length: int) -> float:
        """Return the number of keys that a query attends to, averaged over `length` queries."""
        window = attention.window
        if window is not None and window < length:
            # The first `window` queries have fewer keys before them: window / 2 on average.
            return window - window**2 / (2 * length)
        return length / 2 if self.causal else length


def transformer(model: ModelConfig, purpose: str) -> TransformerConfig:
    """Return the model if it is one of the zoo's transformers, and raise ConfigError otherwise.

    Args:
        purpose: Use that needs a transformer, such as "writing text". The message begins with it.
    """
    if not isinstance(model, TransformerConfig):
        raise ConfigError(
            f"{purpose} knows the zoo's transformers only, and the model is a {model.family}"
        )
    return model
