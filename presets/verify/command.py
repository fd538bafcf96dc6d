"""Command `mupax verify`: say which parameter of other code is wrong, what follows, what to write.

`MISTAKES` lists mistakes that others have made and written about. The findings do not depend on
the list. A finding that looks like one of these mistakes also says where it usually comes from.
"""

from __future__ import annotations

import dataclasses
import itertools
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from tyro import conf

from mupax import command_line, presets, terminal
from mupax.command_line import Place, Repeated, Switch
from mupax.presets import read_constants
from mupax.presets.analysis.batch_command import print_json
from mupax.presets.analysis.verdicts import cell
from mupax.presets.optimizers import OPTIMIZERS, Family
from mupax.presets.roles import PresetError, Role
from mupax.presets.rule import Decay
from mupax.presets.verify import axes, differences, fit, formats, names, reference
from mupax.presets.verify.differences import BRANCH, LOGITS, TIED
from mupax.presets.verify.findings import Observables, consequences_of_all, findings
from mupax.presets.verify.fit import GrowthSeries
from mupax.presets.verify.formats.dump import Column, Dump
from mupax.presets.verify.sentences import Finding


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mistake:
    """Mistake that others have made and written about, with a test that recognizes it.

    Attributes:
        name: Name in a few words.
        text: Sentence, without a period, on where the mistake comes from and what to do.
        source: Place where the mistake is described.
        fits: Function that returns whether a finding shows the mistake. It takes the finding, the
            user's models and the optimizer's family.
        alone: Whether the mistake makes only one kind of value wrong. If so, it is not recognized
            when the findings have faults in several kinds, such as rate and start.
    """

    name: str
    text: str
    source: str
    fits: Callable[[Finding, GrowthSeries, Family], bool]
    alone: bool = False


EQUAL_RATES = 1e-4
"""Relative difference up to which two learning rates are equal.

It is far above float32's 1e-7 and far below any difference that a rule makes."""


def _near(finding: Finding, exponent: float) -> bool:
    return abs(finding.excess - exponent) < 0.15


def _stays(finding: Finding) -> bool:
    """Return whether the value has one size at every size of the model."""
    return finding.slope is not None and abs(finding.slope) < fit.TOLERANCE


def _one_rate(line: GrowthSeries) -> bool:
    """Return whether all parameters of each model have the same learning rate.

    Rates are compared with the tolerance `EQUAL_RATES`. They are means over layers, and a float32
    may have rounded them.

    Args:
        line: Models of the user's code. The common rate may differ between them.
    """
    for model in line.models:
        rates = []
        for parameter in model.parameters.values():
            if parameter.entry.lr is not None:
                rates.append(parameter.entry.lr)
        if not rates or max(rates) > min(rates) * (1 + EQUAL_RATES):
            return False
    return True


def _is_vector(finding: Finding) -> bool:
    return "bias" in finding.role or "gain" in finding.role


def _is_hidden(finding: Finding) -> bool:
    """Return whether a finding is about matrices in blocks or hidden matrices.

    It is false for their gains and biases.
    """
    in_block = finding.role.startswith(("block.", "matrices", "hidden"))
    return in_block and not _is_vector(finding)


def _is_embedding(finding: Finding) -> bool:
    return finding.role in ("token_embedding", "position", "patch_embedding")


