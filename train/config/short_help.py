"""The flags that `mupax train RECIPE --help` lists: those in use. `--help all` and `--help SECTION` list the others."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from mupax.command_line import FlagHelp, UsageError

COMMON = frozenset(
    (
        "--model",
        "--dry-run",
        "--print-config",
        "--restart",
        "--steps",
        "--seed",
        "--workdir",
        "--resume",
        "--resume-change",
        "--resume-from",
        "--accumulation-steps",
        "--train-only",
        "--init-from",
        "--preset.name",
        "--preset.base",
        "--preset.alpha-l",
        "--preset.constants",
        "--preset.joint",
        "--optimizer.name",
        "--optimizer.peak-lr",
        "--optimizer.warmup-steps",
        "--optimizer.weight-decay",
        "--optimizer.clip-norm",
        "--optimizer.schedule",
        "--data.name",
        "--data.batch-size",
        "--data.tokenizer",
        "--data.eval-examples",
        "--data.eval-batch-size",
        "--data.evaluate",
        "--data.mix",
        "--data.augment",
        "--data.chat-template",
        "--data.separator",
        "--data.field",
        "--data.document-mask",
        "--model.width",
        "--model.depth",
        "--model.num-heads",
        "--model.seq-len",
        "--model.vocab-size",
        "--model.experts",
        "--model.active-experts",
        "--model.patch-size",
        "--model.image-size",
        "--model.compute.dtype",
        "--model.compute.attention",
        "--model.compute.remat",
        "--mesh.data",
        "--mesh.fsdp",
        "--mesh.tensor",
        "--mesh.sequence",
        "--ema.decay",
        "--log.eval-every-steps",
        "--log.samples",
        "--log.tensorboard",
        "--log.progress",
        "--checkpoint.every-steps",
        "--checkpoint.keep",
        "--checkpoint.keep-best",
        "--stop.patience",
    )
)
"""Flags that the documents, examples and tests use most, over all recipes."""
RUN = "run"
"""Section of the flags that have no dot in their name."""


def section_of(flag: str) -> str:
    """Return the section that a flag is listed in: `model` of `--model.compute.dtype`."""
    owner, dot, _ = flag.removeprefix("--").partition(".")
    return owner if dot else RUN


def flag_help(argv: Sequence[str], fields: Sequence[Sequence[str]], prog: str) -> FlagHelp | None:
    """Return what the help that the words ask for lists; None for all flags, or where no help is asked for.

    Args:
        argv: words of the command line.
        fields: the names of every flag, its own before aliases.
        prog: what stands before the flags.

    Raises:
        UsageError: the word after `--help` is no section.
    """
    places = [place for place, word in enumerate(argv) if word in ("-h", "--help")]
    if not places:
        return None
    section = next(iter(argv[places[0] + 1 :]), "")
    sections = list(dict.fromkeys([RUN, *(section_of(names[0]) for names in fields)]))
    if section == "all":
        return None
    if not section or section.startswith("-"):
        shown = [names for names in fields if names[0] in COMMON]
        lists = f"These are the flags in use. `{prog} --help all` lists all {len(fields)}"
    elif section in sections:
        shown = [names for names in fields if section_of(names[0]) == section]
        lists = f"`{prog} --help all` lists all {len(fields)} flags"
    else:
        raise UsageError(f"--help {section}: write all, or one of {', '.join(sections)}")
    listed = frozenset(itertools.chain.from_iterable(shown))
    return FlagHelp(listed, f"{lists}, `--help SECTION` those of one: {', '.join(sections)}.")
