"""Tuned presets whose values others have published: their descriptions and tables.

`provenance` of such a tuned preset has `evidence` ("published"), `status` ("verified" if read in
the source's config or code, "reported" if read in a paper's table), `source` (name, repository,
commit, files with lines), `data`, `unit`, `seen`, `steps` and `batch` of one run, `sizes` of the
models, `tables` (values of each model by the source's own rule), `differs` (what the preset cannot
express), `unknown` (what could not be read) and the `date` of reading.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from mupax import terminal
from mupax.presets.roles import ParamSpec

if TYPE_CHECKING:
    from mupax.presets.preset import Preset


class Published(Protocol):
    """Tuned preset (`mupax.presets.tuned.find.Tuned`) whose provenance is a publication."""

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
"""Values of a parameter group that a run's table and a source's table show, in order."""


def summary(tuned: Published) -> str:
    """Return one line on published values: learning rate, data, source, its models and status."""
    study = tuned.provenance
    optimizer = tuned.optimizer
    models = ", ".join(table["model"] for table in study["tables"])
    rate = f"{optimizer['name']} {optimizer['peak_lr']:.3g} on {study['data']}"
    return f"{rate}; {study['source']['name']} ({models}), {study['status']}"


def rests_on(tuned: Published) -> str:
    """Return text that tells the user on which publication a run's values rest.

    The text names the source and its commit, the status ("verified" or "reported"), the data, what
    is not known, and the command that says more.
    """
    study = tuned.provenance
    source = study["source"]
    commit = source["commit"][:12]
    unknown = f" Not known: {'; '.join(study['unknown'])}." if study["unknown"] else ""
    return (
        f"{tuned.use} rests on {source['name']}, as published and not measured here: "
        f"{study['status']} in {source['repository']} at {commit}; "
        f"{study['data']}, {tuned.optimizer['name']}.{unknown} "
        f"`mupax presets tuned {tuned.use}` says more."
    )


def described(tuned: Published) -> str:
    """Return the full description of published values as text no wider than the terminal.

    The text has the summary, then a table of status, source, base, constants, optimizer, data, run,
    models, differences from the preset, and unknown values.
    """
    study = tuned.provenance
    source = study["source"]
    run = [f"{study[name]:,} {name}" for name in ("steps", "batch") if study[name]]
    if study["seen"]:
        run.append(f"{study['seen']:,} {study['unit']}s")

    origin = f"{source['repository']} at {source['commit']}, read {study['date']}"
    lines = [("status", study["status"]), ("source", origin)]
    lines += [("file", file) for file in source["files"]]
    lines += [
        ("base", _pairs(tuned.base) if tuned.base else "none"),
        ("constants", f"{_pairs(tuned.constants) or 'none'}; form {tuned.form or 'its own'}"),
        ("optimizer", _pairs(tuned.optimizer)),
        ("data", study["data"]),
        ("one run", ", ".join(run) or "not known"),
    ]
    for table in study["tables"]:
        lines.append(("model", f"{table['model']}: {_pairs(table['sizes'])}"))
    lines += [("differs", text) for text in study["differs"]]
    lines += [("not known", text) for text in study["unknown"]]
    head = terminal.wrapped(f"{tuned.use}, {tuned.evidence}: {summary(tuned)}")
    return f"{head}\n{terminal.table(lines)}"


def values(
    tuned: Published, preset: Preset, spec: ParamSpec, sizes: Mapping[str, int]
) -> dict[str, float]:
    """Return the absolute values of a parameter, by the names in `COLUMNS`.

    The learning rate, eps and weight decay are the preset's scales times the optimizer's settings.

    Args:
        tuned: Tuned preset, whose optimizer settings are used.
        preset: Preset made from `tuned`, which has one value for all layers.
        sizes: Size of every logical axis of the model.
    """
    optimizer = tuned.optimizer
    decay = optimizer.get("decay", "coupled")
    scales = preset.scales(spec, sizes, optimizer["name"], decay)
    return {
        "multiplier": float(scales.multiplier),  # pyright: ignore
        "std": float(scales.init_std),  # pyright: ignore
        "lr": scales.lr * optimizer["peak_lr"],
        "eps": scales.eps * optimizer.get("eps", 1e-8),
        "wd": scales.weight_decay * optimizer.get("weight_decay", 0.0),
    }  # pyright: ignore


def nearest(tuned: Published, width: int) -> Mapping[str, Any]:
    """Return the source's table for the model whose width is nearest to a given width.

    The relative difference of the widths counts.

    Args:
        width: Size of the axis "embed" in the user's model.
    """

    def distance(table: Mapping[str, Any]) -> float:
        return abs(table["sizes"]["embed"] / width - 1)

    return min(tuned.provenance["tables"], key=distance)


def comparison(
    groups: Mapping[str, Mapping[str, str]], table: Mapping[str, Any]
) -> Sequence[Sequence[str]]:
    """Return a table that compares a run's values with those the source has for its model.

    Args:
        groups: Values of the run as text, by group and by `COLUMNS`.
        table: Entry of the provenance's `tables`.

    Returns:
        A header, and a row per group. A cell has the run's value, then the source's in brackets,
        which is "-" if the source has none.
    """
    rows = [["group", *COLUMNS]]
    for group, run_values in groups.items():
        source_values = table["groups"].get(group, {})
        cells = []
        for column in COLUMNS:
            value = source_values.get(column)
            published = "-" if value is None else f"{value:.3g}"
            cells.append(f"{run_values[column]} [{published}]")
        rows.append([group, *cells])
    return rows


def _pairs(values: Mapping[str, Any]) -> str:
    """Return a mapping as "NAME=VALUE NAME=VALUE", floats to six digits."""
    pairs = []
    for name, value in values.items():
        text = f"{value:.6g}" if isinstance(value, float) else str(value)
        pairs.append(f"{name}={text}")
    return " ".join(pairs)
