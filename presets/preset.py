"""`Preset`: a parameterization. It turns a table of rules and a base into values per parameter.

A table has a rule for each role of a parameter, and the base has the sizes at which all factors are
1. `mupax.presets.get` makes a preset. The tables are in `mupax.presets.papers`. `MuonRule` is what
a preset says of the size and the blocks of Muon's steps.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Literal, get_args

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

Scale = Literal["spectral", "rms", "measured"]
Blocks = Literal["matrix", "heads", "heads-unscaled", "tiles"]
Shape = Literal["base", "absolute"]

_ATTENTION = frozenset({Role.QUERY, Role.KEY, Role.VALUE, Role.ATTENTION_OUT})
_HEADS = ("heads", "kv_heads")
_MOONLIGHT_RMS = 0.2
"""Root mean square to which entries of Muon's steps are scaled under `muon_scale` = "rms".

It is that of Adam's steps (Moonlight, Liu et al. 2025, 2502.16982).
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MuonRule:
    """Choices of a preset about the size and the blocks of Muon's steps.

    They are the preset's constants `muon_scale`, `muon_blocks` and `muon_shape`.

    A step of Muon is a matrix of spectral norm 1, times the learning rate. If blocks of the matrix
    are orthogonalized separately, each block has norm 1, and the norm of the matrix is larger.
    Gradients of all blocks share their best input and output directions, so the blocks add up
    coherently. The norm is then the root of their number, and the learning rate is divided by this
    root. (Derived.) With m = size / base size, and H the number of heads of the matrix:

    | blocks                     | number of blocks | learning rate         |
    |----------------------------|------------------|-----------------------|
    | the matrix                 | 1                | (out/in)^1/2          |
    | heads of q, k, v and o     | H                | (out/in)^1/2 H^-1/2   |
    | tiles of the base's size   | m_in m_out       | 1/m_in                |

    A step that is divided by its measured norm has the learning rate of the whole matrix.

    Attributes:
        scale: Size of a step at the base. "spectral" is a spectral norm of 1 if the matrix is one
            block, "rms" is entries with root mean square 0.2, and "measured" is a spectral norm
            that is measured and divided out.
        blocks: Parts of a matrix that are orthogonalized separately. "matrix" is all of it, "heads"
            is each head, "tiles" are blocks of the base's size. "heads-unscaled" is "heads" without
            the factor H^-1/2 on the learning rate.
        shape: "base" if the factor (out/in)^1/2 is relative to the base, where it is then 1.
            "absolute" if it is computed from the sizes themselves.
    """

    scale: Scale = "spectral"
    blocks: Blocks = "matrix"
    shape: Shape = "base"

    def check(self, name: str) -> None:
        """Raise an error for choices that contradict each other.

        Args:
            name: Name of the preset, for the message.

        Raises:
            PresetError: Two choices set one factor.
        """
        if self.scale == "rms" and self.shape == "absolute":
            raise PresetError(
                f"{name}: muon_scale=rms sets the size of steps at the base, and so does "
                "muon_shape=absolute; leave one of them out"
            )
        if self.scale == "measured" and self.blocks == "heads-unscaled":
            raise PresetError(
                f"{name}: muon_scale=measured divides by the norm, whatever the factor of heads; "
                "write muon_blocks=heads"
            )

    @property
    def changes_steps(self) -> bool:
        """True if Muon's compiled step differs from the default: measured norms, or blocks."""
        return self.scale == "measured" or self.blocks != "matrix"

    def block_axes(self, spec: ParamSpec) -> tuple[str, ...]:
        """Return the axes along which a hidden matrix is cut into blocks, empty for a single block.

        Under "tiles" they are all axes of inputs and outputs. Under "heads" they are the axes of
        heads, which only attention's matrices have.
        """
        if self.blocks == "tiles":
            return (*spec.fan_in, *spec.fan_out)
        if self.blocks == "matrix" or spec.role not in _ATTENTION:
            return ()
        return tuple(axis for axis in (*spec.fan_in, *spec.fan_out) if axis in _HEADS)

    def coherence(self, spec: ParamSpec) -> Power:
        """Return the spectral norm of a step of learning rate 1, relative to the base.

        The blocks of the step are assumed to share input and output directions. The norm is then
        the root of the number of blocks. It is 1 if steps are divided by their measured norm.
        """
        if self.scale == "measured":
            return ONE
        return product(self.block_axes(spec)) ** 0.5

    def lr(self, spec: ParamSpec) -> Power:
        """Return the factor on Muon's learning rate that makes up for the number of blocks.

        It is 1 over the root of the number of blocks (`coherence`), or 1 for "heads-unscaled".
        """
        if self.blocks == "heads-unscaled":
            return ONE
        return ONE / self.coherence(spec)

    def base_lr(self, spec: ParamSpec, base_size: Callable[[str], int]) -> float:
        """Return the learning rate of a hidden matrix at the base, relative to the peak.

        It differs from 1 only with the scale "rms" or the shape "absolute".

        Args:
            base_size: Function that returns the base size of an axis.
        """
        sizes = {axis: base_size(axis) for axis in (*spec.fan_in, *spec.fan_out)}
        head_axes: tuple[str, ...] = ()
        # At the base a tile is the whole matrix.
        if self.blocks != "tiles":
            head_axes = self.block_axes(spec)
        num_heads = math.prod(sizes[axis] for axis in head_axes)
        if self.scale == "rms":
            sizes |= dict.fromkeys(head_axes, 1)
        fan_in = math.prod(sizes[axis] for axis in spec.fan_in)
        fan_out = math.prod(sizes[axis] for axis in spec.fan_out)

        if self.scale == "rms":
            # Entries of an orthogonal block have root mean square max(fan_in, fan_out)^-1/2.
            return _MOONLIGHT_RMS * max(fan_in, fan_out) ** 0.5
        if self.shape == "base":
            return 1.0
        lr = (fan_out / fan_in) ** 0.5
        if self.blocks == "heads" and self.scale != "measured":
            lr /= num_heads**0.5
        return lr

    def block(
        self, spec: ParamSpec, sizes: Mapping[str, int], base_size: Callable[[str], int]
    ) -> tuple[int, ...] | None:
        """Return the size of a block along each axis of a matrix, or `None` for the whole matrix.

        Axes that count separate matrices, such as layers, have size 1.

        Args:
            sizes: Size of every logical axis of the model.
            base_size: Function that returns the base size of an axis.

        Raises:
            PresetError: The matrix is not made of whole tiles.
        """
        axes = self.block_axes(spec)
        if not axes:
            return None
        block = []
        for axis in spec.axes:
            size = 1 if axis in spec.copies else sizes[axis]
            if axis in axes:
                size = 1
                if self.blocks == "tiles":
                    size = base_size(axis)
            if axis in axes and sizes[axis] % size:
                raise PresetError(
                    f"muon_blocks=tiles: {axis} is {sizes[axis]}, which is no multiple of the "
                    f"base's {size}; write sizes that are, or muon_blocks=matrix"
                )
            block.append(size)
        return tuple(block)


