"""The page and the picture of `scripts.studies.published_runs`, from its results alone.

python -m scripts.studies.published_runs_page
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from mupax import disk
from scripts.pages.markdown import table
from scripts.studies.published_runs import CLAIMS, FORECAST, JOINT, PAGE, PICTURE, RESULT

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")
"""Of Okabe and Ito, which color-blind readers tell apart."""
TITLE = "# Published runs: a law of 1,073 of them, and eight forecasts"
OPENING = """
You plan a model of 1 B parameters and have no runs of your own near it. Somebody published 1,073 runs of dense decoders (215 to 429 million
parameters without embeddings, 4 to 100 billion tokens, sequences of 2,048, cosine decay, standard parameterization, a grid of
learning rates and batches). One command fits a law to such a table and answers:

```text
mupax plan --from TABLE.csv --parameters 1.07e9 --tokens 56.9b --peak-lr 2e-3 --batch-sequences 512
```

It prints the best rate and batch, the loss there and at the rate and batch that you ask for, each with a 90 % interval, and which run
would narrow the interval most; `--flops 1e21` asks for the best size and length instead.
[Plan from a table](forecasts.md#plan-from-a-table-of-runs) says
what a table must have. The law's form, its priors and its intervals stand in `train/studies/tables/law.py` and `forecast.py`.
"""


def render() -> None:
    """Write the page and its picture."""
    result = disk.read_json(RESULT)
    _draw(result)
    disk.write_whole(PAGE, text(result, forecasts()))


def forecasts() -> list[dict[str, Any]]:
    """Return the committed forecasts."""
    return json.loads(FORECAST.read_text())


def text(result: dict[str, Any], forecast: list[dict[str, Any]]) -> str:
    """Return the page."""
    sections = (
        [TITLE, "", OPENING.strip(), ""],
        _forecasts(forecast),
        _left_out(result),
        _exponents(result),
        _rules(result),
        _isoflop(result),
        _source(result),
    )
    return "\n".join(line for section in sections for line in section) + "\n"


def _forecasts(forecast: list[dict[str, Any]]) -> list[str]:
    """Return the section of the forecasts."""
    rows = [("parameters", "tokens", "lowest loss", "90 %", "best rate", "best batch")]
    rows += [
        (
            f"{row['parameters']:,}",
            f"{row['tokens'] / 1e9:g} B",
            f"{row['loss']:.4f}",
            f"{row['low']:.4f} to {row['high']:.4f}",
            f"{row['peak_lr']:.3g}",
            f"{row['batch_sequences']}",
        )
        for row in forecast
    ]
    return [
        "## Forecasts of settings that were not seen",
        "",
        "The grid has eight more settings, whose runs were kept back. Their lowest losses, and the loss at each of 182 rates and batches, are "
        "forecast in [published-dense.json](forecasts/published-dense.json); what came will stand here.",
        "",
        table(rows),
        "",
        "The sizes that are given lie within one octave, so what is said of 1.07 billion parameters, 1.3 octaves beyond them, rests on "
        "the prior of the exponent of size (0.34 ± 0.1, Hoffmann et al. 2022); other priors within it move that loss by 0.5 %.",
        "",
    ]


def _left_out(result: dict[str, Any]) -> list[str]:
    """Return the section of the settings that were left out."""
    rows = [
        (
            "parameters",
            "tokens",
            "forecast",
            "90 %",
            "came",
            "error",
            "runs inside",
            "lost at the recommended rate and batch",
        )
    ]
    rows += [
        (
            f"{row['parameters']:,.0f}",
            f"{row['tokens'] / 1e9:g} B",
            f"{row['loss']:.4f}",
            f"{row['low']:.4f} to {row['high']:.4f}",
            f"{row['came']:.4f}",
            f"{row['error']:+.2%}",
            f"{row['points_inside']:.0%}",
            f"{row['lost']:.2%}",
        )
        for row in result["left_out"]
    ]
    settings = result["left_out"]
    inside = sum(row["inside"] for row in settings)
    controls = [("law", "median error", "median lost")]
    for name, outcomes in {"as it is": settings, **result["controls"]}.items():
        error = float(np.median([abs(row["error"]) for row in outcomes]))
        lost = float(np.median([row["lost"] for row in outcomes]))
        controls.append((name, f"{error:.2%}", f"{lost:.2%}"))
    return [
        "## Each setting left out in turn",
        "",
        table(rows),
        "",
        f"{inside} of {len(settings)} lowest losses are inside their interval. The one outside is that of 100 billion tokens, which is 2.3 "
        "octaves beyond the longest other run of its size. Controls that must be worse, and are:",
        "",
        table(controls),
        "",
    ]


def _exponents(result: dict[str, Any]) -> list[str]:
    """Return the section of the exponents."""
    rows = [("batch", "exponent of the best rate in tokens", "95 %", "settings", "by the law")]
    rows += [
        (
            str(row["batch_sequences"]),
            f"{row['exponent']:+.2f}",
            f"{row['low']:+.2f} to {row['high']:+.2f}",
            str(row["settings"]),
            f"{row['law']:+.2f}",
        )
        for row in result["exponents"]
    ]
    return [
        "## Does the best rate fall or rise with the length of training?",
        "",
        "Both, and the batch decides. Sources seem to contradict each other: T^-0.32 (Bjorck et al. 2024) and T^+0.31 (Step Law). In these "
        "runs the best rate at a *fixed* batch falls as T^-0.3 at 64 sequences and rises as T^+0.2 at 1,024. At a small batch, noise of "
        "the gradient limits the rate, and a longer run has less room for it; at a large batch too few steps limit it, and a longer "
        "run has more of them. A source that grows its batch with tokens sees the second, one that does not sees the first.",
        "",
        "![The exponent of the best rate in tokens against the batch, and the best rates themselves](published-runs/exponents.png)",
        "",
        table(rows),
        "",
        "A best rate is the lowest point of a parabola through the runs of one setting and batch within 1.2 % of their best; the exponent is "
        "one slope over all settings with a height for each model size, and its interval is Student's t of the residuals.",
        "",
    ]


def _rules(result: dict[str, Any]) -> list[str]:
    """Return the section of the rules' regret."""
    fixed = [("exponent in tokens", "source", "median lost", "9 in 10 below", "worst")]
    for name, (exponent, source) in CLAIMS.items():
        row = result["fixed_batch"][name]
        fixed.append(
            (
                f"{exponent:+g} (`{name}`)",
                source,
                f"{row['median']:.2%}",
                f"{row['high']:.2%}",
                f"{row['worst']:.2%}",
            )
        )
    joint = [("rule", "rate", "batch", "median lost", "9 in 10 below", "worst")]
    for name, row in sorted(result["joint"].items(), key=lambda pair: pair[1]["worst"]):
        rule = JOINT.get(name)
        rate = f"T^{rule.rate:g}" if rule else ""
        batch = f"T^{rule.batch:g}" if rule else ""
        joint.append(
            (name, rate, batch, f"{row['median']:.2%}", f"{row['high']:.2%}", f"{row['worst']:.2%}")
        )
    return [
        "## Which rule to use for a longer run",
        "",
        "From each model's shorter runs to its longer ones (1.8 to 25 times the tokens). With the batch that a rule's source assumes, "
        "against the best rate and batch of the longer run:",
        "",
        table(joint),
        "",
        "**Grow the batch as the square root of the tokens and the rate as the square root of the batch**: `--joint sde` with a batch of "
        "B (T/T0)^1/2. It is the best of the simple rules here, but it was picked after these runs were seen, and these are runs "
        "of one grid in standard parameterization. At fixed batch, against the best rate at that batch:",
        "",
        table(fixed),
        "",
        "Where the batch must stay, no exponent is right at every batch: take the one of the table above for yours.",
        "",
    ]


def _isoflop(result: dict[str, Any]) -> list[str]:
    """Return the section of the law of FLOPs."""
    rows = [("points up to", "forecast of", "loss", "90 %", "came", "error")]
    rows += [
        (
            f"{row['upto']:.0e}",
            f"{row['goal']:.0e}",
            f"{row['value']:.4f}",
            f"{row['low']:.4f} to {row['high']:.4f}",
            f"{row['came']:.3f}",
            f"{row['value'] / row['came'] - 1:+.2%}",
        )
        for row in result["isoflop"]
    ]
    return [
        "## A law of FLOPs alone",
        "",
        "The same command fits a table of training FLOPs and losses (`--columns flops=C`, then `--flops 1e21`). Published losses of "
        "mixtures of experts at the best size of each budget, from points up to a budget:",
        "",
        table(rows),
        "",
        "Three points hardly tell a floor from an exponent, so the first row rests on the prior of the floor, half of the lowest loss give or "
        "take a quarter.",
        "",
    ]


def _source(result: dict[str, Any]) -> list[str]:
    """Return the section on the table."""
    return [
        "## The runs",
        "",
        f"{result['table']['rows']:,} rows of the public grid of Step Law (2503.04715), sha256 `{result['table']['sha256']}`. The file has no "
        "licence, so it is not part of mupax. Step Law's own exponents were fitted to these runs; they stand above as a rival and are no "
        "prior here. Commands: `python -m scripts.studies.published_runs forecast TABLE.csv` (or `law`, `study`), then "
        "`python -m scripts.studies.published_runs_page`.",
    ]


def _draw(result: dict[str, Any]) -> None:
    """Draw the exponents, and best rates against tokens at three batches."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    rows = result["exponents"]
    batches = [row["batch_sequences"] for row in rows]
    values = np.array([row["exponent"] for row in rows])
    ends = np.array([[row["low"], row["high"]] for row in rows]).T
    errors = np.abs(ends - values)
    left.errorbar(
        batches, values, errors, fmt="o", color=COLORS[0], capsize=3, label="measured, 95 %"
    )
    left.plot(batches, [row["law"] for row in rows], "--", color=COLORS[0], label="law")
    for (name, height), color, where in zip(
        (("Step Law +0.307", 0.307), ("Bjorck et al. -0.32", -0.32)),
        COLORS[1:3],
        ("bottom", "top"),
        strict=True,
    ):
        left.axhline(height, color=color, linewidth=1)
        left.text(batches[-1], height, name, color=color, ha="right", va=where, fontsize=8)
    left.axhline(0, color="0.8", linewidth=0.8, zorder=0)
    left.set_xscale("log", base=2)
    left.set_xticks(batches, [str(batch) for batch in batches])
    left.set(
        xlabel="batch (sequences)", ylabel="exponent of the best rate in tokens", ylim=(-0.6, 0.45)
    )
    left.legend(frameon=False, fontsize=8, loc="lower right")
    drawn = [row for row in rows if row["batch_sequences"] in (64, 256, 1024)]
    for row, color, marker in zip(drawn, COLORS, "os^", strict=False):
        for size, style in ((214_663_680, "-"), (268_304_384, ":")):
            best = sorted(
                (point["tokens"], point["log2_lr"])
                for point in row["best"]
                if point["parameters"] == size
            )
            label = f"batch {row['batch_sequences']}, {size / 1e6:.0f} M"
            right.plot(
                [tokens / 1e9 for tokens, _ in best],
                [log2 for _, log2 in best],
                style + marker,
                color=color,
                label=label,
                markersize=5,
            )
    right.set_xscale("log")
    right.set_xticks([4, 10, 20, 50, 100], ["4", "10", "20", "50", "100"])
    right.minorticks_off()
    right.set(xlabel="tokens (billion)", ylabel="log2 of the best rate", ylim=(-12.2, -7.4))
    right.legend(frameon=False, fontsize=7, ncols=2, loc="lower left")
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURE, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    render()
