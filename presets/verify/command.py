"""`mupax verify`: read dumps and configs of other code, and say which parameter is wrong, what follows, what to write.

`MISTAKES` lists mistakes that others have made and written of. The findings say what is wrong without it; a mistake that is
recognized says where it usually comes from.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from tyro import conf

from mupax import command_line, presets, terminal
from mupax.command_line import Place, Repeated, Switch
from mupax.presets.analysis.batch_command import print_json
from mupax.presets.analysis.verdicts import cell
from mupax.presets.optimizers import OPTIMIZERS, Family
from mupax.presets.papers import read_constants
from mupax.presets.roles import PresetError, Role
from mupax.presets.rule import Decay
from mupax.presets.verify import axes, differences, fit, formats, names, reference
from mupax.presets.verify.differences import BRANCH, LOGITS, TIED
from mupax.presets.verify.findings import consequences_of_all, findings
from mupax.presets.verify.fit import GrowthSeries
from mupax.presets.verify.formats.dump import Dump
from mupax.presets.verify.sentences import Finding


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mistake:
    """A published mistake.

    Attributes:
        name: of a few words.
        text: where it comes from, and what to do.
        source: where it is written.
        fits: whether a finding is one, of a line of growth under an optimizer's family.
        alone: it leaves all other numbers as they should be.
    """

    name: str
    text: str
    source: str
    fits: Callable[[Finding, GrowthSeries, Family], bool]
    alone: bool = False


EQUAL_RATES = 1e-4
"""Relative difference up to which two learning rates are one: far above float32's 1e-7, far below any rule's."""


def _near(finding: Finding, exponent: float) -> bool:
    return abs(finding.excess - exponent) < 0.15


def _one_rate(line: GrowthSeries) -> bool:
    """Return whether every parameter has one learning rate.

    Rates are means over layers and may have gone through float32: they are compared with a tolerance.
    """
    for model in line.models:
        rates = [p.entry.lr for p in model.parameters.values() if p.entry.lr is not None]
        if not rates or max(rates) > min(rates) * (1 + EQUAL_RATES):
            return False
    return True


def _hidden(finding: Finding) -> bool:
    return (
        finding.role.startswith(("block.", "matrices", "hidden"))
        and "bias" not in finding.role
        and "gain" not in finding.role
    )


MISTAKES = (
    Mistake(
        name="scheduler overwrites group rates",
        text="Every parameter has one learning rate: a scheduler that sets the rate of all groups to its own undoes those of the groups; "
        "let it multiply what each group has",
        source="microsoft/mup, README, Current Limitations; DeepSpeed issue 7713",
        fits=lambda f, line, family: (
            f.what == "rate"
            and _hidden(f)
            and f.excess > 0.4
            and _one_rate(line)
            and line.word != "depth"
        ),
        alone=True,
    ),
    Mistake(
        name="tied readout without its multiplier",
        text="A readout that is the embedding's table has no std and no rate of its own: 1/m has to be on its output (MuSharedReadout)",
        source="Tensor Programs V, Table 8; microsoft/mup, README",
        fits=lambda f, line, family: (
            f.names[0] == TIED and f.what == "multiplier" and f.excess > 0.4
        ),
    ),
    Mistake(
        name="tied table rescaled as a readout",
        text="A table that is both is rescaled for the readout, and the embedding grows with it; its std is to stay",
        source="microsoft/mup, issue 55",
        fits=lambda f, line, family: (
            f.role == "token_embedding" and f.what == "start" and _near(f, 0.5)
        ),
    ),
    Mistake(
        name="Muon scaled twice",
        text="An orthogonalized update has the size of its matrix already; 1/m is Adam's",
        source="NVIDIA/Megatron-LM, pull request 3715; karpathy/nanochat, pull request 644",
        fits=lambda f, line, family: (
            family == "muon" and f.what == "rate" and _hidden(f) and f.excess < -0.4
        ),
    ),
    Mistake(
        name="readout's rate without 1/m",
        text="In the form of Table 3, with the scale in the std, the readout's rate falls as well; with a multiplier (Table 8) it does not",
        source="microsoft/mup, issue 7; mlfoundations/open_lm, pull request 25",
        fits=lambda f, line, family: (
            f.role == "readout" and f.what == "rate" and family != "sgd" and _near(f, 1.0)
        ),
    ),
    Mistake(
        name="readout scaled twice",
        text="The multiplier and the rate both have 1/m; one of them is enough",
        source="EleutherAI/gpt-neox, pull request 1087",
        fits=lambda f, line, family: (
            f.role == "readout" and f.what in ("rate", "multiplier") and f.excess < -0.4
        ),
    ),
    Mistake(
        name="attention by 1/sqrt(d)",
        text="Queries and keys align in training, and q.k grows as d, not as its root",
        source="Tensor Programs V, Definition 4.1; microsoft/mup, README",
        fits=lambda f, line, family: f.names[0] == LOGITS and f.excess > 0.3,
    ),
    Mistake(
        name="embedding as a hidden matrix",
        text="A table is looked up and not summed over: its fan-in does not grow, and its rate is to stay",
        source="microsoft/mup, issue 48; 2506.15025",
        fits=lambda f, line, family: (
            f.role in ("token_embedding", "position", "patch_embedding")
            and f.what == "rate"
            and f.excess < -0.4
        ),
    ),
    Mistake(
        name="init not rescaled",
        text="One std for every width, such as 0.02; under muP it belongs to the base, and falls as 1/sqrt(m)",
        source="Tensor Programs V, Table 3; EleutherAI/nanoGPT-mup, coordinate check `sp`",
        fits=lambda f, line, family: f.what == "start" and _hidden(f) and _near(f, 0.5),
    ),
    Mistake(
        name="std divided by m",
        text="The variance falls as 1/m, the standard deviation as 1/sqrt(m)",
        source="EleutherAI/gpt-neox, pull request 1087",
        fits=lambda f, line, family: (
            f.what == "start" and _hidden(f) and _near(f, -0.5) and line.word != "depth"
        ),
    ),
    Mistake(
        name="gains and biases as hidden matrices",
        text="Gains and biases multiply one entry each: as vectors their rate is to stay",
        source="microsoft/mup, issues 12 and 57",
        fits=lambda f, line, family: (
            f.what == "rate"
            and ("bias" in f.role or "gain" in f.role)
            and f.excess < -0.4
            and line.word != "depth"
        ),
    ),
    Mistake(
        name="decay fades with the rate",
        text="In AdamW w falls by lr*wd*w: where the rate has 1/m, wd needs m (MuAdamW), or the decay is to be independent",
        source="microsoft/mup, issue 1, and pull request 73; 2405.13698",
        fits=lambda f, line, family: f.what == "pull" and f.excess < -0.4,
    ),
    Mistake(
        name="eps not scaled",
        text="Gradients fall with size, and an eps that does not outgrows them",
        source="CompleteP, 2505.01618; 2407.05872",
        fits=lambda f, line, family: f.what == "eps" and f.excess > 0.4,
    ),
    Mistake(
        name="depth missing in the rate",
        text="Branches are scaled with depth, and the rates of what is in them have to follow",
        source="Tensor Programs VI, 2310.02244; marin-community/marin, issue 5177",
        fits=lambda f, line, family: line.word == "depth" and f.what == "rate" and f.excess > 0.3,
    ),
    Mistake(
        name="no depth multiplier",
        text="Every block adds as much at every depth, and the stream grows with their number",
        source="Tensor Programs VI, 2310.02244; CompleteP, 2505.01618",
        fits=lambda f, line, family: f.names[0] == BRANCH and f.excess > 0.3,
    ),
)
"""Mistakes with a source, each with what it looks like."""

STANDARD = Mistake(
    name="base shapes of the target",
    text="All of it is standard parameterization: muP is off, or the base is the model itself, as after set_base_shapes(model, None)",
    source="microsoft/mup, issue 41",
    fits=lambda f, line, family: False,
)


def recognized(
    findings: Sequence[Finding], line: GrowthSeries, family: Family, *, standard: bool
) -> list[tuple[Finding | None, Mistake]]:
    """Published mistakes among findings, each once, with the finding that shows it; None where it is all of them.

    Args:
        findings: what is wrong.
        line: what grows.
        family: of the optimizer.
        standard: the dumps are standard parameterization's.
    """
    if standard:
        return [(None, STANDARD)]
    pairs: list[tuple[Finding | None, Mistake]] = []
    for mistake in MISTAKES:
        faults = [f for f in findings if f.severity == "fault"]
        if mistake.alone and len({f.what for f in faults}) > 1:
            continue
        finding = next(
            (f for f in findings if f.slope is not None and mistake.fits(f, line, family)), None
        )
        if finding is not None and all(other is not finding for other, _ in pairs):
            pairs.append((finding, mistake))
    return pairs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verify:
    """Is the parameterization right that other code has? Reads what it gives each parameter at two sizes, of any framework.

    A dump is JSON, {name: {shape, std, lr, wd, eps, multiplier}}; docs/howto/verify.md has snippets for PyTorch and JAX that write it. Also
    read: a Megatron command line, a Cerebras YAML, arguments of nanoGPT-mup, an OLMo YAML, a .bsh of microsoft/mup, a config.json of Hugging
    Face. Exits with 1 where something is wrong.
    """

    files: Annotated[conf.Positional[tuple[Place, ...]], conf.arg(metavar="FILE ...")]
    """One model at two sizes or more; one file is enough where it names its base."""
    role: Repeated = ()
    """What parameters are whose names do not say it, PATTERN=ROLE, such as '*.out.weight=readout'. Several times."""
    head_dim: str | None = None
    """Size of a head where shapes do not show it: a number, or one a file with commas between."""
    optimizer: Annotated[str | None, conf.arg(metavar="|".join(OPTIMIZERS))] = None
    """Optimizer that was used; that of the files unless given, else adamw."""
    decay: Literal["coupled", "independent"] | None = None
    """How weight decay enters: w -= lr*wd*w, or w -= wd*w; that of the files unless given, else coupled."""
    preset: str | None = None
    """What the code is meant to be; the closest preset unless given."""
    constant: Repeated = ()
    """A constant of that preset, NAME=VALUE. Several times."""
    strict: Switch = False
    """Count cautions, too: what sources disagree on, and what most code leaves out."""
    table: Switch = False
    """Also show every parameter: its role, and powers that its numbers have, and should have."""
    json: Switch = False
    """Print JSON."""

    def __post_init__(self) -> None:
        if not self.files:
            raise command_line.UsageError(
                "verify needs files, such as verify small.json large.json; docs/howto/verify.md says what they hold"
            )
        if self.constant and self.preset is None:
            raise command_line.UsageError("--constant is a preset's; write --preset too")

    def run(self) -> int:
        dumps = self._dumps()
        optimizer, decay = self._optimizer(dumps), self._decay(dumps)
        named = None
        if self.preset is not None:
            named = presets.get(self.preset, **read_constants(self.constant, {}))
        models = axes.models(dumps, names.read_overrides(self.role))
        reports = [_report(line, optimizer, decay, named) for line in fit.lines(models)]
        notes = [*dict.fromkeys(note for dump in dumps for note in dump.notes)]
        notes += _guesses(models[0])
        notes += _unknown(models)
        if skipped := models[0].skipped:
            notes.append(
                f"not judged: {', '.join(skipped[:4])}{' and more' if len(skipped) > 4 else ''}"
            )
        if self.json:
            print_json({
                "notes": notes,
                "guessed": dict(models[0].guessed),
                "lines": [report.plain() for report in reports],
            })  # fmt: skip
        else:
            self._show(reports, notes)
        counted = [
            f for report in reports for f in report.findings if f.severity == "fault" or self.strict
        ]
        return int(bool(counted))

    def _show(self, reports: Sequence[Report], notes: Sequence[str]) -> None:
        """Print conclusions, what to type next, findings, notes and the table, in this order."""
        for report in reports:
            terminal.say(report.conclusion)
        terminal.say(_next(reports, self.strict))
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
        dumps = formats.read(list(self.files))
        if self.head_dim is None:
            return dumps
        texts = self.head_dim.split(",")
        if len(texts) not in (1, len(dumps)) or not all(
            text.strip().isdecimal() and int(text) for text in texts
        ):
            raise command_line.UsageError(
                f"--head-dim {self.head_dim}: write a number, or {len(dumps)} with commas between"
            )
        sizes = [int(text) for text in texts] * (len(dumps) if len(texts) == 1 else 1)
        return [
            dataclasses.replace(dump, head_dim=size)
            for dump, size in zip(dumps, sizes, strict=True)
        ]

    def _optimizer(self, dumps: Sequence[Dump]) -> str:
        named = {dump.optimizer for dump in dumps} - {None}
        if len(named) > 1:
            raise PresetError(
                f"the files have different optimizers, {', '.join(sorted(map(str, named)))}; write --optimizer"
            )
        chosen = self.optimizer or (str(named.pop()) if named else "adamw")
        if chosen not in OPTIMIZERS:
            raise PresetError(f"no optimizer is named {chosen!r}; write {', '.join(OPTIMIZERS)}")
        return chosen

    def _decay(self, dumps: Sequence[Dump]) -> Decay:
        decays: list[Decay] = [dump.decay for dump in dumps if dump.decay is not None]
        return self.decay or (decays[0] if decays else "coupled")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What there is to say of one line of growth."""

    line: fit.GrowthSeries
    optimizer: str
    reference: reference.Reference
    findings: Sequence[Finding]
    published: Sequence[tuple[Finding | None, Mistake]]
    limits: Sequence[tuple[str, Any]]

    @property
    def _held(self) -> str:
        preset = self.reference.preset
        return preset.label if preset.name == "depth-mup" else preset.name

    @property
    def faults(self) -> list[Finding]:
        """Findings that make the command fail."""
        return [finding for finding in self.findings if finding.severity == "fault"]

    @property
    def verdict(self) -> Literal["wrong", "caution", "right"]:
        """The verdict in a word: `limits` never says of the files what this does not."""
        if self.faults:
            return "wrong"
        return "caution" if self.findings else "right"

    @property
    def conclusion(self) -> str:
        """The verdict in a sentence."""
        grown = f"as {self.line.word} grows x{self.line.t[-1]:.3g}, held against {self._held}"
        cautions = len(self.findings) - len(self.faults)
        if self.verdict == "right":
            return f"RIGHT: nothing is wrong in what the files say {grown}."
        subjects = "; ".join(finding.subject for finding in self.findings[:2])
        more = " and more" if len(self.findings) > 2 else ""
        head = "WRONG" if self.faults else "RIGHT, with a caution"
        return f"{head}: {len(self.faults)} wrong, {cautions} to know of {grown}: {subjects}{more}."

    def plain(self) -> dict[str, Any]:
        """Return the report as JSON has it."""
        word = self.line.word
        return {
            "grows": dict(self.line.growth),
            "times": self.line.t[-1],
            "optimizer": self.optimizer,
            "reference": self._held,
            "verdict": self.verdict,
            "findings": [
                {**dataclasses.asdict(f), "sentence": f.sentence(word)} for f in self.findings
            ],
            "published": [
                {"mistake": m.name, "text": m.text, "source": m.source} for _, m in self.published
            ],
            "limits": {row: dataclasses.asdict(entry) for row, entry in self.limits},
        }

    def show(self) -> None:
        """Print the findings, no wider than the terminal."""
        model = self.line.models[0]
        count = len(model.parameters)
        terminal.say(
            f"\n{self.line.grown}, {self.optimizer}, {count} parameters; held against {self._held}"
        )
        for finding in self.findings:
            head = "WRONG" if finding.severity == "fault" else "caution"
            terminal.say("\n" + _hanging(head, finding.sentence(self.line.word)))
            for other, mistake in self.published:
                if other is finding:
                    print(_hanging("", f"{mistake.text} ({mistake.source})."))
        for other, mistake in self.published:
            if other is None:
                terminal.say("\n" + _hanging("", f"{mistake.text} ({mistake.source})."))
        if self.limits:
            words = [f"{row} {cell(entry, self.line.word)}" for row, entry in self.limits[:6]]
            terminal.say(f"\nso, as {self.line.word} grows, by limits: {'; '.join(words)}")

    def show_table(self) -> None:
        """Print every parameter with its powers."""
        terminal.say("\n" + terminal.table(self._rows(), left=("parameter", "role")))

    def _rows(self) -> list[list[str]]:
        rows = [["parameter", "role", *fit.QUANTITIES]]
        by = {(d.name, d.quantity): d for d in self.reference.differences}
        for name in dict.fromkeys(d.name for d in self.reference.differences):
            role = next(d.role for d in self.reference.differences if d.name == name)
            powers = (_powers(by.get((name, quantity))) for quantity in fit.QUANTITIES)
            rows.append([name, "" if role == name else role, *powers])
        return rows


