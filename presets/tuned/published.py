"""Tuned presets whose numbers others have published: what is said about one, and its table beside the source's.

`provenance` of such a file has `evidence` (published), `status` (verified: read in the source's config or code; reported: read in a
paper's table), `source` (name, repository, commit, files with lines), `data`, `unit`, `seen`, `steps` and `batch` of one run, `sizes`
of the models, `tables` (what each model of the source has, by the source's own rule), `differs` (what the preset cannot express),
`unknown` (what could not be read) and the `date` of reading.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from mupax import terminal
from mupax.presets.roles import ParamSpec

if TYPE_CHECKING:
    from mupax.presets.preset import Preset


class Published(Protocol):
    """A tuned preset (`mupax.presets.tuned.find.Tuned`) whose provenance is a publication."""

    @property
    def use(self) -> str: ...

    @property
    def evidence(self) -> str: ...

    @property
    def constants(self) -> Mapping[str, float | str]: ...

    @property
    def form(self) -> str | None: ...

    @property
    def base(self) -> Mapping[str, int] | None: ...

    @property
    def optimizer(self) -> Mapping[str, Any]: ...

    @property
    def provenance(self) -> Mapping[str, Any]: ...


COLUMNS = ("multiplier", "std", "lr", "eps", "wd")
"""Numbers of a group, in the order of a run's table."""


def summary(tuned: Published) -> str:
    """Return one line: the rate, whose it is, and how well that is known."""
    study, optimizer = tuned.provenance, tuned.optimizer
    models = ", ".join(table["model"] for table in study["tables"])
    rate = f"{optimizer['name']} {optimizer['peak_lr']:.3g} on {study['data']}"
    return f"{rate}; {study['source']['name']} ({models}), {study['status']}"


def rests_on(tuned: Published) -> str:
    """Return what a run with these numbers rests on, in a sentence or two."""
    study = tuned.provenance
    source = study["source"]
    unknown = f" Not known: {'; '.join(study['unknown'])}." if study["unknown"] else ""
    where = f"{source['repository']} at {source['commit'][:12]}"
    return (
        f"{tuned.use} rests on {source['name']}, as published and not measured here: {study['status']} in {where}; "
        f"{study['data']}, {tuned.optimizer['name']}.{unknown} `mupax presets tuned {tuned.use}` says more."
    )


def described(tuned: Published) -> str:
    """Return everything about one, in lines no wider than the terminal."""
    study = tuned.provenance
    source = study["source"]
    run = [f"{study[name]:,} {name}" for name in ("steps", "batch") if study[name]]
    if study["seen"]:
        run.append(f"{study['seen']:,} {study['unit']}s")
    lines = [
        ("status", study["status"]),
        ("source", f"{source['repository']} at {source['commit']}, read {study['date']}"),
        *(("file", file) for file in source["files"]),
        ("base", _pairs(tuned.base) if tuned.base else "none"),
        ("constants", f"{_pairs(tuned.constants) or 'none'}; form {tuned.form or 'its own'}"),
        ("optimizer", _pairs(tuned.optimizer)),
        ("data", study["data"]),
        ("one run", ", ".join(run) or "not known"),
        *(("model", f"{table['model']}: {_pairs(table['sizes'])}") for table in study["tables"]),
        *(("differs", text) for text in study["differs"]),
        *(("not known", text) for text in study["unknown"]),
    ]
    head = terminal.wrapped(f"{tuned.use}, {tuned.evidence}: {summary(tuned)}")
    return f"{head}\n{terminal.table(lines)}"


def values(
    tuned: Published, preset: Preset, spec: ParamSpec, sizes: Mapping[str, int]
) -> dict[str, float]:
    """Return a parameter's numbers in absolute terms, by the names of a source's table.

    Args:
        tuned: whose optimizer is used.
        preset: made of it.
        spec: the parameter's declaration.
        sizes: of the model.
    """
    optimizer = tuned.optimizer
    scales = preset.scales(spec, sizes, optimizer["name"], optimizer.get("decay", "coupled"))
    return {
        "multiplier": float(scales.multiplier),  # pyright: ignore
        "std": float(scales.init_std),  # pyright: ignore
        "lr": scales.lr * optimizer["peak_lr"],
        "eps": scales.eps * optimizer.get("eps", 1e-8),
        "wd": scales.weight_decay * optimizer.get("weight_decay", 0.0),
    }  # pyright: ignore


def nearest(tuned: Published, width: int) -> Mapping[str, Any]:
    """Return the source's table of the model whose width is nearest."""
    return min(
        tuned.provenance["tables"], key=lambda table: abs(table["sizes"]["embed"] / width - 1)
    )


def comparison(
    groups: Mapping[str, Mapping[str, float]], table: Mapping[str, Any]
) -> Sequence[Sequence[str]]:
    """Return rows of a table: of every group what the run has, and in brackets what a model of the source has.

    Args:
        groups: group to the run's numbers by `COLUMNS`.
        table: an entry of provenance's `tables`.
    """
    rows = [["group", *COLUMNS]]
    for group, own in groups.items():
        theirs = table["groups"].get(group, {})
        cells = []
        for column in COLUMNS:
            other = theirs.get(column)
            cells.append(f"{own[column]:.3g} [{'-' if other is None else f'{other:.3g}'}]")
        rows.append([group, *cells])
    return rows


def _pairs(values: Mapping[str, Any]) -> str:
    return " ".join(
        f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in values.items()
    )
