"""`python -m zoo import PATH --out FOLDER` and `python -m zoo export PATH --out FOLDER`.

import reads weights of Hugging Face (config.json and safetensors) and writes them in a preset's form, for
`python -m train ... --init-from FOLDER`. export writes a run, or weights imported before, as `transformers` reads them:
multipliers are folded into the weights, and config.json says which.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mupax import presets
from mupax.presets import constants
from mupax.train.config.devices import check_words
from mupax.train.config.run import PresetConfig

if TYPE_CHECKING:
    from mupax.train.reuse.source import Source

CONSTANTS = ("alpha_a", "alpha_l", "gamma0", "beta0")


def main(argv: Sequence[str]) -> int:
    """Run `import ...` or `export ...`; 0 when done.

    Raises:
        ValueError: of this project's kinds; bad input.
    """
    try:
        args = _parser().parse_args(list(argv))
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 2
    check_words(argv)
    return {"import": _import, "export": _export}[args.command](args)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m zoo", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    kind = argparse.RawDescriptionHelpFormatter
    into = commands.add_parser("import", help="weights of Hugging Face in a preset's form", formatter_class=kind)
    into.add_argument("path", type=Path, metavar="PATH", help="folder with config.json and safetensors, or its file")
    into.add_argument("--preset", default="sp", metavar="NAME", help="`python -m presets` lists them (default sp)")
    into.add_argument(
        "--base", "--preset.base", metavar="MODEL", help="model that factors are relative to; else absolute"
    )
    into.add_argument("--form", "--preset.form", choices=presets.FORMS, help="where multipliers sit")
    for name in CONSTANTS:
        flag = name.replace("_", "-")
        into.add_argument(f"--{flag}", f"--preset.{flag}", dest=name, type=float, metavar="X", help="of the preset")
    into.add_argument(
        "--constants", "--preset.constants", nargs="+", default=(), metavar="NAME=VALUE", help="others of the preset"
    )
    out = commands.add_parser("export", help="a run as transformers reads it", formatter_class=kind)
    out.add_argument("path", type=Path, metavar="PATH", help="workdir, workdir/checkpoints/STEP, or an imported folder")
    out.add_argument("--step", type=int, metavar="N", help="which checkpoint of a workdir; the newest unless given")
    out.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], default="float32", help="of the stored weights"
    )
    out.add_argument(
        "--tokenizer", type=Path, metavar="FILE", help="tokenizer.json to add where the run's is not found"
    )
    for command in (into, out):
        command.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="a new or empty folder")
    return parser


def _import(args: argparse.Namespace) -> int:
    from mupax.train.reuse import source as pretrained
    from mupax.train.reuse.huggingface import files as pretrained_files

    given = PresetConfig(
        name=args.preset,
        base=args.base,
        form=args.form,
        constants=tuple(f"{name}={value}" for name, value in constants.read(args.constants).items()),
        **{name: getattr(args, name) for name in CONSTANTS},
    )
    pretrained_files.check_free(args.out)
    source = pretrained.read(args.path)
    preset = pretrained_files.write_imported(source, given, args.out, str(args.path))
    _say(source, preset)
    print(f"written to {args.out} under {preset['described']}")
    return 0


def _export(args: argparse.Namespace) -> int:
    from mupax.train.data.text import tokenizer
    from mupax.train.reuse import source as pretrained
    from mupax.train.reuse.huggingface import files as pretrained_files

    pretrained_files.check_free(args.out)
    source = pretrained.read(args.path, args.step)
    name, file = _tokenizer(source, args.tokenizer)
    separator = tokenizer.Subwords(file).separator if file else tokenizer.Bytes().separator if name == "bytes" else None
    pretrained_files.write_huggingface(source, args.out, args.dtype, separator)
    if file is not None and separator is not None:
        pretrained_files.copy_tokenizer(file, separator, args.out)
    _say(source, source.preset)
    print(f"written to {args.out}" + (f"; folded from {source.preset.get('described')}" if source.preset else ""))
    if name == "bytes":
        print("tokens are bytes, ids 0 to 255, for which there is no tokenizer.json: ids = list(text.encode())")
    elif name and file is None:
        print(f"the tokenizer {name} was not found on this machine; give its file as --tokenizer FILE")
    return 0


def _tokenizer(source: Source, given: Path | None) -> tuple[str | None, Path | None]:
    """What the run calls its tokenizer, and the file of it."""
    from mupax.train.data import cache
    from mupax.train.data.records import corpus
    from mupax.train.data.text import tokenizer

    if given is not None or source.run is None or source.model.task != "tokens":
        return None, given
    config, facts = source.run
    name, data = config.data.tokenizer, config.data.name
    if name == "bytes":
        return name, None
    size = tokenizer.bpe_size(name)
    if size is None:
        file = Path(name).expanduser()
    elif data.startswith("text:") and Path(data.removeprefix("text:")).expanduser().exists():
        files = corpus.text_files(Path(data.removeprefix("text:")).expanduser(), print)
        file = cache.root() / "tokenizers" / f"bpe{size}-text-{corpus.stat_digest(files)}.json"
    else:
        file = cache.root() / "tokenizers" / f"bpe{size}-{data}-{facts.get('text_digest')}.json"
    return name, file if file.is_file() else None


def _say(source: Source, preset: dict[str, Any]) -> None:
    from mupax.terminal import si

    model, sizes = source.model, source.model.sizes()
    count = si(sum(value.size for value in source.params.values()))
    print(
        f"{model.family}: width {sizes['embed']}, depth {sizes['layers']}, {sizes['heads']} heads, {model.input_text}; {count} parameters"
    )
    for note in source.notes:
        print(note)
    if times := preset.get("norm_eps_times"):
        print(f"skips are folded into the branches: exact but for the norms' eps, which counts up to {times:.3g} times")
