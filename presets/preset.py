"""`Preset`: one table of rules, evaluated at sizes into numbers for every parameter."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping

from mupax.presets.optimizers import OPTIMIZERS, Family, refused
from mupax.presets.roles import (
    ADAPTERS,
    EMBEDDINGS,
    FOLLOWS,
    OWN,
    RANK,
    VECTORS,
    ZERO,
    Branch,
    ParamSpec,
    PresetError,
    Role,
    Stack,
)
from mupax.presets.rule import FORMS, ONE, Decay, Form, Power, Rule, Scales, product, theta


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preset:
    """A parameterization at a base size. Made by `presets.get`.

    Attributes:
        name: as given to `presets.get`.
        rule: the table, one `Rule` per spec, in the preset's native form.
        logits: scale of attention logits relative to N_base^-1/2.
        branch: scale of every residual branch (with `residual`: how it scales in the sizes).
        native_form: the form of the source's table.
        form: where multipliers sit; changes numbers, never training. None is the native form.
        residual: (blocks, layer, branch, branches of a block) -> (skip, branch scale), for a rule that differs over depth.
        no_rule: optimizer families that the source has no rule for, and why.
        baseless: the source's numbers are absolute, and there is no relative form.
        base: size of each axis at which every factor is 1; None is the absolute form (base 1 everywhere).
        zero_readout: start the readout at zero.
        key_as_query: keys start as the queries' matrix (`choices`: key_start).
        muon_rms: entries of Muon's steps are 0.2 at the base, in place of their spectral norm 1 (`choices`: muon_scale).
        constants: of parameter groups (`constants`): COLUMN.GROUP to a factor.
        choices: all constants this preset was made with, for printing.
        warnings: what its source chose that a user should know, one sentence each.
        vanishing: what the source lets vanish as sizes grow, and how fast (`mupax.presets.analysis.health` judges by it):
            "features" (a lazy limit), "attention" (logits at initialization: heads collapse), "movement/GROUP" or "eps/GROUP".
        uneven: eps follows the gradients also where F/D, N*H/D or H/H_kv grows.
        by_gradients: SGD's rates and eps follow the size of gradients; False of `sp`, which has one of each for all.
    """

    name: str
    rule: Callable[[ParamSpec], Rule]
    logits: Power
    branch: Power = ONE
    native_form: Form = "plain"
    form: Form | None = None
    residual: Callable[[int, int, Branch, tuple[Branch, ...]], tuple[float, float]] | None = None
    no_rule: Mapping[Family, str] = dataclasses.field(default_factory=dict)
    baseless: bool = False
    base: Mapping[str, int] | None = None
    zero_readout: bool = False
    key_as_query: bool = False
    muon_rms: bool = False
    constants: Mapping[str, float] = dataclasses.field(default_factory=dict)
    choices: Mapping[str, float | str] = dataclasses.field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    vanishing: Mapping[str, Power] = dataclasses.field(default_factory=dict)
    uneven: bool = False
    by_gradients: bool = True

    def row(self, spec: ParamSpec) -> Rule:
        """The spec's rule in this preset's form, with the constants of its group.

        Raises:
            PresetError: plain form with a tied readout, which has no std of its own to carry the scale; table-9 without
                an SGD rule to make global.
        """
        if (row := self._rows.get(spec)) is None:
            row = self._rows[spec] = self._formed(spec).with_constants(spec, self.constants)
        return row

    @functools.cached_property
    def _rows(self) -> dict[ParamSpec, Rule]:
        """What `row` has said: theory asks for every one ten times."""
        return {}

    def _table(self, spec: ParamSpec) -> Rule:
        if spec.role not in ADAPTERS:
            return self.rule(spec)
        from mupax.presets import adapters

        return adapters.row(self.rule, spec)

    def _formed(self, spec: ParamSpec) -> Rule:
        if spec.moved_by_loads:  # which are of no size's order
            return Rule(decays=False)
        rule = self._table(spec)
        if spec.blocks != OWN.axis:
            rule = rule.renamed(OWN.axis, spec.blocks)
        if spec.shared and self.by_gradients:
            # Gradients along the shared axes are summed, and align in training as those of heads that share a QK-norm gain do.
            # Adam's steps do not depend on a gradient's size.
            summed = product(spec.shared)
            rule = rule.times(sgd=ONE / summed, eps=summed)
        if self.form is None or self.form == self.native_form:
            return rule
        if self.form == "table-9" and "sgd" in self.no_rule:
            raise PresetError(
                f"{self.name} has no table-9 form: it has no SGD rates to make equal; write form 'plain'"
            )
        if not spec.tied:
            return rule.moved(theta(rule, spec, self.form))
        if self.form == "plain":
            raise PresetError(
                f"{self.name}: a tied readout has no plain form, its table is the token embedding's; "
                f"write form {self.native_form!r} or untie it"
            )
        # The table's rates move with the embedding's theta. The readout's own multiplier stays: it acts on the table as the
        # forward pass sees it, multiplied by theta and divided by it.
        embedding = ParamSpec(role=Role.TOKEN_EMBEDDING, axes=spec.axes)
        moved = rule.moved(theta(self.rule(embedding), embedding, self.form))
        return dataclasses.replace(moved, multiplier=rule.multiplier)

    def base_size(self, name: str, sizes: Mapping[str, int]) -> int:
        """Base of an axis: 1 in the absolute form, the axis' own size where the base does not name it (finite), or it is an adapter's rank.

        Args:
            name: of a logical axis.
            sizes: of every logical axis of the model.
        """
        if name == RANK and name in sizes:
            return sizes[name]
        if self.base is None:
            return 1
        size = self.base.get(name, self.base.get(FOLLOWS.get(name, name), sizes.get(name)))
        if size is None:
            raise PresetError(f"axis {name!r} has no size; the sizes given are {dict(sizes)}")
        return size

    def ratios(self, sizes: Mapping[str, int]) -> dict[str, float]:
        """m_axis = size / base size of every axis in `sizes`; 1 for an axis the base does not name."""
        return {name: size / self.base_size(name, sizes) for name, size in sizes.items()}

    def grows_evenly(self, sizes: Mapping[str, int]) -> bool:
        """Whether embed and mlp grow with the heads or with their dimension alone, as the limits do that the rules are made for."""
        ratios = self.ratios(sizes)
        wide, heads, each = (
            {ratios.get(a, 1) for a in s if a != "mlp" or a in ratios or "experts" not in ratios}
            for s in (("embed", "mlp"), ("heads", "kv_heads"), ("head_dim",))
        )
        return len(wide) == 1 and (heads, each) in ((wide, {1}), ({1}, wide))

    def factors(
        self,
        spec: ParamSpec,
        sizes: Mapping[str, int],
        optimizer: str = "adam",
        decay: Decay = "coupled",
    ) -> Scales:
        """Factors relative to the base: there the constants, or exactly 1 (0 for a decay that is off).

        Args:
            spec: the parameter's declaration.
            sizes: of the model.
            optimizer: one of `optimizers`.
            decay: coupled or independent.
        """
        family = self.family(optimizer)
        return self.row(spec).factors(self.ratios(sizes), self.base or {}, family, decay)

    @property
    def optimizers(self) -> tuple[str, ...]:
        """Names of the optimizers that the preset has a rule for."""
        return tuple(
            name for name, optimizer in OPTIMIZERS.items() if optimizer.family not in self.no_rule
        )

    def family(self, optimizer: str) -> Family:
        """The column of the table that an optimizer follows.

        Raises:
            PresetError: the preset has no rule for it; the text says why where the source does.
        """
        if optimizer in self.optimizers:
            return OPTIMIZERS[optimizer].family
        entry = OPTIMIZERS.get(optimizer)
        name = f"{optimizer!r} ({self.no_rule[entry.family]})" if entry else refused(optimizer)
        raise PresetError(
            f"{self.name} has no rule for the optimizer {name}; it has one for {', '.join(self.optimizers)}"
        )

    def scales(
        self,
        spec: ParamSpec,
        sizes: Mapping[str, int],
        optimizer: str = "adam",
        decay: Decay = "coupled",
    ) -> Scales:
        """Numbers for one parameter at these sizes.

        Args:
            spec: the parameter's declaration.
            sizes: size of every logical axis of the model.
            optimizer: one of `optimizers`.
            decay: coupled (w -= lr*wd*w) or independent (w -= wd*w, following the schedule).

        Raises:
            PresetError: no rule for the optimizer, or a size that the rule needs is missing.
        """
        if not isinstance(spec, ParamSpec):
            raise PresetError(
                f"{spec!r} is no declaration; write ParamSpec(role=Role.QUERY, axes=(...), fan_in=(...))"
            )
        base, factors = self.base_values(spec, sizes), self.factors(spec, sizes, optimizer, decay)
        if (
            self.muon_rms
            and self.family(optimizer) == "muon"
            and self._table(spec).muon is not None
        ):
            fans = (
                math.prod(self.base_size(axis, sizes) for axis in axes)
                for axes in (spec.fan_in, spec.fan_out)
            )
            lr = 0.2 * max(fans) ** 0.5
            base = dataclasses.replace(
                base, lr=lr, weight_decay=1.0 if decay == "independent" else 1 / lr
            )
        return base.times(factors)

    def base_values(self, spec: ParamSpec, sizes: Mapping[str, int]) -> Scales:
        """Values at base size: fan_in^-1/2 for matrices, 1 for embeddings and gains, 0 for biases; D_in^-1/2 on patches.

        A tied readout has the embedding's std 1, so its fan_in^-1/2 sits in the multiplier.

        Args:
            spec: the parameter's declaration.
            sizes: of every logical axis of the model; only the base's count where it has them.
        """
        root = math.prod((self.base_size(name, sizes) ** -0.5 for name in spec.fan_in), start=1.0)
        on_multiplier = spec.role in EMBEDDINGS or spec.tied
        zero = spec.role in ZERO or (
            spec.role is Role.READOUT and self.zero_readout and not spec.tied
        )
        std = 0.0 if zero else self._table(spec).init_constant * spec.start
        return Scales(
            multiplier=root if on_multiplier else 1.0,
            init_std=std if on_multiplier or spec.role in VECTORS else std * root,
        )

    def logit_scale(self, sizes: Mapping[str, int]) -> float:
        """What attention logits k.q are multiplied by: N_base^-1/2 at base size (-1 for keys that start as queries), N^-1/2 under `sp`."""
        root = -1.0 if self.key_as_query else -0.5
        return self.base_size("head_dim", sizes) ** root * self.logits(
            self.ratios(sizes), self.base
        )

    def residual_scale(
        self, sizes: Mapping[str, int], layer: int, branch: Branch, stack: Stack = OWN
    ) -> tuple[float, float]:
        """(skip, branch) multipliers of one residual addition: h <- skip * h + branch * f(norm(h)).

        Args:
            sizes: of the model.
            layer: from 0.
            branch: of the block.
            stack: that the block is of.
        """
        if self.residual is not None:
            return self.residual(sizes[stack.axis], layer, branch, stack.branches)
        return 1.0, self.branch.renamed(OWN.axis, stack.axis)(self.ratios(sizes), self.base)

    def with_logits(self, logits: Power) -> Preset:
        """Return the same table with another scale of attention logits."""
        preset = dataclasses.replace(self, logits=logits)
        preset._rows.update(self._rows)  # no row depends on this scale
        return preset

    def with_form(self, form: Form) -> Preset:
        """The same training with multipliers in another place; raises PresetError where no form has this name."""
        if form not in FORMS:
            raise PresetError(f"no form is named {form!r}; write {', '.join(map(repr, FORMS))}")
        return dataclasses.replace(self, form=form)

    def cautions(self, sizes: Mapping[str, int], optimizer: str = "adam") -> list[str]:
        """What to know before trusting the table at these sizes: growth it was not derived for, one sentence each.

        Args:
            sizes: of the model.
            optimizer: whose updates.
        """
        m = self.ratios(sizes)
        cautions = list(self.warnings)
        if abs(m.get("active", 1) / m.get("experts", 1) - 1) > 0.01:
            cautions.append(
                f"active/experts is {m['active'] / m['experts']:.3g} times the base's; rules of experts hold at a fixed share"
            )
        if self.base is None or not {"embed", "mlp", "heads", "kv_heads"} <= m.keys():
            return cautions
        for above, below in (("mlp", "embed"), ("heads", "kv_heads")):
            ratio = m[above] / m[below]
            if abs(ratio - 1) > 0.01:
                cautions.append(
                    f"{above}/{below} is {ratio:.3g} times the base's; transfer is not proved"
                )
        alpha_a, family = self.choices.get("alpha_a", 1.0), self.family(optimizer)
        if isinstance(alpha_a, float) and alpha_a < 1 and m["head_dim"] > 1 and family == "sgd":
            cautions.append(
                f"SGD has no stable limit in head_dim at alpha_a={alpha_a:g}: q, k gradients grow once they align"
            )
        if family == "lion":
            cautions.append(
                "Lion follows Adam's rule here, and a study found that it does not transfer (2404.05728)"
            )
        return cautions

    @property
    def label(self) -> str:
        """Name and the constants that are not its defaults."""
        constants = (
            f" {k}={v:g}" if isinstance(v, float) else f" {k}={v}" for k, v in self.choices.items()
        )
        return self.name + "".join(constants)

    def describe(self) -> str:
        """One line: name, constants, form and base."""
        base = (
            "absolute"
            if self.base is None
            else "base " + " ".join(f"{k}={v}" for k, v in self.base.items())
        )
        return f"{self.label}, {self.form or self.native_form}, {base}"