MISTAKES = (
    Mistake(
        name="scheduler overwrites group rates",
        text=(
            "Every parameter has one learning rate: a scheduler that sets the rate of all groups "
            "to its own undoes those of the groups; let it multiply what each group has"
        ),
        source="microsoft/mup, README, Current Limitations; DeepSpeed issue 7713",
        fits=lambda finding, line, family: (
            finding.what == "rate"
            and _is_hidden(finding)
            and finding.excess > 0.4
            and _one_rate(line)
            and line.word != "depth"
        ),
        alone=True,
    ),
    Mistake(
        name="tied readout without its multiplier",
        text=(
            "A readout that is the embedding's table has no std and no rate of its own: 1/m has "
            "to be on its output (MuSharedReadout)"
        ),
        source="Tensor Programs V, Table 8; microsoft/mup, README",
        fits=lambda finding, line, family: (
            finding.names[0] == TIED and finding.what == "multiplier" and finding.excess > 0.4
        ),
    ),
    Mistake(
        name="tied table rescaled as a readout",
        text=(
            "A table that is both is rescaled for the readout, and the embedding grows with it; "
            "its std is to stay"
        ),
        source="microsoft/mup, issue 55",
        fits=lambda finding, line, family: (
            finding.role == "token_embedding" and finding.what == "start" and _near(finding, 0.5)
        ),
    ),
    Mistake(
        name="Muon scaled twice",
        text="An orthogonalized update has the size of its matrix already; 1/m is Adam's",
        source="NVIDIA/Megatron-LM, pull request 3715; karpathy/nanochat, pull request 644",
        fits=lambda finding, line, family: (
            family == "muon"
            and finding.what == "rate"
            and _is_hidden(finding)
            and finding.excess < -0.4
        ),
    ),
    Mistake(
        name="readout's rate without 1/m",
        text=(
            "In the form of Table 3, with the scale in the std, the readout's rate falls as "
            "well; with a multiplier (Table 8) it does not"
        ),
        source="microsoft/mup, issue 7; mlfoundations/open_lm, pull request 25",
        fits=lambda finding, line, family: (
            finding.role == "readout"
            and finding.what == "rate"
            and family != "sgd"
            and _near(finding, 1.0)
        ),
    ),
    Mistake(
        name="readout scaled twice",
        text="The multiplier and the rate both have 1/m; one of them is enough",
        source="EleutherAI/gpt-neox, pull request 1087",
        fits=lambda finding, line, family: (
            finding.role == "readout"
            and finding.what in ("rate", "multiplier")
            and finding.excess < -0.4
        ),
    ),
    Mistake(
        name="attention by 1/sqrt(d)",
        text="Queries and keys align in training, and q.k grows as d, not as its root",
        source="Tensor Programs V, Definition 4.1; microsoft/mup, README",
        fits=lambda finding, line, family: finding.names[0] == LOGITS and finding.excess > 0.3,
    ),
    Mistake(
        name="embedding as a hidden matrix",
        text=(
            "A table is looked up and not summed over: its fan-in does not grow, and its rate is "
            "to stay"
        ),
        source="microsoft/mup, issue 48; 2506.15025",
        # A rate that falls as width^-1/2 is a caution, which has sources of its own.
        fits=lambda finding, line, family: (
            _is_embedding(finding)
            and finding.severity == "fault"
            and finding.what == "rate"
            and finding.excess < -0.4
            and family != "sgd"
        ),
    ),
    Mistake(
        name="init not rescaled",
        text=(
            "One std for every width, such as 0.02; under muP it belongs to the base, and falls "
            "as 1/sqrt(m)"
        ),
        source="Tensor Programs V, Table 3; EleutherAI/nanoGPT-mup, coordinate check `sp`",
        fits=lambda finding, line, family: (
            finding.what == "start"
            and _is_hidden(finding)
            and _near(finding, 0.5)
            and _stays(finding)
        ),
    ),
    Mistake(
        name="std divided by m",
        text="The variance falls as 1/m, the standard deviation as 1/sqrt(m)",
        source="EleutherAI/gpt-neox, pull request 1087",
        fits=lambda finding, line, family: (
            finding.what == "start"
            and _is_hidden(finding)
            and _near(finding, -0.5)
            and line.word != "depth"
        ),
    ),
    Mistake(
        name="gains and biases as hidden matrices",
        text="Gains and biases multiply one entry each: as vectors their rate is to stay",
        source="microsoft/mup, issues 12 and 57",
        fits=lambda finding, line, family: (
            finding.what == "rate"
            and _is_vector(finding)
            and finding.excess < -0.4
            and family != "sgd"
            and line.word != "depth"
        ),
    ),
    Mistake(
        name="decay fades with the rate",
        text=(
            "In AdamW w falls by lr*wd*w: where the rate has 1/m, wd needs m (MuAdamW), or the "
            "decay is to be independent"
        ),
        source="microsoft/mup, issue 1, and pull request 73; 2405.13698",
        fits=lambda finding, line, family: finding.what == "pull" and finding.excess < -0.4,
    ),
    Mistake(
        name="eps not scaled",
        text="Gradients fall with size, and an eps that does not outgrows them",
        source="CompleteP, 2505.01618; 2407.05872",
        fits=lambda finding, line, family: finding.what == "eps" and finding.excess > 0.4,
    ),
    Mistake(
        name="depth missing in the rate",
        text="Branches are scaled with depth, and the rates of what is in them have to follow",
        source="Tensor Programs VI, 2310.02244; marin-community/marin, issue 5177",
        fits=lambda finding, line, family: (
            line.word == "depth" and finding.what == "rate" and finding.excess > 0.3
        ),
    ),
    Mistake(
        name="no depth multiplier",
        text="Every block adds as much at every depth, and the stream grows with their number",
        source="Tensor Programs VI, 2310.02244; CompleteP, 2505.01618",
        fits=lambda finding, line, family: finding.names[0] == BRANCH and finding.excess > 0.3,
    ),
)
"""Published mistakes, tried in this order on every finding."""

