"""Section of docs/reference/tuned.md about published presets and sources that were left out."""

from __future__ import annotations

from typing import NamedTuple

from mupax.presets.tuned import find

HEAD = """## Published

Each preset has the values of a public config or program at the linked commit. mupax measured none of them.
`mupax presets tuned PRESET:NAME` lists the source's files, what the preset cannot express and what is not known.

```text
mupax train lm-1b --preset mup:cerebras-gpt --dry-run
```

This command prints the run's values beside those of the source's model of nearest width. The
run leaves out constants of parameters that your model lacks.

| preset | source | optimizer, rate at the base | models | data |
|---|---|---|---|---|"""


class LeftOut(NamedTuple):
    """Source that was read, but that no preset is made of."""

    source: str
    looked_at: str
    """Repository, commit and file. The page does not show them."""
    reason: str
    """Reason why no preset is made of the source."""


LEFT_OUT = (
    LeftOut(
        "MiniCPM",
        "OpenBMB/MiniCPM at 0fcc3d08330e; copies of its config.json",
        "no readable file has the learning rate and the initial std",
    ),
    LeftOut(
        "Granite 3.x",
        "copies of its config.json",
        "no readable file has the learning rate, initial std and base width",
    ),
    LeftOut(
        "Falcon-H1",
        "tiiuae/Falcon-H1 at 9d2f5fcdc491",
        "no training config, and mupax has no state-space blocks",
    ),
    LeftOut(
        "GPT-3 proxy of Tensor Programs V",
        "microsoft/mup at 19814971934e",
        "the paper's tables could not be read",
    ),
    LeftOut(
        "u-muP (1 B and 7 B)",
        "graphcore-research/unit-scaling at a7b5b3cff2a4",
        "the paper's tables could not be read",
    ),
    LeftOut(
        "nanoGPT-mup's muP runs",
        "EleutherAI/nanoGPT-mup at b2a5e60948d2, mutransfer_lr_owt/mup/run.sh",
        "the best learning rate is only in a figure",
    ),
    LeftOut(
        "Cerebras GPT-J 6B muP",
        "Cerebras/modelzoo at f1fd1e091dc6, params_gptj_6B_muP.yaml",
        "parallel attention and MLP, which mupax does not have",
    ),
    LeftOut(
        "Cerebras-GPT in standard parameterization",
        "Cerebras/modelzoo at f1fd1e091dc6, Cerebras_GPT/*.yaml",
        "another learning rate at each size",
    ),
    LeftOut(
        "Pythia's other sizes",
        "EleutherAI/pythia at a19eecb807ec",
        "another learning rate at each size",
    ),
    LeftOut(
        "OLMo 1 (0724)",
        "allenai/OLMo at 59a53e3f68e5, OLMo-1B.yaml and OLMo-7B.yaml",
        "initial std differs from layer to layer",
    ),
    LeftOut(
        "torchtitan",
        "pytorch/torchtitan at b5bcd76c66d0",
        "initial std differs from layer to layer",
    ),
    LeftOut(
        "levanter",
        "stanford-crfm/levanter at 9263f81e8b45, config/gpt2_small.yaml",
        "matrices are initialized by another library, which was not read",
    ),
    LeftOut(
        "DeiT III",
        "facebookresearch/deit at 7e160fe43f02, README_revenge.md",
        "LAMB, which mupax does not have",
    ),
    LeftOut(
        "modded-nanogpt",
        "KellerJordan/modded-nanogpt at f411b3d346aa",
        "NorMuon, which mupax does not have",
    ),
)


def section() -> list[str]:
    """Return the section's lines: a table of the presets, and the names of sources left out."""
    rows = [_row(find.load(path)) for path in sorted(find.PUBLISHED.glob("*.json"))]
    sources = ", ".join(left.source for left in LEFT_OUT)
    left_out = (
        f"No preset is made of these sources (`scripts/pages/published.py` says why): {sources}."
    )
    return [HEAD, *rows, "", left_out, ""]


def _row(preset: find.Tuned) -> str:
    """Return the table row of one published preset, with a link to the source's commit."""
    study = preset.provenance
    source = study["source"]
    address = f"{source['repository']}/tree/{source['commit']}"
    mark = "" if study["status"] == "verified" else f", {study['status']}"
    cells = (
        f"`{preset.use}`",
        f"[{source['name']}]({address}){mark}",
        f"{preset.optimizer['name']} {preset.optimizer['peak_lr']:.4g}",
        ", ".join(table["model"] for table in study["tables"]),
        study["data"],
    )
    return f"| {' | '.join(cells)} |"
