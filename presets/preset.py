"""`Preset`: one table of rules, evaluated at sizes into numbers for every parameter.

The algebra is abc-parametrization (Yang & Hu, Tensor Programs IV): a parameter acts as multiplier * w, starts with
std init_std, and trains at lr. `Rule.moved` is its symmetry; everything else is evaluation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from presets.roles import EMBEDDINGS, VECTORS, ParamSpec, PresetError, Role
from presets.scaling import ONE, Power

Form = Literal["readout-multiplier", "plain"]
Decay = Literal["coupled", "independent"]

FAMILIES = {"adam": "adam", "adamw": "adam", "sgd": "sgd", "momentum": "sgd"}
"""Optimizer name to the column of rules it follows. Heavy-ball momentum without dampening scales as SGD."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scales:
    """Numbers for one parameter. `lr`, `eps`, `weight_decay` multiply the optimizer's; `init_std` is absolute."""

    multiplier: float
    init_std: float
    lr: float
    eps: float
    weight_decay: float

    def times(self, other: Scales) -> Scales:
        return Scales(**{f.name: getattr(self, f.name) * getattr(other, f.name) for f in dataclasses.fields(self)})

    def over(self, other: Scales) -> Scales:
        """Columnwise ratio; where both are 0 (a bias' std, a decay that is off) the ratio is 1."""
        pairs = {f.name: (getattr(self, f.name), getattr(other, f.name)) for f in dataclasses.fields(self)}
        return Scales(**{name: 1.0 if a == b == 0 else a / b for name, (a, b) in pairs.items()})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """One row of a preset's table: how each column scales, as power laws."""

    multiplier: Power = ONE
    init_std: Power = ONE
    sgd: Power = ONE
    adam: Power = ONE
    eps: Power = ONE
    decays: bool = True

    def lr(self, family: str) -> Power:
        return {"sgd": self.sgd, "adam": self.adam}[family]

    def moved(self, theta: Power) -> Rule:
        """The same training with multiplier theta times larger: std/theta, SGD lr/theta^2, Adam lr/theta, eps*theta."""
        return dataclasses.replace(
            self,
            multiplier=self.multiplier * theta,
            init_std=self.init_std / theta,
            sgd=self.sgd / theta**2,
            adam=self.adam / theta,
            eps=self.eps * theta,
        )

    def factors(self, ratios: Mapping[str, float], family: str, decay: Decay) -> Scales:
        lr = self.lr(family)(ratios)
        # lr * wd stays fixed under coupled decay (w -= lr*wd*w); independent decay (w -= wd*w) needs no factor.
        wd = (1.0 / lr if decay == "coupled" else 1.0) if self.decays else 0.0
        return Scales(
            multiplier=self.multiplier(ratios),
            init_std=self.init_std(ratios),
            lr=lr,
            eps=self.eps(ratios) if family == "adam" else 1.0,
            weight_decay=wd,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preset:
    """A parameterization at a base size. Made by `presets.get`.

    Attributes:
        name: as given to `presets.get`.
        rule: the table, one `Rule` per spec, in the preset's native form.
        native_form: the form `rule` is written in.
        form: where the readout's scale sits; changes numbers, never training.
        readout_multiplier: the readout's multiplier in readout-multiplier form.
        logits: scale of attention logits relative to N_base^-1/2.
        branch: scale of every residual branch.
        base: size of each axis at which every factor is 1; None is the absolute form (base 1 everywhere).
        constants: per `ParamSpec.group`, base values that replace the defaults (tuned, or an absolute form's).
        zero_readout: start the readout at zero.
        given: the constants this preset was made with, for printing.
    """

    name: str
    rule: Callable[[ParamSpec], Rule]
    native_form: Form
    form: Form
    readout_multiplier: Power
    logits: Power
    branch: Power
    base: Mapping[str, int] | None = None
    constants: Mapping[str, Scales] = dataclasses.field(default_factory=dict)
    zero_readout: bool = False
    given: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def row(self, spec: ParamSpec) -> Rule:
        """The spec's rule in this preset's form.

        Raises:
            PresetError: plain form with a tied readout, which has no std of its own to carry the scale.
        """
        rule = self.rule(spec)
        if spec.role is not Role.READOUT or self.form == self.native_form:
            return rule
        if spec.tied:
            raise PresetError(
                f"{self.name}: a tied readout has no {self.form} form, its table is the token embedding's; "
                f"write form {self.native_form!r} or untie it"
            )
        target = self.readout_multiplier if self.form == "readout-multiplier" else ONE
        return rule.moved(target / rule.multiplier)

    def base_size(self, name: str, sizes: Mapping[str, int]) -> int:
        """Base of an axis: 1 in the absolute form, the axis' own size where the base does not name it (finite)."""
        if self.base is None:
            return 1
        if name in self.base:
            return self.base[name]
        return self._size(name, sizes)

    def ratios(self, sizes: Mapping[str, int]) -> dict[str, float]:
        """m_axis = size / base size of every axis in `sizes`; 1 for an axis the base does not name."""
        return {name: size / self.base_size(name, sizes) for name, size in sizes.items()}

    def factors(self, spec: ParamSpec, sizes: Mapping[str, int], optimizer: str = "adam", decay: Decay = "coupled") -> Scales:
        """Factors relative to the base: exactly 1 at base size (0 for a decay that is off). Arguments as `scales`."""
        if optimizer not in FAMILIES:
            raise PresetError(f"{self.name} has no rule for the optimizer {optimizer!r}; it has one for {', '.join(FAMILIES)}")
        return self.row(spec).factors(self.ratios(sizes), FAMILIES[optimizer], decay)

    def scales(self, spec: ParamSpec, sizes: Mapping[str, int], optimizer: str = "adam", decay: Decay = "coupled") -> Scales:
        """Numbers for one parameter at these sizes.

        Args:
            spec: the parameter's declaration.
            sizes: size of every logical axis of the model.
            optimizer: adam, adamw, sgd or momentum.
            decay: coupled (w -= lr*wd*w) or independent (w -= wd*w, following the schedule).

        Raises:
            PresetError: no rule for the optimizer, or a size that the rule needs is missing.
        """
        return self.base_constants(spec, sizes).times(self.factors(spec, sizes, optimizer, decay))

    def base_constants(self, spec: ParamSpec, sizes: Mapping[str, int]) -> Scales:
        """Values at base size: fan_in^-1/2 for matrices, 1 for embeddings and gains, 0 for biases; D_in^-1/2 on patches.

        A tied readout has the embedding's std 1, so its fan_in^-1/2 sits in the multiplier.
        """
        if spec.group in self.constants:
            return self.constants[spec.group]
        root = 1.0
        for name in spec.fan_in:
            root *= self.base_size(name, sizes) ** -0.5
        on_multiplier = spec.role in EMBEDDINGS or spec.tied
        std = 0.0 if spec.role is Role.BIAS or (spec.role is Role.READOUT and self.zero_readout and not spec.tied) else 1.0
        return Scales(
            multiplier=root if on_multiplier else 1.0,
            init_std=std if on_multiplier or spec.role in VECTORS else std * root,
            lr=1.0,
            eps=1.0,
            weight_decay=1.0,
        )

    def logit_scale(self, sizes: Mapping[str, int]) -> float:
        """What attention logits k.q are multiplied by: N_base^-1/2 at base size, N^-1/2 under `sp`."""
        return self.base_size("head_dim", sizes) ** -0.5 * self.logits(self.ratios(sizes))

    def residual_scale(self, sizes: Mapping[str, int], layer: int, branch: Literal["attention", "mlp"]) -> tuple[float, float]:
        """(skip, branch) multipliers of one residual addition: h <- skip * h + branch * f(norm(h))."""
        del layer, branch  # uniform over depth in every family here; presets that are not read them
        return 1.0, self.branch(self.ratios(sizes))

    def with_form(self, form: Form) -> Preset:
        """The same training with the readout's scale in another place."""
        return dataclasses.replace(self, form=form)

    def relative_to(
        self, base: Mapping[str, int], specs: Iterable[ParamSpec], optimizer: str = "adam", decay: Decay = "coupled"
    ) -> Preset:
        """An absolute preset as a relative one: the same numbers at every size, its base constants the absolute factors.

        Args:
            base: the new base sizes, every axis that the rules name.
            specs: the parameters whose base constants the new preset must carry.
        """
        if self.base is not None:
            raise PresetError(f"{self.name} is already relative to {dict(self.base)}; start from base=None")
        ratios = self.ratios(base)
        relative = dataclasses.replace(
            self,
            base=dict(base),
            logits=Power(self.logits(ratios) * base["head_dim"] ** 0.5, self.logits.exponents),
            branch=Power(self.branch(ratios), self.branch.exponents),
        )
        constants = {
            spec.group: self.scales(spec, base, optimizer, decay).over(relative.factors(spec, base, optimizer, decay))
            for spec in specs
        }
        return dataclasses.replace(relative, constants=constants)

    def cautions(self, sizes: Mapping[str, int]) -> list[str]:
        """Growth the table was not derived for, one sentence each: F/D or H/H_kv differing from the base's."""
        m = self.ratios(sizes)
        found = []
        if self.base is None or not {"embed", "mlp", "heads", "kv_heads"} <= m.keys():
            return found
        if abs(m["mlp"] / m["embed"] - 1) > 0.01:
            found.append(f"mlp/embed is {m['mlp'] / m['embed']:.3g} times the base's; rates hold, transfer is not proved")
        if abs(m["heads"] / m["kv_heads"] - 1) > 0.01:
            found.append(f"heads/kv_heads is {m['heads'] / m['kv_heads']:.3g} times the base's; transfer is not proved")
        return found

    def describe(self) -> str:
        """One line: name, constants, form and base."""
        constants = " ".join(f"{key}={value:g}" for key, value in self.given.items())
        base = "absolute" if self.base is None else "base " + " ".join(f"{k}={v}" for k, v in self.base.items())
        return ", ".join(part for part in (f"{self.name} {constants}".strip(), self.form, base) if part)

    @staticmethod
    def _size(name: str, sizes: Mapping[str, int]) -> int:
        if name not in sizes:
            raise PresetError(f"axis {name!r} has no size; the sizes given are {dict(sizes)}")
        return sizes[name]