STANDARD = Mistake(
    name="base shapes of the target",
    text=(
        "All of it is standard parameterization: muP is off, or the base is the model itself, "
        "as after set_base_shapes(model, None)"
    ),
    source="microsoft/mup, issue 41",
    fits=lambda finding, line, family: False,
)
"""Mistake that no single finding shows, only the dumps as a whole.

It stands for code in which muP is switched off.
"""


def recognized(
    findings: Sequence[Finding], line: GrowthSeries, family: Family, *, standard: bool
) -> list[tuple[Finding | None, Mistake]]:
    """Return the published mistakes that the findings show, each with the finding that shows it.

    A finding shows at most one mistake, the first that fits.

    Args:
        standard: Whether the user's models are standard parameterization. If so, the only mistake
            is `STANDARD`, with `None` for the finding.
    """
    # Each value of standard parameterization also looks like some other mistake.
    if standard:
        return [(None, STANDARD)]

    wrong_values = {finding.what for finding in findings if finding.severity == "fault"}
    with_slope = [finding for finding in findings if finding.slope is not None]
    pairs: list[tuple[Finding | None, Mistake]] = []
    for mistake in MISTAKES:
        if mistake.alone and len(wrong_values) > 1:
            continue
        fitting = [finding for finding in with_slope if mistake.fits(finding, line, family)]
        if fitting and all(earlier is not fitting[0] for earlier, _ in pairs):
            pairs.append((fitting[0], mistake))
    return pairs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verify:
    """Check whether the parameterization of other code is right, of any framework.

    Reads dumps of one model at two sizes. A dump is JSON, {name: {shape, std, lr, wd, eps,
    multiplier}}; docs/howto/verify.md has a snippet for PyTorch and one for JAX that write it. Also read:
    a Megatron command line, a Cerebras YAML, arguments of nanoGPT-mup, an OLMo YAML, a .bsh of
    microsoft/mup, a config.json of Hugging Face. Exits with 1 if something is wrong.
    """

    files: Annotated[conf.Positional[tuple[Place, ...]], conf.arg(metavar="FILE ...")]
    """One model at two sizes or more; one file is enough if it names its base."""
    role: Repeated = ()
    """Role of parameters whose names do not show it, PATTERN=ROLE, such as '*.out.weight=readout'.
    Several times."""
    head_dim: str | None = None
    """Size of a head if shapes do not show it: a number, or one a file with commas between."""
    optimizer: Annotated[str | None, conf.arg(metavar="|".join(OPTIMIZERS))] = None
    """Optimizer that was used. By default that of the files, else adamw."""
    decay: Literal["coupled", "independent"] | None = None
    """How weight decay enters: w -= lr*wd*w, or w -= wd*w. By default as in the files, else
    coupled."""
    preset: str | None = None
    """Preset that the code is meant to follow. By default the closest one."""
    constant: Repeated = ()
    """A constant of that preset, NAME=VALUE. Several times."""
    strict: Switch = False
    """Count cautions, too: what sources disagree on, and what most code leaves out."""
    table: Switch = False
    """Also show every parameter: its role, the exponents of its values, and the right ones."""
    json: Switch = False
    """Print JSON."""

    def __post_init__(self) -> None:
        if not self.files:
            raise command_line.UsageError(
                "verify needs files, such as verify small.json large.json; "
                "docs/howto/verify.md says what they hold"
            )
        if self.constant and self.preset is None:
            raise command_line.UsageError("--constant is a preset's; write --preset too")
        if self.json:
            command_line.refuse_idle(self, ("table",), "with --json", "leave --json out")

    def run(self) -> int:
        """Print the report, and return 1 if something is wrong, else 0.

        With `strict` a caution counts as wrong, too.

        Raises:
            PresetError: A file cannot be read, or the models cannot be compared with a preset.
        """
        dumps = self._dumps()
        optimizer = self._optimizer(dumps)
        decay = self._decay(dumps)
        named = None
        if self.preset is not None:
            named = presets.get(self.preset, **read_constants(self.constant, {}))

        models = axes.models(dumps, names.read_overrides(self.role))
        reports = []
        lacks: dict[str, str] = {}
        for line in fit.lines(models, OPTIMIZERS[optimizer].family):
            lacks_of_line = _lacks(line.models)
            reports.append(_report(line, optimizer, decay, named, lacks_of_line))
            lacks.update(lacks_of_line)
        notes = _notes(dumps, models, lacks)
        if self.json:
            print_json({
                "notes": notes,
                "guessed": dict(models[0].guessed),
                "lines": [report.plain() for report in reports],
            })  # fmt: skip
        else:
            self._show(reports, notes)

        all_findings = _all_findings(reports)
        fails = any(finding.severity == "fault" or self.strict for finding in all_findings)
        return int(fails)

    def _show(self, reports: Sequence[Report], notes: Sequence[str]) -> None:
        """Print conclusions, what to type next, findings, notes and the table, in this order."""
        for report in reports:
            terminal.say(report.conclusion)
        terminal.say(_next_step(reports, self.strict))
        for report in reports:
            report.show()
        if notes:
            print()
        for note in notes:
            terminal.say(f"note: {note}")
        if self.table:
            for report in reports:
                report.show_table()

    def _dumps(self) -> list[Dump]:
        """Read the files as dumps, and set their head size if `--head-dim` is given.

        Raises:
            UsageError: `--head-dim` is not one number above 0, or one for each file.
        """
        dumps = formats.read(list(self.files))
        if self.head_dim is None:
            return dumps

        # `isdecimal`, because `int` alone also takes "-4" and "1_000".
        texts = self.head_dim.split(",")
        are_counts = all(text.strip().isdecimal() and int(text) for text in texts)
        if len(texts) not in (1, len(dumps)) or not are_counts:
            raise command_line.UsageError(
                f"--head-dim {self.head_dim}: write a number, or {len(dumps)} with commas between"
            )
        sizes = [int(text) for text in texts]
        if len(sizes) == 1:
            sizes = sizes * len(dumps)
        with_sizes = []
        for dump, size in zip(dumps, sizes, strict=True):
            with_sizes.append(dataclasses.replace(dump, head_dim=size))
        return with_sizes

    def _optimizer(self, dumps: Sequence[Dump]) -> str:
        """Return the optimizer of `--optimizer`, else that of the files, else "adamw".

        Raises:
            PresetError: The files have different optimizers, or mupax does not know theirs.
        """
        if self.optimizer is not None:
            if self.optimizer not in OPTIMIZERS:
                raise PresetError(
                    f"no optimizer is named {self.optimizer!r}; write {', '.join(OPTIMIZERS)}"
                )
            return self.optimizer

        named = sorted({dump.optimizer for dump in dumps if dump.optimizer is not None})
        if len(named) > 1:
            raise PresetError(
                f"the files have different optimizers, {', '.join(named)}; write --optimizer"
            )
        optimizer = named[0] if named else "adamw"
        if optimizer not in OPTIMIZERS:
            raise PresetError(
                f"{dumps[0].source}: no optimizer is named {optimizer!r}; "
                f"write --optimizer with the nearest of {', '.join(OPTIMIZERS)}"
            )
        return optimizer

    def _decay(self, dumps: Sequence[Dump]) -> Decay:
        # Without a flag, the first file that has a setting decides.
        decays: list[Decay] = [dump.decay for dump in dumps if dump.decay is not None]
        default = decays[0] if decays else "coupled"
        return self.decay or default


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """Results for one model of the user in which some sizes grow together.

    Attributes:
        line: Models of the user's code, the smallest first.
        optimizer: A name of `OPTIMIZERS`.
        reference: Preset that the user's models are compared with, and the differences from it.
        findings: Faults, then cautions.
        published: Pairs (finding, published mistake that it shows). The finding is None for the
            mistake of standard parameterization, which the user's models show as a whole.
        limits: Observables that all findings together make worse as the model grows, worst first.
        lacks: Values that the files do not have and that are not judged, each in a few words.
    """

    line: GrowthSeries
    optimizer: str
    reference: reference.Reference
    findings: Sequence[Finding]
    published: Sequence[tuple[Finding | None, Mistake]]
    limits: Observables
    lacks: Sequence[str] = ()

    @property
    def _reference_label(self) -> str:
        """Name of the preset that the user's models are compared with, as printed.

        For depth-mup it includes the constants, because several variants of it are compared.
        """
        preset = self.reference.preset
        return preset.label if preset.name == "depth-mup" else preset.name

    @property
    def faults(self) -> list[Finding]:
        """Findings of the severity "fault", which make the command fail."""
        return [finding for finding in self.findings if finding.severity == "fault"]

    @property
    def verdict(self) -> Literal["wrong", "caution", "right"]:
        """Verdict: "wrong" with a fault, "caution" with cautions only, otherwise "right"."""
        if self.faults:
            return "wrong"
        return "caution" if self.findings else "right"

    @property
    def conclusion(self) -> str:
        """Sentence with the verdict, the preset, what grows and the first two findings.

        Without a fault it also says which values the files lack, of which nothing is known.
        """
        ratio = f"{self.line.t[-1]:.3g}"
        growth = f"as {self.line.word} grows x{ratio}, held against {self._reference_label}"
        lacks = ""
        if self.lacks and not self.faults:
            lacks = f"; not judged, because the files lack it: {', '.join(self.lacks)}"
        if self.verdict == "right":
            return f"RIGHT: nothing is wrong in what the files say {growth}{lacks}."

        head = "WRONG" if self.faults else "RIGHT, with a caution"
        cautions = len(self.findings) - len(self.faults)
        subjects = "; ".join(finding.subject for finding in self.findings[:2])
        more = " and more" if len(self.findings) > 2 else ""
        counts = f"{len(self.faults)} wrong, {cautions} to know of"
        return f"{head}: {counts} {growth}: {subjects}{more}{lacks}."

    def plain(self) -> dict[str, Any]:
        """Return the report as a dict that JSON can hold, for `--json`.

        Its keys are "grows" (power of growth by axis), "times" (growth factor of the largest
        model), "optimizer", "reference" (the preset), "verdict", "findings", "published" (mistakes),
        "limits" (observables that become worse) and "lacks" (values that are not judged).
        """
        findings_json = []
        for finding in self.findings:
            sentence = finding.sentence(self.line.word)
            findings_json.append({**dataclasses.asdict(finding), "sentence": sentence})
        published = []
        for _, mistake in self.published:
            published.append({
                "mistake": mistake.name,
                "text": mistake.text,
                "source": mistake.source,
            })  # fmt: skip
        return {
            "grows": dict(self.line.growth),
            "times": self.line.t[-1],
            "optimizer": self.optimizer,
            "reference": self._reference_label,
            "verdict": self.verdict,
            "findings": findings_json,
            "published": published,
            "limits": {row: dataclasses.asdict(entry) for row, entry in self.limits},
            "lacks": list(self.lacks),
        }

    def show(self) -> None:
        """Print the findings, published mistakes and consequences, no wider than the terminal."""
        count = len(self.line.models[0].parameters)
        terminal.say(
            f"\n{self.line.grown}, {self.optimizer}, {count} parameters; "
            f"held against {self._reference_label}"
        )
        for finding in self.findings:
            head = "WRONG" if finding.severity == "fault" else "caution"
            terminal.say("\n" + _hanging(head, finding.sentence(self.line.word)))
            for shown_by, mistake in self.published:
                if shown_by is finding:
                    print(_hanging("", f"{mistake.text} ({mistake.source})."))
        for shown_by, mistake in self.published:
            if shown_by is None:
                terminal.say("\n" + _hanging("", f"{mistake.text} ({mistake.source})."))
        if self.limits:
            clauses = []
            for row, entry in self.limits[:6]:
                clauses.append(f"{row} {cell(entry, self.line.word)}")
            terminal.say(f"\nso, as {self.line.word} grows, by limits: {'; '.join(clauses)}")

    def show_table(self) -> None:
        """Print a table of the compared parameters, with the exponents of their values."""
        terminal.say("\n" + terminal.table(self._rows(), left=("parameter", "role")))

    def _rows(self) -> list[list[str]]:
        """Return the rows of `show_table`'s table, the header first.

        A row has a parameter, its role and one cell for each of `fit.QUANTITIES`.
        """
        by_name: dict[str, dict[fit.Quantity, differences.Difference]] = {}
        for difference in self.reference.differences:
            by_name.setdefault(difference.name, {})[difference.quantity] = difference

        rows = [["parameter", "role", *fit.QUANTITIES]]
        for name, by_quantity in by_name.items():
            first = next(iter(by_quantity.values()))
            role = "" if first.role == name else first.role
            cells = [_exponents(by_quantity.get(quantity)) for quantity in fit.QUANTITIES]
            rows.append([name, role, *cells])
        return rows


