"""Page of the best known settings of every model: writes docs/start/which-settings.md.

python -m scripts.pages.which_settings
"""

from __future__ import annotations

from mupax import disk
from mupax.train.studies.tables import evidence
from mupax.zoo import families
from mupax.zoo.configs import CONFIGS
from mupax.zoo.families import ModelConfig
from scripts import ROOT, harness
from scripts.pages.markdown import table

PAGE = ROOT / "docs" / "start" / "which-settings.md"
TOKENS_PER_PARAMETER = 20
"""Length of a language model's run, in tokens for each parameter outside of embeddings (Hoffmann et
al. 2022, 2203.15556)."""
IMAGE_EPOCHS = 90
IMAGES = IMAGE_EPOCHS * 1_281_167
"""Length of a vision model's run, in images: 90 epochs of ImageNet-1k."""
HEAD = f"""# Which settings should I use?

```sh
mupax plan --model gpt2-medium --tokens 10b
```

This command prints the learning rate and batch size that the best evidence gives for one model,
and a training command. The table has models of `mupax models list`. It assumes {TOKENS_PER_PARAMETER} training
tokens per parameter (without embeddings and readout) for language models, and {IMAGES:,}
images ({IMAGE_EPOCHS} epochs of ImageNet-1k) for vision models.
"""
TAIL = """
Kinds of evidence, best first:

- **measured here**: a [tuned preset](../reference/tuned.md) of mupax. It applies to models of its
  kind (images, or decoders without experts) within three doublings of measured sizes, and to runs
  up to eight times the measured length.
- **published law**: a fit to [1,073 published runs](../evidence/forecasts.md#published-runs)
  under standard parameterization. It applies to decoders without experts, within three doublings
  of 215 to 429 million parameters (without embeddings and readout) and 4 to 100 billion tokens.
- **published constants**: settings that [others published](../reference/tuned.md#published) for a
  model of the same kind, within three doublings in width and depth.

If you can, measure small models under `mup` (`mupax transfer`), and plan the
large run from the study's folder (`mupax plan MODEL --from FOLDER`). For an Adam run longer than
the study's, add `--joint sde` to `plan`, and raise `--data.batch-size` as the square root of the
tokens ([other rules](../evidence/forecasts.md#which-rule-to-use-for-a-longer-run)).

Made by `python -m scripts.pages.which_settings`.
"""


def page() -> str:
    """Return the page: a row for each model with evidence, and the names of the others."""
    rows = []
    unknown = []
    for name, model in CONFIGS.items():
        ranked = evidence.candidates_for(model, length(model))
        if ranked and ranked[0].applies:
            rows.append(_row(name, model, ranked[0]))
        else:
            unknown.append(f"`{name}`")
    head = (
        "model",
        "length",
        "learning rate (AdamW unless named)",
        "interval",
        "batch",
        "`--preset`",
        "evidence",
    )
    nothing = f"At these lengths no evidence applies to {', '.join(unknown)}."
    return f"{HEAD}\n{table([head, *rows])}\n\n{nothing}\n{TAIL}"


def length(model: ModelConfig) -> float:
    """Return the length of a model's run, in tokens or images."""
    if model.unit == "image":
        return IMAGES
    return float(TOKENS_PER_PARAMETER * evidence.body_parameters(model))


def _row(name: str, model: ModelConfig, best: evidence.Evidence) -> tuple[str, ...]:
    """Return the table row of a model with its best evidence."""
    ends = best.rate_interval
    # A tuned preset is named in its own column.
    source = best.source.removeprefix(f"{best.preset}, ").removeprefix(best.preset)
    interval = "not known"
    if ends is not None:
        interval = f"{ends[0]:.2g} to {ends[1]:.2g} ({best.level} %)"
    batch = "not known" if best.batch is None else f"{best.batch:.0f}"
    rate = f"{best.peak_lr:.3g}"
    if best.optimizer != evidence.LAW_OPTIMIZER:
        rate += f" ({best.optimizer})"
    return (
        f"`{name}` ({families.params(model):,})",
        f"{length(model):.2g} {model.unit}s",
        rate,
        interval,
        batch,
        f"`{best.preset}`",
        f"{best.kind}: {source}" if source else best.kind,
    )


def main() -> None:
    """Write the page to docs/start/which-settings.md."""
    disk.write_whole(PAGE, page())


if __name__ == "__main__":
    harness.refuse_words()
    main()