@dataclasses.dataclass(frozen=True)
class MatrixSteps:
    """Instructions for Muon: blocks of each matrix, and whether norms are measured.

    Attributes:
        measured: Whether every step is divided by its measured spectral norm.
        blocks: Size of a block along each axis, by parameter name. A matrix without an entry is
            orthogonalized as a whole.
        sizes: Size of every logical axis of the model, if `measured`.
    """

    measured: bool = False
    blocks: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)


WHOLE_MATRICES = MatrixSteps()
"""Default of Muon: whole matrices are orthogonalized, and no norms are measured."""


def _check_sizes(sizes: Mapping[str, int]) -> None:
    """Raise `PresetError` for a size that is no finite number above 0."""
    for axis, size in sizes.items():
        is_number = isinstance(size, numbers.Real)
        if not is_number or not math.isfinite(size) or size <= 0:
            raise PresetError(f"the size {axis} is {size!r}; write a number above 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preset:
    """Parameterization relative to a base size. `presets.get` makes one.

    The source of a preset is the paper that its table is from.

    Attributes:
        name: Name as given to `presets.get`.
        rule: Function from a parameter's declaration to its row of the table, in the preset's
            native form.
        logits: Power law of the factor on attention logits, relative to N_base^-1/2 with the head
            dimension N_base of the base.
        branch: Power law of the factor on every residual branch. If `residual` is set, it is used
            instead.
        native_form: Form of the source's table, that is, its placement of multipliers.
        form: Form to use. It changes values and never training. `None` is the native form.
        residual: Function of (number of blocks, layer, branch, branches of a block) that returns
            the pair (skip, branch scale). Only for a source whose scale differs over depth.
        no_rule: Optimizer families for which the source has no rule, each with the reason.
        baseless: Whether the source's values are absolute, so that no base can be set.
        base: Size of each axis at which every factor is 1. `None` is the absolute form, in which
            every base size is 1.
        zero_readout: Whether the readout starts at zero. A tied readout does not.
        key_as_query: Whether the key matrix starts as a copy of the query matrix (constant
            `key_start`).
        muon: Size and blocks of Muon's steps (constants `muon_scale`, `muon_blocks` and
            `muon_shape`).
        constants: Constants of parameter groups, by "COLUMN.GROUP" (`mupax.presets.constants`).
        choices: Constants that the preset was made with, for printing.
        warnings: Choices of the source that a user should know, one sentence each.
        vanishing: Power laws of quantities that the source lets change with size, by name. Names
            are "features" (a lazy limit), "attention" (logits at initialization vanish, so that
            heads collapse), "movement/GROUP" (steps of a group) and "eps/GROUP" (gradient over
            eps). `mupax.presets.analysis.health` reads them.
        uneven: Whether the rules of eps also hold if one width grows alone, so that F/D, N*H/D or
            H/H_kv changes.
        by_gradients: Whether SGD's learning rates and eps follow the size of gradients. `sp` has
            one value of each for all parameters, so there it is false.
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
    muon: MuonRule = dataclasses.field(default_factory=MuonRule)
    constants: Mapping[str, float] = dataclasses.field(default_factory=dict)
    choices: Mapping[str, float | str] = dataclasses.field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    vanishing: Mapping[str, Power] = dataclasses.field(default_factory=dict)
    uneven: bool = False
    by_gradients: bool = True

    def row(self, spec: ParamSpec) -> Rule:
        """Return the rule of a parameter in this preset's form, with the constants of its group.

        The rule is computed once per declaration and cached.

        Raises:
            PresetError: The form is plain and the readout is tied: it has no std of its own to
                carry the scale. Or the form is table-9 and the source has no rule for SGD.
        """
        row = self._rows.get(spec)
        if row is None:
            rule = self._in_form(self._native_row(spec), spec)
            row = rule.with_constants(spec, self.constants)
            self._rows[spec] = row
        return row

    @functools.cached_property
    def _rows(self) -> dict[ParamSpec, Rule]:
        """Cache of `row`: rules by declaration, empty at first."""
        return {}

    def _table(self, spec: ParamSpec) -> Rule:
        """Return a parameter's row in the source's table.

        The row of an adapter is derived from that of the matrix it adapts.
        """
        if spec.role in ADAPTERS:
            # Few runs have adapters: imported only for them.
            from mupax.presets import adapters

            return adapters.row(self.rule, spec)
        return self.rule(spec)

    def _native_row(self, spec: ParamSpec) -> Rule:
        """Return the rule of a parameter in the native form, without the constants of its group.

        An encoder's rule has the axis `encoder_layers` in place of `layers`. A router's bias gets a
        constant rule without decay, because expert loads update it.

        The gradient of a parameter that is broadcast along axes (`spec.shared`) is a sum over them.
        SGD's learning rate is divided by the product of their sizes and eps is multiplied by it.
        This is left out if `by_gradients` is false.
        """
        if spec.moved_by_loads:
            # A router's bias moves by the loads of experts, which do not scale with any size.
            return Rule(decays=False)

        rule = self._table(spec)
        # Rules are written in a decoder's depth, and an encoder's depth is another axis.
        if spec.blocks != OWN.axis:
            rule = rule.renamed(OWN.axis, spec.blocks)
        if spec.shared and self.by_gradients:
            # Gradients along the shared axes are summed, and align in training as the gradients of
            # heads that share a QK-norm gain do. Adam's steps do not depend on a gradient's size.
            summed = product(spec.shared)
            rule = rule.times(sgd=ONE / summed, eps=summed)
        return rule

    def _in_form(self, rule: Rule, spec: ParamSpec) -> Rule:
        """Convert a rule from the native form to the form of this preset.

        Forms differ in where multipliers are placed. The rule of a router's bias is returned
        unchanged.

        Raises:
            PresetError: The readout is tied and the form is "plain", or the form is "table-9" and
                the preset has no rule for SGD.
        """
        if spec.moved_by_loads or self.form is None or self.form == self.native_form:
            return rule
        if self.form == "table-9" and "sgd" in self.no_rule:
            raise PresetError(
                f"{self.name} has no table-9 form: it has no SGD rates to make equal; "
                "write form 'plain'"
            )
        if not spec.tied:
            return rule.moved(theta(rule, spec, self.form))

        if self.form == "plain":
            raise PresetError(
                f"{self.name}: a tied readout has no plain form, "
                "its table is the token embedding's; "
                f"write form {self.native_form!r} or untie it"
            )
        # A tied readout has no array of its own, so its learning rates move with the embedding's
        # theta. Its multiplier stays: the forward pass sees the array multiplied by theta and
        # divided by it.
        embedding = ParamSpec(role=Role.TOKEN_EMBEDDING, axes=spec.axes)
        moved = rule.moved(theta(self.rule(embedding), embedding, self.form))
        return dataclasses.replace(moved, multiplier=rule.multiplier)

    def base_size(self, name: str, sizes: Mapping[str, int]) -> int:
        """Return the base size of an axis.

        An axis that the base does not name has the base size of the axis that it follows
        (`roles.FOLLOWS`), or else its own size, so that it never counts as growing. The rank of an
        adapter has its own size under every base. In the absolute form all other base sizes are 1.

        Args:
            sizes: Size of every logical axis of the model.

        Raises:
            PresetError: Neither the base nor `sizes` has the axis.
        """
        # Checked first: the rank of an adapter does not grow, even if the base names it.
        if name == RANK and name in sizes:
            return sizes[name]
        if self.base is None:
            return 1

        followed = FOLLOWS.get(name, name)
        if name in self.base:
            return self.base[name]
        if followed in self.base:
            return self.base[followed]
        if name in sizes:
            return sizes[name]
        raise PresetError(f"axis {name!r} has no size; the sizes given are {dict(sizes)}")

    def ratios(self, sizes: Mapping[str, int]) -> dict[str, float]:
        """Return size / base size of every axis in `sizes`, by axis.

        It is 1 for an axis that has its own size as base size (`base_size`).
        """
        return {name: size / self.base_size(name, sizes) for name, size in sizes.items()}

    def grows_evenly(self, sizes: Mapping[str, int]) -> bool:
        """Return whether the model's widths grow from the base as the rules were derived for.

        This is so if embed and mlp grow by one ratio, and so do either the heads (query and
        key-value heads alike) or head_dim, while the other one stays. `mlp` is not compared if the
        model has experts and no MLP.
        """
        ratios = self.ratios(sizes)
        width = ratios.get("embed", 1)
        mlp = ratios.get("mlp", 1)
        if "mlp" not in ratios and "experts" in ratios:
            # Every block has experts in place of an MLP.
            mlp = width
        if mlp != width:
            return False

        heads = {ratios.get("heads", 1), ratios.get("kv_heads", 1)}
        head_dim = ratios.get("head_dim", 1)
        more_heads = heads == {width} and head_dim == 1
        larger_heads = heads == {1} and head_dim == width
        return more_heads or larger_heads

    def scales(
        self,
        spec: ParamSpec,
        sizes: Mapping[str, int],
        optimizer: str = "adam",
        decay: Decay = "coupled",
    ) -> Scales:
        """Return the values that a parameter gets at these sizes: multiplier, std, lr and so on.

        They are the values at the base times the factors of the preset's rule. In `Scales`, lr, eps
        and weight decay are factors on the optimizer's own settings.

        Args:
            sizes: Size of every logical axis of the model.
            optimizer: Name in `Preset.optimizers`.
            decay: "coupled" (w -= lr * wd * w) or "independent" (w -= wd * w, where wd follows the
                schedule).

        Raises:
            PresetError: There is no rule for the optimizer, `decay` is another text, or a size that
                the rule needs is missing or no number above 0.
        """
        if not isinstance(spec, ParamSpec):
            raise PresetError(
                f"{spec!r} is no declaration; "
                "write ParamSpec(role=Role.QUERY, axes=(...), fan_in=(...))"
            )
        _check_sizes(sizes)
        if decay not in get_args(Decay):
            raise PresetError(f"decay is {decay!r}; write {' or '.join(get_args(Decay))}")
        base_values = self.base_values(spec, sizes)
        factors = self.factors(spec, sizes, optimizer, decay)

        has_own_size = self.muon.scale == "rms" or self.muon.shape == "absolute"
        on_muon = has_own_size and self.family(optimizer) == "muon"
        # Embeddings, vectors and the readout stay on Adam, whose steps have no such size.
        if on_muon and self._table(spec).muon is not None:
            lr = self.muon.base_lr(spec, lambda axis: self.base_size(axis, sizes))
            # Coupled decay subtracts lr * wd of w. The division by lr keeps this share of w.
            weight_decay = 1.0 if decay == "independent" else 1 / lr
            base_values = dataclasses.replace(base_values, lr=lr, weight_decay=weight_decay)
        return base_values.times(factors)

    def factors(
        self,
        spec: ParamSpec,
        sizes: Mapping[str, int],
        optimizer: str = "adam",
        decay: Decay = "coupled",
    ) -> Scales:
        """Return the factors by which a parameter's values differ from those at the base.

        At base size each factor is the constant of the parameter's group, which is exactly 1 unless
        set. A weight decay that does not apply is 0.

        Args:
            sizes: Size of every logical axis of the model.
            optimizer: Name in `Preset.optimizers`.
            decay: "coupled" or "independent", as in `scales`.

        Raises:
            PresetError: There is no rule for the optimizer, or a size that the rule needs is
                missing.
        """
        family = self.family(optimizer)
        ratios = self.ratios(sizes)
        return self.row(spec).factors(ratios, self.base or {}, family, decay)

    def base_values(self, spec: ParamSpec, sizes: Mapping[str, int]) -> Scales:
        """Return the multiplier and initial std of a parameter at base size.

        Matrices start with std fan_in^-1/2, embeddings and gains with 1, biases and `LORA_B` with
        0. Patch embeddings have std 1 and the multiplier fan_in^-1/2, and so does a tied readout. A
        readout with its own array starts at 0 under `zero_readout`. The std is multiplied by the
        source's constant (`Rule.init_constant`) and, for a gain, by `ParamSpec.start`.

        Args:
            sizes: Size of every logical axis of the model. It is read only for axes that the base
                does not name.
        """
        root = math.prod((self.base_size(name, sizes) ** -0.5 for name in spec.fan_in), start=1.0)
        # A tied readout has the embedding's std 1, so its fan_in^-1/2 sits in the multiplier.
        on_multiplier = spec.role in EMBEDDINGS or spec.tied

        # A tied readout cannot start at zero: its array is the table of the embedding.
        zero_readout = spec.role is Role.READOUT and self.zero_readout and not spec.tied
        if spec.role in ZERO or zero_readout:
            std = 0.0
        else:
            std = self._table(spec).init_constant * spec.start

        if on_multiplier:
            return Scales(multiplier=root, init_std=std)
        if spec.role in VECTORS:
            return Scales(init_std=std)
        return Scales(init_std=std * root)

    def matrix_steps(
        self, specs: Mapping[str, ParamSpec], sizes: Mapping[str, int], optimizer: str
    ) -> MatrixSteps:
        """Return how Muon treats each matrix: its blocks, and whether its norm is measured.

        The result is `WHOLE_MATRICES`, Muon's default, for an optimizer of another family.

        Args:
            specs: Declarations by parameter name. `MatrixSteps.blocks` has the same names.
            sizes: Size of every logical axis of the model.
            optimizer: Name in `Preset.optimizers`.

        Raises:
            PresetError: A matrix is not made of whole tiles, or the preset has no base to take
                their size from.
        """
        if self.family(optimizer) != "muon" or not self.muon.changes_steps:
            return WHOLE_MATRICES
        if self.muon.blocks == "tiles" and self.base is None:
            raise PresetError(
                "muon_blocks=tiles has tiles of the base's size, and there is no base; "
                "write --preset.base MODEL"
            )
        blocks = {}
        for name, spec in specs.items():
            # A parameter that Muon leaves to Adam has no blocks.
            if self._table(spec).muon is None:
                continue
            block = self.muon.block(spec, sizes, lambda axis: self.base_size(axis, sizes))
            if block is not None:
                blocks[name] = block
        if self.muon.scale == "measured":
            return MatrixSteps(measured=True, blocks=blocks, sizes=dict(sizes))
        return MatrixSteps(blocks=blocks)

    def logit_scale(self, sizes: Mapping[str, int]) -> float:
        """Return the factor on attention logits q.k.

        At base size, with head dimension N_base, it is the coefficient of `logits` times
        N_base^-1/2. If keys start as copies of queries, it is the coefficient times N_base^-1.
        """
        # k.q is of size N^1/2 for independent vectors and of size N for equal ones.
        exponent = -1.0 if self.key_as_query else -0.5
        base_scale = self.base_size("head_dim", sizes) ** exponent
        return base_scale * self.logits(self.ratios(sizes), self.base)

    def residual_scale(
        self, sizes: Mapping[str, int], layer: int, branch: Branch, stack: Stack = OWN
    ) -> tuple[float, float]:
        """Return (skip, branch) of one residual addition: h <- skip * h + branch * f(norm(h)).

        Args:
            sizes: Size of every logical axis of the model.
            layer: Index of the block, from 0.
            branch: Branch of the block, such as "mlp".
            stack: Stack that the block is in. The default is the stack of most models.
        """
        if self.residual is not None:
            return self.residual(sizes[stack.axis], layer, branch, stack.branches)
        # The law is written in the decoder's depth, and an encoder's depth is another axis.
        law = self.branch.renamed(OWN.axis, stack.axis)
        return 1.0, law(self.ratios(sizes), self.base)

    @property
    def optimizers(self) -> tuple[str, ...]:
        """Names of the optimizers that the preset has a rule for."""
        names = []
        for name, optimizer in OPTIMIZERS.items():
            if optimizer.family not in self.no_rule:
                names.append(name)
        return tuple(names)

    def family(self, optimizer: str) -> Family:
        """Return the optimizer's family, which decides the columns of the table that apply.

        Raises:
            PresetError: The preset has no rule for the optimizer. The message has the source's
                reason.
        """
        if optimizer in self.optimizers:
            return OPTIMIZERS[optimizer].family

        if optimizer in OPTIMIZERS:
            reason = self.no_rule[OPTIMIZERS[optimizer].family]
            name = f"{optimizer!r} ({reason})"
        else:
            name = refused(optimizer)
        raise PresetError(
            f"{self.name} has no rule for the optimizer {name}; "
            f"it has one for {', '.join(self.optimizers)}"
        )

    def with_logits(self, logits: Power) -> Preset:
        """Return a copy of the preset with another power law for the factor on attention logits.

        `logit_scale` evaluates the law.
        """
        # `_rows` is no field of the dataclass, so `replace` starts with an empty one.
        preset = dataclasses.replace(self, logits=logits)
        # No row depends on the scale of the logits, so the computed rows stay valid.
        preset._rows.update(self._rows)
        return preset

    def with_form(self, form: Form) -> Preset:
        """Return a copy of the preset in another form, which trains the same.

        A form says where factors are kept, in the weights or in their multipliers.

        Raises:
            PresetError: `form` is none of `FORMS`.
        """
        if form not in FORMS:
            raise PresetError(f"no form is named {form!r}; write {', '.join(map(repr, FORMS))}")
        return dataclasses.replace(self, form=form)

    def cautions(self, sizes: Mapping[str, int], optimizer: str = "adam") -> list[str]:
        """Return what to know before trusting the preset at these sizes, one sentence each.

        Sentences are the source's `warnings` and growth for which the rules were not derived. In
        the absolute form, or if `sizes` lacks embed, mlp, heads or kv_heads, only the warnings and
        the share of active experts are covered.

        Args:
            sizes: Size of every logical axis of the model.
            optimizer: Name in `Preset.optimizers`.
        """
        ratios = self.ratios(sizes)
        cautions = list(self.warnings)
        active_share = ratios.get("active", 1) / ratios.get("experts", 1)
        if abs(active_share - 1) > 0.01:
            cautions.append(
                f"active/experts is {active_share:.3g} times the base's; "
                "rules of experts hold at a fixed share"
            )
        if self.base is None or not {"embed", "mlp", "heads", "kv_heads"} <= ratios.keys():
            return cautions

        for numerator, denominator in (("mlp", "embed"), ("heads", "kv_heads")):
            ratio = ratios[numerator] / ratios[denominator]
            if abs(ratio - 1) > 0.01:
                cautions.append(
                    f"{numerator}/{denominator} is {ratio:.3g} times the base's; "
                    "transfer is not proved"
                )

        family = self.family(optimizer)
        alpha_a = self.choices.get("alpha_a", 1.0)
        # Gradients of aligned queries and keys grow as N^(1 - alpha_a), and no source has a rule.
        below_one = isinstance(alpha_a, float) and alpha_a < 1
        if below_one and ratios["head_dim"] > 1 and family == "sgd":
            cautions.append(
                f"SGD has no stable limit in head_dim at alpha_a={alpha_a:g}: "
                "q, k gradients grow once they align"
            )
        if family == "lion":
            cautions.append(
                "Lion follows Adam's rule here, and a study found that it does not transfer "
                "(2404.05728)"
            )
        return cautions

    @property
    def label(self) -> str:
        """Name and choices, such as "mup alpha_a=1"."""
        words = [self.name]
        for name, value in self.choices.items():
            text = str(value)
            if isinstance(value, float):
                text = f"{value:g}"
            words.append(f"{name}={text}")
        return " ".join(words)

    def describe(self) -> str:
        """Return one line with name, choices, form and base."""
        if self.base is None:
            base = "absolute"
        else:
            sizes = [f"{name}={size}" for name, size in self.base.items()]
            base = "base " + " ".join(sizes)
        return f"{self.label}, {self.form or self.native_form}, {base}"