def _exponents(difference: differences.Difference | None) -> str:
    """Return a table cell with the exponent of a value, such as "-1" or "0 not -1".

    After "not" comes the right exponent, if the value is wrong. The cell is empty without a
    difference. An exponent that could not be fitted is 0.
    """
    if difference is None:
        return ""
    # Adding 0.0 turns -0.0 into 0.
    slope = round(difference.slope or 0.0, 2) + 0.0
    if not difference.wrong:
        return f"{slope:g}"
    return f"{slope:g} not {round(difference.target, 2) + 0.0:g}"


def _hanging(head: str, text: str) -> str:
    """Return text wrapped to the terminal's width and indented by 8 columns.

    Args:
        head: Word such as "WRONG", put into the indentation of the first line.
    """
    # In a pipe `columns` returns 1,000,000, so that the paragraph stays on one line.
    return textwrap.fill(
        text,
        terminal.columns(),
        initial_indent=f"{head:8}",
        subsequent_indent=" " * 8,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _notes(
    dumps: Sequence[Dump], models: Sequence[axes.Model], lacks: Mapping[str, str]
) -> list[str]:
    """Return notes on the formats, on guessed roles, and on what is not judged.

    Args:
        lacks: Values that are not judged because a file lacks them, with meanings (`_lacks`).
    """
    notes: list[str] = []
    for dump in dumps:
        for note in dump.notes:
            # Two files of one format may have the same note.
            if note not in notes:
                notes.append(note)
    notes += _guess_notes(models[0])
    if lacks:
        meanings = [f"{value} ({meaning})" for value, meaning in lacks.items()]
        notes.append(f"the files do not say, and it is not judged: {', '.join(meanings)}")
    skipped = models[0].skipped
    if skipped:
        notes.append(f"not judged: {_listed(skipped)}")
    return notes


def _listed(texts: Sequence[str]) -> str:
    """Return the first four texts, with commas between, and whether there are more."""
    more = " and more" if len(texts) > 4 else ""
    return f"{', '.join(texts[:4])}{more}"


def _guess_notes(model: axes.Model) -> list[str]:
    """Return one note for each role guessed from shapes, with the parameters that have it."""
    names_by_role: dict[str, list[str]] = {}
    for name, role in model.guessed.items():
        names_by_role.setdefault(role, []).append(name)

    notes = []
    for role, guessed in names_by_role.items():
        kind = "hidden matrices" if role == "hidden" else role
        example, other_role = _MISTAKEN_FOR.get(role, ("a query or a key", "query"))
        notes.append(
            f"taken for {kind} by their shapes, as their names say nothing: {', '.join(guessed)}; "
            f"if one is something else, such as {example}, "
            f"write --role '{guessed[0]}={other_role}'"
        )
    return notes


_MISTAKEN_FOR = {
    "readout": ("a table of embeddings", "token_embedding"),
    "patch_embedding": ("a hidden matrix whose input does not grow", "hidden"),
}
"""Guessed role to a parameter that has the same shapes, in words, and its role."""


def _lacks(models: Sequence[axes.Model]) -> dict[str, str]:
    """Return the values that are not judged because a file lacks them, with their meanings.

    They are standard deviations and learning rates, also those of single parameters, the factor on
    q.k and, if the depth grows, that on branches.
    """
    lacks: dict[str, str] = {}
    meanings: tuple[tuple[Column, fit.Quantity, str], ...] = (
        ("std", "start", "initial size"),
        ("lr", "rate", "learning rate"),
    )
    for column, quantity, meaning in meanings:
        judged = [
            name
            for name, parameter in models[0].parameters.items()
            if differences.has_rule(parameter.spec, quantity, "adamw")
        ]
        missing = [
            name
            for name in judged
            if any(getattr(model.parameters[name].entry, column) is None for model in models)
        ]
        if missing and len(missing) == len(judged):
            lacks[column] = meaning
        elif missing:
            lacks[f"{column} of {_listed(missing)}"] = meaning
        # A parameter that is not trained has the rate 0 at every size.
        frozen = [
            name
            for name in judged
            if column == "lr"
            and all(getattr(model.parameters[name].entry, column) == 0 for model in models)
        ]
        if frozen:
            lacks[f"lr above 0 of {_listed(frozen)}"] = "learning rate"

    base = models[0]
    if any(model.dump.attention is None for model in models):
        parameters = base.parameters
        has_attention = any(p.spec.role in (Role.QUERY, Role.VALUE) for p in parameters.values())
        # A matrix of a block whose name says nothing may be a query.
        may_have_attention = any(parameters[name].spec.in_block for name in base.guessed)
        if has_attention:
            lacks["attention"] = "what q.k is multiplied by"
        elif may_have_attention:
            lacks["attention"] = "what q.k is multiplied by, if the model has any"

    # The branch multiplier matters only if the depth grows.
    depths = {model.sizes.get("layers") for model in models}
    if len(depths) > 1 and any(model.dump.branch is None for model in models):
        lacks["branch"] = "what every residual branch is multiplied by"
    return lacks


def _all_findings(reports: Sequence[Report]) -> list[Finding]:
    return list(itertools.chain.from_iterable(report.findings for report in reports))


def _next_step(reports: Sequence[Report], strict: bool) -> str:
    """Return a sentence on what to do next: the remedy of the first finding that counts.

    Cautions count only if `strict` is set and there is no fault. Without a finding that counts, the
    sentence names `mupax check`.
    """
    all_findings = _all_findings(reports)
    faults = [finding for finding in all_findings if finding.severity == "fault"]
    counted = all_findings if strict and not faults else faults
    if not counted:
        return (
            "Next: train a few steps under `mupax check`, "
            "which sees what no file says: the forward pass."
        )
    remedy = counted[0].remedy
    imperative = f"{remedy[0].lower()}{remedy[1:]}"
    return f"Next: {imperative}; dump both sizes again and repeat this command."


def _report(
    line: GrowthSeries,
    optimizer: str,
    decay: Decay,
    named: presets.Preset | None,
    lacks: Mapping[str, str],
) -> Report:
    """Compare the models of one growth series with a preset, and return the report.

    Args:
        optimizer: A name of `OPTIMIZERS`.
        decay: "coupled" if weight decay is multiplied by the learning rate.
        named: Preset of `--preset`. `None` chooses the closest one.
        lacks: Values that are not judged because a file lacks them, with meanings (`_lacks`).
    """
    closest = reference.closest(line, optimizer, decay, named)
    family = closest.preset.family(optimizer)
    reported = findings(closest, line, family)

    # The observables of `limits` need residual blocks.
    limits: Observables = []
    if any(parameter.spec.in_block for parameter in line.models[0].parameters.values()):
        limits = consequences_of_all(closest, line, family)
    standard = named is None and bool(reported) and reference.is_standard(line, optimizer, decay)
    return Report(
        line=line,
        optimizer=optimizer,
        reference=closest,
        findings=reported,
        published=recognized(reported, line, family, standard=standard),
        limits=limits,
        lacks=tuple(lacks),
    )
