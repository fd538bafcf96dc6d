"""The pre-norm residual stack that every transformer here shares, as data: sizes, parameters, factors, FLOPs. Imports no JAX.

Its parts come first: low-rank adapters of its matrices, and how tokens go to experts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, Protocol, get_args

from mupax.config_fields import Affects, Listed
from mupax.presets.matrices import EXPERT_MATRICES, MATRICES, with_value_dim
from mupax.presets.roles import FactorSpec, ParamSpec, Role
from mupax.zoo.families import ComputeConfig, ConfigError, ModelConfig, nearest_divisor

Gate = Literal["sigmoid", "softmax", "softmax-all"]

Branch = Literal["attention", "mlp"]

Norm = Literal["layernorm", "rmsnorm"]
Activation = Literal["gelu", "gelu_exact", "relu", "swiglu", "geglu"]
_QKV = ("block.attention.query", "block.attention.key", "block.attention.value")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutingConfig:
    """How a token's experts are chosen and weighed, what an expert takes at most, and what keeps them evenly used."""

    gate: Annotated[Gate, Affects("model", "softmax", given={"model.experts": 4})] = "sigmoid"
    """Weights of a token's experts: sigmoid of the score over their number (2601.20205), softmax over their scores (Mixtral), or over
    all (Switch)."""
    capacity_factor: Annotated[float | None, Affects("model", 1.0, given={"model.experts": 4})] = (
        None
    )
    """An expert takes at most so many times its even share of an example's tokens, the first ones; it takes all unless given (dropless)."""
    balance: Annotated[
        Literal["loss", "bias", "none"], Affects("model", "bias", given={"model.experts": 4})
    ] = "loss"
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


class WithExperts(Protocol):
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


