"""Section of docs/reference/tuned.md about published presets and sources that were left out."""

from __future__ import annotations

from typing import NamedTuple

from mupax.presets.tuned import find

HEAD = """## Published

Each of these presets has the numbers of a public config or program, read in the source at the
linked commit. Every parameter gets what the source's own rule gives it
(`tests/presets/tuned/test_published.py`). mupax measured none of them.
`mupax presets tuned PRESET:NAME` lists the source's files, what differs and what is not known.

```text
mupax train lm-1b --preset mup:cerebras-gpt --dry-run
```

prints the run's numbers beside those of the source's nearest model. Constants of parameters that
your model does not have are left out.

| preset | source | optimizer, rate | models | data |
|---|---|---|---|---|"""


class LeftOut(NamedTuple):
    """Source that was read, but that no preset is made of."""

    source: str
    looked_at: str
    """Repository, commit and file."""
    reason: str
    """Reason why no preset is made of the source."""


LEFT_OUT = (
    LeftOut(
        "MiniCPM",
        "OpenBMB/MiniCPM at 0fcc3d08330e; copies of its config.json",
        "has the multipliers; the learning rate and the initial std are in no readable file",
    ),
    LeftOut(
        "Granite 3.x",
        "copies of its config.json",
        "has the multipliers; rate, initial std and base width are in no readable file",
    ),
    LeftOut(
        "Falcon-H1",
        "tiiuae/Falcon-H1 at 9d2f5fcdc491",
        "no training config, and state-space blocks have no role here",
    ),
    LeftOut(
        "GPT-3 proxy of Tensor Programs V",
        "microsoft/mup at 19814971934e",
        "no constants of the run; the paper's tables could not be read",
    ),
    LeftOut(
        "u-muP, 1 B and 7 B",
        "graphcore-research/unit-scaling at a7b5b3cff2a4",
        "no config of the runs; the paper's tables could not be read",
    ),
    LeftOut(
        "nanoGPT-mup's muP runs",
        "EleutherAI/nanoGPT-mup at b2a5e60948d2, mutransfer_lr_owt/mup/run.sh",
        "a grid of rates; the best one is only in a figure",
    ),
    LeftOut(
        "Cerebras GPT-J 6B muP",
        "Cerebras/modelzoo at f1fd1e091dc6, params_gptj_6B_muP.yaml",
        "one size, parallel attention and MLP, and a further multiplier of 4 on attention logits",
    ),
    LeftOut(
        "Cerebras-GPT in standard parameterization",
        "Cerebras/modelzoo at f1fd1e091dc6, Cerebras_GPT/*.yaml",
        "another rate at each size; its muP runs are above",
    ),
    LeftOut(
        "Pythia's other sizes",
        "EleutherAI/pythia at a19eecb807ec",
        "another rate at each of eight sizes; two are above",
    ),
    LeftOut(
        "OLMo 1 (0724)",
        "allenai/OLMo at 59a53e3f68e5, OLMo-1B.yaml and OLMo-7B.yaml",
        "init `mitchell` differs from layer to layer, constants of groups cannot",
    ),
    LeftOut(
        "torchtitan",
        "pytorch/torchtitan at b5bcd76c66d0",
        "initial std of branch outputs differs from layer to layer (depth_scaled_std)",
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
        "NorMuon, Adam's decay by the squared rate, and parameters that models here do not have",
    ),
)


def section() -> list[str]:
    """Return the section's lines: a table of the presets and a table of the sources left out."""
    rows = [_row(find.load(path)) for path in sorted(find.PUBLISHED.glob("*.json"))]
    lines = [
        HEAD,
        *rows,
        "",
        "### Sources that were left out",
        "",
        "| source | looked at | reason |",
        "|---|---|---|",
    ]
    lines += [f"| {left.source} | {left.looked_at} | {left.reason} |" for left in LEFT_OUT]
    return [*lines, ""]


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