def _powers(difference: differences.Difference | None) -> str:
    if difference is None:
        return ""
    slope = "0" if difference.slope is None else f"{round(difference.slope, 2) + 0.0:g}"
    return f"{slope} not {round(difference.target, 2) + 0.0:g}" if difference.wrong else slope


def _hanging(head: str, text: str) -> str:
    width = min(terminal.columns(), 1_000_000)
    return textwrap.fill(
        text,
        width,
        initial_indent=f"{head:8}",
        subsequent_indent=" " * 8,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _unknown(models: Sequence[axes.Model]) -> list[str]:
    """What the files leave out, and is not judged for it."""
    lacking = [
        f"{column} ({what})"
        for column, what in (("std", "initial size"), ("lr", "learning rate"))
        if any(
            all(getattr(p.entry, column) is None for p in model.parameters.values())
            for model in models
        )
    ]
    attends = any(p.spec.role in (Role.QUERY, Role.VALUE) for p in models[0].parameters.values())
    guessed = [name for name in models[0].guessed if models[0].parameters[name].spec.in_block]
    if any(model.dump.attention is None for model in models):
        if attends:
            lacking.append("attention (what q.k is multiplied by)")
        elif guessed:
            lacking.append("attention (what q.k is multiplied by, if the model has any)")
    if len({model.sizes.get("layers") for model in models}) > 1 and any(
        model.dump.branch is None for model in models
    ):
        lacking.append("branch (what every residual branch is multiplied by)")
    return [f"the files do not say, and it is not judged: {', '.join(lacking)}"] if lacking else []


def _guesses(model: axes.Model) -> list[str]:
    """Return what was guessed from shapes, one note for each role."""
    names_of: dict[str, list[str]] = {}
    for name, role in model.guessed.items():
        names_of.setdefault(role, []).append(name)
    notes = []
    for role, guessed in names_of.items():
        called = {"hidden": "hidden matrices"}.get(role, role)
        notes.append(
            f"taken for {called} by their shapes, as their names say nothing: {', '.join(guessed)}; if one is something "
            f"else, such as a query or a key, write --role '{guessed[0]}=query'"
        )
    return notes


def _next(reports: Sequence[Report], strict: bool) -> str:
    """Return what to type next."""
    findings = [finding for report in reports for finding in report.findings]
    faults = [finding for finding in findings if finding.severity == "fault"]
    counted = faults or (findings if strict else [])
    if counted:
        remedy = counted[0].remedy
        return (
            f"Next: {remedy[0].lower()}{remedy[1:]}; dump both sizes again and repeat this command."
        )
    return "Next: train a few steps under `mupax check`, which sees what no file says: the forward pass."


def _report(
    line: fit.GrowthSeries, optimizer: str, decay: Decay, named: presets.Preset | None
) -> Report:
    closest = reference.closest(line, optimizer, decay, named)
    family = closest.preset.family(optimizer)
    reported = findings(closest, line, family)
    blocks = any(parameter.spec.in_block for parameter in line.models[0].parameters.values())
    limits = consequences_of_all(closest, line, family) if blocks else []
    standard = named is None and bool(reported) and reference.is_standard(line, optimizer, decay)
    return Report(
        line=line, optimizer=optimizer, reference=closest, findings=reported,
        published=recognized(reported, line, family, standard=standard),
        limits=limits,
    )  # fmt: skip