def check_experts(model: WithExperts) -> None:
    """Raises ConfigError where a model's experts do not fit together, or fields of theirs are written without experts."""
    if model.experts is None:
        fields = {
            name: getattr(model, name)
            for name in ("active_experts", "expert_dim", "shared_experts")
        }
        fields |= {"routing": None if model.routing == RoutingConfig() else "not the default"}
        for name, value in fields.items():
            if value is not None:
                raise ConfigError(
                    f"model.{name} is {value} and there are no experts; write model.experts too"
                )
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters (LoRA, Hu et al. 2021): a matrix W of a block computes x W + (alpha / rank) x A B."""

    rank: Annotated[int | None, Affects("model", 2, given={"freeze": ("bias",)})] = None
    """Numbers between A and B; no adapters unless given."""
    alpha: Annotated[
        float, Affects("model", 16.0, given={"freeze": ("bias",), "model.lora.rank": 2})
    ] = 32.0
    """Scale of what adapters add, over their rank: of another rank the same learning rate serves."""
    on: Annotated[
        tuple[Branch, ...],
        Affects("model", ("mlp",), given={"freeze": ("bias",), "model.lora.rank": 2}),
    ] = (
        "attention",
        "mlp",
    )
    """Branches whose matrices have them."""

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
        if self.rank is None and any(
            getattr(self, of.name) != of.default for of in dataclasses.fields(self)
        ):
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

        adapted = [
            name
            for name in matrices
            if name.startswith(tuple(f"block.{branch}." for branch in self.on))
        ]
        return {
            f"{name}_lora.{which}": of
            for name in adapted
            for which, of in zip("ab", pair(matrices[name]), strict=True)
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


class RopeScaling(NamedTuple):
    """How the frequencies of rotary positions are stretched for a context that is longer than the one first trained on."""

    kind: Literal["linear", "llama3"]
    """linear divides all by the factor (Chen et al. 2023); llama3 those alone that turn too rarely within the first context."""
    factor: float
    low: float = 1.0
    """llama3: turns within the first context below which a frequency is divided."""
    high: float = 4.0
    """llama3: turns above which it is left alone; between the two it is interpolated."""
    original: int = 8192
    """llama3: positions of the first context."""


class AttentionSpec(NamedTuple):
    """Positions that attention may see: all or earlier ones, a window, and the cap of its logits."""

    causal: bool
    """Query t sees keys 0..t, else all."""
    window: int | None = None
    """Causal alone: of those the last so many, its own among them."""
    cap: float | None = None
    """Logits are cap * tanh(logits / cap) before softmax (soft cap); as they are unless given."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig(ModelConfig):
    """Blocks of attention and MLP. Sizes are counts; `head_dim` defaults to width / num_heads."""

    width: Annotated[int, Listed("model", 32)]
    """Residual stream size D."""
    depth: Annotated[int, Listed("model", 3)]
    """Residual blocks L (one block = attention + MLP)."""
    num_heads: Annotated[int, Listed("model", 4)]
    """Query heads H."""
    head_dim: Annotated[int | None, Affects("model", 6)] = None
    """Dimension per head N; width / num_heads unless given."""
    value_dim: Annotated[int | None, Affects("model", 3)] = None
    """Dimension of a head's values, where it is not that of its queries and keys."""
    num_kv_heads: Annotated[int | None, Affects("model", 1)] = None
    """Key and value heads (grouped-query attention); num_heads unless given."""
    mlp_ratio: Annotated[float, Affects("model", 3.0)] = 4.0
    """MLP hidden size F = mlp_ratio * width, which must be a whole number."""
    activation: Annotated[Activation, Affects("model", "relu")] = "gelu"
    """gelu is the tanh form, as in GPT-2; gelu_exact the one with erf, 1e-3 away."""
    norm: Annotated[Norm, Affects("model", "rmsnorm")] = "layernorm"
    norm_eps: Annotated[float, Affects("model", 0.001)] = 1e-5
    """Added to the variance (rmsnorm: the mean square) that a norm divides by."""
    norm_gain: Annotated[bool, Affects("model", False)] = True
    """Trainable norm gains."""
    bias: Annotated[bool, Affects("model", False)] = True
    """Trainable biases of matrices and of LayerNorm. A key bias exists only where it has a gradient (rotary, QK-norm)."""
    qkv_bias: Annotated[bool, Affects("model", True, given={"model.bias": False})] = False
    """Trainable biases of queries, keys and values alone, where `bias` is off."""
    qk_norm: Annotated[bool, Affects("model", True)] = False
    """RMS-normalize queries and keys per head, with a gain shared by heads."""
    qk_norm_kind: Annotated[Norm, Affects("model", "layernorm", given={"model.qk_norm": True})] = (
        "rmsnorm"
    )
    """layernorm subtracts the mean of queries and keys too (no bias)."""
    branch_activation: Annotated[Literal["none", "gelu"], Affects("model", "gelu")] = "none"
    """gelu: a branch reads GELU of its norm's output, as in Bordelon et al. 2024's language model."""

    experts: Annotated[int | None, Listed("model", 2, given={"model.experts": 4})] = None
    """Experts E in place of every block's MLP, of which a token goes to a few; none unless given."""
    active_experts: Annotated[int | None, Listed("model", 1, given={"model.experts": 4})] = None
    """Experts that a token goes to; 2 of them unless given, or the only one."""
    expert_dim: Annotated[int | None, Affects("model", 8, given={"model.experts": 4})] = None
    """Hidden size of an expert; the MLP's over active_experts unless given, so that a token costs as much as in the MLP."""
    shared_experts: Annotated[int | None, Affects("model", 1, given={"model.experts": 4})] = None
    """Experts that every token goes to, as one MLP of so many times expert_dim beside the others; none unless given."""
    routing: RoutingConfig = dataclasses.field(default=RoutingConfig())
    lora: LoraConfig = dataclasses.field(default=LoraConfig())

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_dim is None and self.width % self.num_heads:
            near = nearest_divisor(self.width, self.num_heads)
            raise ConfigError(
                f"model.width {self.width} is not divisible by model.num_heads {self.num_heads}; "
                f"write num_heads {near}, or give head_dim to have heads of another size than width / num_heads"
            )
        if self.num_heads % self.kv_heads:
            near = nearest_divisor(self.num_heads, self.kv_heads)
            raise ConfigError(
                f"model.num_heads {self.num_heads} is not a multiple of model.num_kv_heads {self.kv_heads}; "
                f"write num_kv_heads {near}"
            )
        if self.value_dim is not None and self.compute.projections == "fused":
            raise ConfigError(
                "model.value_dim makes values of another size than queries; write projections auto or separate"
            )
        if self.qkv_bias and self.bias:
            raise ConfigError(
                "model.qkv_bias is there with model.bias already; write bias False to have these three alone"
            )
        if self.qk_norm_kind != "rmsnorm" and not self.qk_norm:
            raise ConfigError(
                f"model.qk_norm_kind is {self.qk_norm_kind} without model.qk_norm; write qk_norm True too"
            )
        if not (0 < self.mlp_ratio < math.inf):
            raise ConfigError(f"model.mlp_ratio is {self.mlp_ratio}; write a number above 0")
        if not (0 < self.norm_eps < math.inf):
            raise ConfigError(
                f"model.norm_eps is {self.norm_eps}; write a number above 0, such as 1e-5"
            )
        if self.mlp_dim < 1 or not math.isclose(
            self.mlp_dim, self.mlp_ratio * self.width, rel_tol=1e-6
        ):
            near = max(1, self.mlp_dim) / self.width
            raise ConfigError(
                f"model.mlp_ratio {self.mlp_ratio} times model.width {self.width} is not a whole number; write mlp_ratio {near:.10g}"
            )
        check_experts(self)

    @property
    def mlp_dim(self) -> int:
        return round(self.mlp_ratio * self.width)

    @property
    def active(self) -> int:
        """Experts that a token goes to, a."""
        return self.active_experts or min(2, self.experts or 1)

    @property
    def expert_size(self) -> int:
        """Hidden size of an expert."""
        return self.expert_dim or self.mlp_dim // self.active

    @property
    def dense_dim(self) -> int:
        """Hidden size of what every token goes through in a block: the MLP's, or all shared experts'; 0 without any."""
        return (
            self.mlp_dim if self.experts is None else self.expert_size * (self.shared_experts or 0)
        )

    @property
    def heads_dim(self) -> int:
        return self.head_dim if self.head_dim is not None else self.width // self.num_heads

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads if self.num_kv_heads is not None else self.num_heads

    @property
    def gated(self) -> bool:
        return self.activation in ("swiglu", "geglu")

    @property
    def absorbs_logit_scale(self) -> bool:
        """Whether some parameter can hold what attention logits are taken times: not where queries are normalized without gains."""
        return self.norm_gain or not self.qk_norm

    @property
    def rotary_theta(self) -> float | None:
        """Base wavelength of rotary positions; None without them."""
        return None

    @property
    def rotary_scaling(self) -> RopeScaling | None:
        """How rotary frequencies are stretched; None where they are not."""
        return None

    def rotary_of(self, sight: AttentionSpec) -> tuple[float | None, RopeScaling | None]:
        """Base wavelength of a layer that sees so, and how its frequencies are stretched."""
        return self.rotary_theta, self.rotary_scaling

    @property
    def rotary_size(self) -> int:
        """Entries of a head that rotary positions turn, its first ones."""
        return self.heads_dim

    @property
    def parallel_branches(self) -> bool:
        """Whether a block's MLP reads the stream as its attention does, not after it."""
        return False

    @property
    def branch_gains(self) -> float | None:
        """What trainable gains of all that a branch writes start at (layer scale); None without them."""
        return None

    @property
    def sight(self) -> AttentionSpec:
        """What attention sees."""
        return AttentionSpec(self.causal)

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        """The specs of layer 0, 1 and so on, until they begin anew: most models have one."""
        return (self.sight,)

    @property
    def post_norms(self) -> bool:
        """Whether what a branch writes is normalized before its gain (`branch_gains`)."""
        return False

    def base_sizes(self) -> dict[str, int]:
        return {
            "embed": self.width,
            "heads": self.num_heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.heads_dim,
            **({"value_dim": self.value_dim} if self.value_dim else {}),
            **({"mlp": self.dense_dim} if self.dense_dim else {}),
            **(
                {"experts": self.experts, "active": self.active, "expert_dim": self.expert_size}
                if self.experts
                else {}
            ),
            "layers": self.depth,
        }

    def finite_sizes(self) -> dict[str, int]:
        return self.lora.sizes()

    def stack(self) -> dict[str, ParamSpec]:
        """Parameters of the residual stack and of the norm that ends it."""
        matrices = {name: spec for name, spec in MATRICES.items() if spec.in_block}
        matrices = with_value_dim(matrices) if self.value_dim else matrices
        if self.experts:
            matrices |= EXPERT_MATRICES
        if not self.dense_dim:
            matrices = {
                name: spec for name, spec in matrices.items() if not name.startswith("block.mlp.")
            }
        if self.gated:
            matrices |= {
                name.replace(".up", ".gate"): of
                for name, of in matrices.items()
                if name.endswith(".up")
            }
        with_bias = matrices if self.bias else _QKV if self.qkv_bias else ()
        biases = {f"{name}_bias": matrices[name].bias for name in with_bias}
        if self.rotary_theta is None and not self.qk_norm:
            # Softmax ignores a shift common to all keys: a key bias would have exactly zero gradient.
            biases.pop("block.attention.key_bias", None)
        biases.pop("block.experts.router_bias", None)
        if self.experts and self.routing.balance == "bias":
            biases["block.experts.balance"] = EXPERT_MATRICES["block.experts.router"].bias
        specs = {**matrices, **self.lora.declared(matrices), **biases}
        if (start := self.branch_gains) is not None:
            for branch, out in (("attention", "attention.out"), ("mlp", "mlp.down")):
                specs[f"block.{branch}_gain"] = dataclasses.replace(
                    MATRICES[f"block.{out}"].gain, start=start
                )
        if self.qk_norm and self.norm_gain:
            for name in ("query", "key"):
                of = MATRICES[f"block.attention.{name}"].role
                gain = ParamSpec(
                    role=Role.NORM_GAIN, axes=("layers", "head_dim"), in_block=True, of=of
                )
                specs[f"block.attention.{name}_norm.gain"] = gain
        for name in ("block.attention_norm", "block.mlp_norm", "norm"):
            block = name.startswith("block.")
            axes = ("layers", "embed") if block else ("embed",)
            if self.norm_gain:
                specs[f"{name}.gain"] = ParamSpec(role=Role.NORM_GAIN, axes=axes, in_block=block)
            if self.bias and self.norm == "layernorm":
                specs[f"{name}.bias"] = ParamSpec(
                    role=Role.BIAS, axes=axes, in_block=block, of=Role.NORM_GAIN
                )
        return specs

    def factors(self) -> dict[str, FactorSpec]:
        """Scales of attention logits, N^-1/2 until a preset sets them, and of both additions of every block."""
        return {
            "block.attention.logit_scale": FactorSpec(
                kind="logits", shape=(self.depth,), value=self.heads_dim**-0.5
            ),
            "block.skip": FactorSpec(kind="skip", shape=(self.depth, 2)),
            "block.branch": FactorSpec(kind="branch", shape=(self.depth, 2)),
        }

    def attention_flops(self) -> float:
        """q.k and the sum of values. A causal position attends to half of the context on average and is counted so."""
        length = self.sizes()["position"]

        def attended(sight: AttentionSpec) -> float:
            if sight.window is not None and sight.window < length:
                return sight.window - sight.window**2 / (2 * length)
            return length / 2 if self.causal else length

        layers = [
            self.depth // len(self.attention_specs) + (i < self.depth % len(self.attention_specs))
            for i in range(len(self.attention_specs))
        ]
        each = self.heads_dim + (self.value_dim or self.heads_dim)
        positions = sum(
            attended(sight) * count
            for sight, count in zip(self.attention_specs, layers, strict=True)
        )
        return 2 * positions * self.num_heads * each * (length // self.units)


def transformer(model: ModelConfig, what: str) -> TransformerConfig:
    """The model, where it is a transformer of the zoo, whose heads and MLP a function must know.

    Args:
        model: of any family.
        what: is for transformers only; begins the message.

    Raises:
        ConfigError: it is another family's.
    """
    if not isinstance(model, TransformerConfig):
        raise ConfigError(
            f"{what} knows the zoo's transformers only, and the model is a {model.family}"
        )
    return model
