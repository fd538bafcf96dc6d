"""Section of docs/evidence/forecasts.md on published runs, and its picture.

    python -m scripts.studies.published_runs_page

Both are made from the results of `scripts.studies.published_runs` alone, without the runs.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from mupax import disk
from scripts import harness
from scripts.pages import markdown
from scripts.pages.markdown import table
from scripts.studies.published_runs import CLAIMS, FORECAST, JOINT, PAGE, PICTURE, RESULT

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PART = "published runs"
"""Name of the section's markers in the page."""
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")
"""Palette of Okabe and Ito, which color-blind readers can tell apart."""
OPENING = """## Published runs

A table of runs gets another law (`train/studies/tables/law.py`). mupax comes with this law fitted to
1,073 published runs of dense decoders in standard parameterization, with 215 to 429 million parameters
without embeddings and 4 to 100 billion tokens. Without `--from`, `mupax plan --model NAME` uses this
fit for dense decoders at most three doublings outside these ranges, unless a tuned preset measured
by mupax applies ([which settings](../start/which-settings.md)).
"""


def render() -> None:
    """Draw the picture and write the section into docs/evidence/forecasts.md."""
    result = disk.read_json(RESULT)
    _draw(result)
    disk.write_whole(PAGE, page(PAGE.read_text(), result, forecasts()))


def forecasts() -> list[dict[str, Any]]:
    """Return the committed forecasts of the settings whose runs were not seen."""
    return json.loads(FORECAST.read_text())


def page(text: str, result: dict[str, Any], forecast: list[dict[str, Any]]) -> str:
    """Return the text of docs/evidence/forecasts.md with its section on published runs replaced.

    Args:
        text: Text of the page, which has the markers of `PART`.
        result: Content of the file `RESULT`.
        forecast: Content of the file `FORECAST`.
    """
    parts = [
        OPENING,
        _forecasts(forecast),
        _left_out(result),
        _exponents(result),
        _rules(result),
        _isoflop(result),
        _source(result),
    ]
    return markdown.replaced(text, PART, "\n" + "\n".join(parts))


def _forecasts(forecast: list[dict[str, Any]]) -> str:
    """Return the section about settings whose runs were not seen."""
    points = len(forecast[0]["points"])
    return f"""### Settings that were not seen

[published-dense.json](forecasts/published-dense.json) has forecasts for {len(forecast)} unseen
pairs of model size (up to 1.07 B) and tokens: the lowest loss, the best learning rate and batch,
and the loss at {points} pairs of rate and batch.
"""


def _left_out(result: dict[str, Any]) -> str:
    """Return the section about fitted settings that were left out in turn, with the controls."""
    settings = result["left_out"]
    controls = [["law", "median error", "median lost"]]
    for name, outcomes in {"this law": settings, **result["controls"]}.items():
        error = float(np.median([abs(row["error"]) for row in outcomes]))
        lost = float(np.median([row["lost"] for row in outcomes]))
        controls.append([name, f"{error:.2%}", f"{lost:.2%}"])

    inside = sum(row["inside"] for row in settings)
    worst_error = max(abs(row["error"]) for row in settings)
    worst_lost = max(row["lost"] for row in settings)
    return f"""### Each setting left out in turn

A law fitted to all other pairs of model size and tokens forecasts each pair's lowest loss.
*Error* is the forecast over the measured loss, less 1. *Lost* is how far the run nearest to the
recommended learning rate and batch ends above the pair's best run.

{inside} of the {len(settings)} measured losses are inside the forecast's 90 % interval. The one outside has 100
billion tokens, five times as many as the longest other run of its size. Errors are at most {worst_error:.2%},
and the largest *lost* is {worst_lost:.2%}.

Two controls forecast worse, as they must: laws fitted to shuffled learning rates or without tokens.

{table(controls)}
"""


def _exponents(result: dict[str, Any]) -> str:
    """Return the section about the exponent of the best rate in tokens at each batch."""
    rows = [["batch", "exponent in tokens", "95 %", "exponent of the law"]]
    for row in result["exponents"]:
        rows.append(
            [
                str(row["batch_sequences"]),
                f"{row['exponent']:+.2f}",
                f"{row['low']:+.2f} to {row['high']:+.2f}",
                f"{row['law']:+.2f}",
            ]
        )
    picture = "![Exponents in tokens and best rates](published-runs/exponents.png)"
    return f"""### Does the best rate fall or rise with the length of training?

At small batches, the best learning rate falls with the number of tokens T. From batches of 1024 on, it
rises. At 256 and 512, the exponent's interval includes 0. This can explain why the published rules
below disagree.

{picture}

{table(rows)}

Each measured exponent is a slope over seven to nine pairs of model size and tokens.
"""


