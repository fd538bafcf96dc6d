"""Which settings to train a model with, by the best evidence that comes with mupax: writes docs/start/which-settings.md.

python -m scripts.pages.which_settings
"""

from __future__ import annotations

from mupax import disk
from mupax.train.studies.plan import evidence
from mupax.zoo import families
from mupax.zoo.configs import CONFIGS
from mupax.zoo.families import ModelConfig
from scripts import ROOT
from scripts.pages.markdown import table

PAGE = ROOT / "docs" / "start" / "which-settings.md"
TOKENS_PER_PARAMETER = 20
"""Tokens of the page's runs for each parameter outside of embeddings (Hoffmann et al. 2022, 2203.15556)."""
IMAGES = 90 * 1_281_167
"""Images of the page's runs: 90 epochs of ImageNet-1k."""
HEAD = f"""# Which settings should I use?

```sh
mupax plan --model gpt2-medium --tokens 10b
```

answers for one model: it prints the learning rate and batch of the best evidence that applies, its interval where one is known,
the command that trains with it, and what else is known. The same for every model of `mupax models` that something is known of,
with {TOKENS_PER_PARAMETER} tokens for each parameter outside of embeddings, or {IMAGES:,} images:
"""
TAIL = """
Best first, evidence is

- **measured here**: a [tuned preset](../reference/tuned.md) of this project. It applies within three doublings of the sizes and lengths
that were   tried.
- **published law**: fitted to [1,073 runs of others](../evidence/published-runs.md), under standard parameterization. It applies within three
  doublings of their 215 to 429 million parameters and 4 to 100 billion tokens, to decoders without experts.
- **published constants**: what somebody trained a model of this size with ([tuned presets, published](../reference/tuned.md)). How far from the
  best they are is not known.

If you can afford one study, make your own instead: tune a small model under `mup` and train the large one with it
(`mupax tune`, then `mupax plan MODEL --from FOLDER`). If the run is longer than the one that was tuned, grow the batch as the square
root of the tokens and take `--joint sde`; [the measurements](../evidence/published-runs.md#which-rule-to-use-for-a-longer-run) say what other
rules cost.

Made by `python -m scripts.pages.which_settings`.
"""


def page() -> str:
    """Return the page."""
    rows = []
    unknown = []
    for name, model in CONFIGS.items():
        ranked = evidence.candidates_for(model, length(model))
        if ranked and ranked[0].applies:
            rows.append(_row(name, model, ranked[0]))
        else:
            unknown.append(f"`{name}`")
    head = ("model", "length", "rate", "90 %", "batch", "`--preset`", "evidence")
    nothing = f"Nothing is known of {', '.join(unknown)}: tune a small one."
    return f"{HEAD}\n{table([head, *rows])}\n\n{nothing}\n{TAIL}"


def length(model: ModelConfig) -> float:
    """Return the tokens or images of a model's run."""
    if model.unit == "image":
        return IMAGES
    return float(TOKENS_PER_PARAMETER * evidence.body_parameters(model))


def _row(name: str, model: ModelConfig, best: evidence.Evidence) -> tuple[str, ...]:
    """Return a model's line."""
    ends = best.rate_interval
    interval = "not known" if ends is None else f"{ends[0]:.2g} to {ends[1]:.2g}"
    batch = "not known" if best.batch is None else f"{best.batch:.0f}"
    return (
        f"`{name}` ({families.params(model):,})",
        f"{length(model):.2g} {model.unit}s",
        f"{best.peak_lr:.3g}",
        interval,
        batch,
        f"`{best.preset}`",
        f"{best.kind}: {best.source}",
    )


def main() -> None:
    """Write the page."""
    disk.write_whole(PAGE, page())


if __name__ == "__main__":
    main()