def _rules(result: dict[str, Any]) -> str:
    """Return the section about the loss that each rule for longer runs costs."""
    fixed = [["exponent in tokens", "source", "median lost", "worst"]]
    for name, (exponent, source) in CLAIMS.items():
        row = result["fixed_batch"][name]
        fixed.append(
            [f"{exponent:+g} (`{name}`)", source, f"{row['median']:.2%}", f"{row['worst']:.2%}"]
        )

    joint = [["rule", "rate", "batch", "median lost", "worst"]]
    for name, row in sorted(result["joint"].items(), key=lambda pair: pair[1]["worst"]):
        rate = ""
        batch = ""
        if name in JOINT:
            rate = f"T^{JOINT[name].rate:g}"
            batch = f"T^{JOINT[name].batch:g}"
        joint.append([name, rate, batch, f"{row['median']:.2%}", f"{row['worst']:.2%}"])

    return f"""### Which rule to use for a longer run

**Grow the batch as the square root of the tokens and the rate as the square root of the batch**:
`--joint sde` with a batch of B (T/T0)^1/2 for T tokens. B and T0 are those of the shorter run.

Each rule but `this law` moves the best rate and batch of a shorter run to a longer run of the same
model (1.8 to 25 times the tokens). *Lost* compares the loss with that of the longer run's best rate and batch.

{table(joint)}

The rule in bold above was picked after these runs were seen. In the next table the longer run keeps the
shorter one's batch. *Lost* compares with the best rate at this batch:

{table(fixed)}

Take the exponent for your batch from the table of exponents above.
"""


def _isoflop(result: dict[str, Any]) -> str:
    """Return the section about the law of training FLOPs."""
    rows = [["points up to", "forecast of", "loss", "90 %", "measured", "error"]]
    for row in result["isoflop"]:
        rows.append(
            [
                f"{row['upto']:.0e}",
                f"{row['goal']:.0e}",
                f"{row['value']:.4f}",
                f"{row['low']:.4f} to {row['high']:.4f}",
                f"{row['came']:.3f}",
                f"{row['value'] / row['came'] - 1:+.2%}",
            ]
        )
    return f"""### A law of FLOPs alone

A table of FLOPs and losses is enough for a forecast: `--columns flops=C --flops 1e21`.
The next law forecasts published losses of mixtures of experts, each the lowest for its FLOPs:

{table(rows)}
"""


def _source(result: dict[str, Any]) -> str:
    """Return the section about the table of runs."""
    rows = result["table"]["rows"]
    digest = result["table"]["sha256"]
    return f"""### The runs

The {rows:,} runs are rows of the public grid of Step Law (2503.04715). The file (sha256 `{digest}`)
has no licence and is not part of mupax.
`python -m scripts.studies.published_runs study TABLE.csv` and then
`python -m scripts.studies.published_runs_page` write this section.
"""


def _draw(result: dict[str, Any]) -> None:
    """Draw the exponents, and best rates against tokens at three batches."""
    import matplotlib as mpl

    # Agg draws without a display.
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    _draw_exponents(left, result["exponents"])
    _draw_best_rates(right, result["exponents"])
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURE, dpi=130)
    plt.close(figure)


def _draw_exponents(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """Draw the exponents in tokens against the batch, beside the law's and two published ones."""
    batches = [row["batch_sequences"] for row in rows]
    values = np.array([row["exponent"] for row in rows])
    ends = np.array([[row["low"], row["high"]] for row in rows]).T
    errors = np.abs(ends - values)
    axes.errorbar(
        batches, values, errors, fmt="o", color=COLORS[0], capsize=3, label="measured, 95 %"
    )
    axes.plot(batches, [row["law"] for row in rows], "--", color=COLORS[0], label="law")

    published = (
        ("Step Law +0.307", 0.307, COLORS[1], "bottom"),
        ("Bjorck et al. -0.32", -0.32, COLORS[2], "top"),
    )
    for name, height, color, alignment in published:
        axes.axhline(height, color=color, linewidth=1)
        axes.text(batches[-1], height, name, color=color, ha="right", va=alignment, fontsize=8)

    axes.axhline(0, color="0.8", linewidth=0.8, zorder=0)
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.set(
        xlabel="batch (sequences)", ylabel="exponent of the best rate in tokens", ylim=(-0.6, 0.45)
    )
    axes.legend(frameon=False, fontsize=8, loc="lower right")


def _draw_best_rates(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """Draw the best rates of two model sizes against tokens, at three batches."""
    drawn = [row for row in rows if row["batch_sequences"] in (64, 256, 1024)]
    for row, color, marker in zip(drawn, COLORS, "os^", strict=False):
        for size, style in ((214_663_680, "-"), (268_304_384, ":")):
            best = []
            for point in row["best"]:
                if point["parameters"] == size:
                    best.append((point["tokens"], point["log2_lr"]))
            best.sort()
            axes.plot(
                [tokens / 1e9 for tokens, _ in best],
                [log2_rate for _, log2_rate in best],
                style + marker,
                color=color,
                label=f"batch {row['batch_sequences']}, {size / 1e6:.0f} M",
                markersize=5,
            )
    axes.set_xscale("log")
    axes.set_xticks([4, 10, 20, 50, 100], ["4", "10", "20", "50", "100"])
    axes.minorticks_off()
    axes.set(xlabel="tokens (billion)", ylabel="log2 of the best rate", ylim=(-12.2, -7.4))
    axes.legend(frameon=False, fontsize=7, ncols=2, loc="lower left")


if __name__ == "__main__":
    harness.refuse_words()
    render()
