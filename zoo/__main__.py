"""Named models: `python -m zoo` lists them, `python -m zoo describe NAME` prints the parameter tree of one.

`import` and `export` carry weights from and to the files of Hugging Face's `transformers`.
`--json` prints a list or tree as JSON. Exit codes: 0 done, 2 bad input (one message on stderr).
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import sys
from collections.abc import Sequence
from typing import Any

from mupax import terminal
from mupax.zoo.families import ModelConfig

USAGE = """usage: python -m zoo [list] [--json]             names, sizes, parameters, FLOPs of one forward pass
       python -m zoo describe NAME [--json]     every parameter: path, role, shape, axes, count
       python -m zoo import PATH --out FOLDER   weights of Hugging Face in a preset's form (import --help)
       python -m zoo export PATH --out FOLDER   a run as transformers reads it (export --help)"""

COLUMNS = ("model", "family", "width", "depth", "heads", "head_dim", "mlp", "input", "parameters", "forward FLOPs")

LEFT = ("model", "family", "input", "path", "role", "shape", "axes")
"""Columns of words; the others hold numbers and align right."""


@terminal.quiet_in_pipes
def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code.

    Args:
        argv: the words after `python -m zoo`; those of the process unless given.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] in (["import"], ["export"]):
        return _carry(argv)
    if "-h" in argv or "--help" in argv:
        print(USAGE)
        return 0
    as_json = "--json" in argv
    words = [word for word in argv if word != "--json"]
    if flags := [word for word in words if word.startswith("-")]:
        return _wrong(f"no flag is named {flags[0]}; the only one is --json")
    match words:
        case [] | ["list"]:
            return _list(as_json)
        case ["describe", name]:
            return _describe(name, as_json)
        case ["describe", *names]:
            return _wrong(f"describe takes one model name, not {len(names)}; `python -m zoo` lists them")
        case ["list", word, *_]:
            return _wrong(f"list takes no words, not {word!r}; write `python -m zoo describe {word}` for one model")
        case [word, *_]:
            from mupax.zoo.configs import CONFIGS

            if word in CONFIGS:
                return _wrong(f"{word} is a model, not a command; write `python -m zoo describe {word}`")
            near = difflib.get_close_matches(word, ["list", "describe", "import", "export"], n=1)
            hint = f"did you mean {near[0]}?" if near else "write list, describe NAME, import PATH or export PATH"
            return _wrong(f"no command is named {word!r}; {hint}")
    return 2


def _carry(argv: list[str]) -> int:
    from mupax.train.reuse.huggingface import command

    try:
        return command.main(argv)
    except ValueError as error:
        if type(error).__module__.partition(".")[0] != "mupax":
            raise
        return _wrong(str(error))


def _wrong(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


def _list(as_json: bool) -> int:
    from mupax.zoo.configs import CONFIGS

    summaries = [_summary(name, model) for name, model in CONFIGS.items()]
    if as_json:
        print(json.dumps(summaries, indent=2))
        return 0
    rows: list[Sequence[str]] = [COLUMNS]
    for model, row in zip(CONFIGS.values(), summaries, strict=True):
        sizes = [str(row["sizes"].get(axis, "")) for axis in ("embed", "layers", "heads", "head_dim", "mlp")]
        counted = [terminal.si(row["parameters"]), f"{terminal.si(row['forward_flops'])} / {model.unit}"]
        rows.append([row["name"], model.family, *sizes, model.input_text, *counted])
    print(terminal.table(rows, left=LEFT))
    return 0


def _describe(name: str, as_json: bool) -> int:
    from mupax.zoo import configs

    try:
        model = configs.get(name)
    except configs.ConfigError as error:
        return _wrong(str(error))
    row, rows = _summary(name, model), _tree(model)
    if as_json:
        print(json.dumps({**row, "tree": rows}, indent=2))
        return 0
    print(
        terminal.wrapped(
            f"{name}: {model.family}, " + ", ".join(f"{axis} {size}" for axis, size in row["sizes"].items())
        )
    )
    table = [["path", "role", "shape", "axes", "parameters"]]
    for leaf in rows:
        fan_in = set(leaf["fan_in"])
        axes = " ".join(f"{axis}*" if axis in fan_in else axis for axis in leaf["axes"])
        table.append([leaf["path"], leaf["role"], " ".join(map(str, leaf["shape"])), axes, f"{leaf['count']:,}"])
    table.append(["total", "", "", "* fan-in", f"{sum(leaf['count'] for leaf in rows):,}"])
    print(f"\n{terminal.table(table, left=LEFT)}\n")
    print(f"{terminal.si(row['forward_flops'])}FLOPs per {model.unit}, one forward pass")
    return 0


def _summary(name: str, model: ModelConfig) -> dict[str, Any]:
    """Sizes, parameters and FLOPs of a model, plain values."""
    from mupax.zoo import flops

    return {
        "name": name,
        "family": model.family,
        "sizes": model.sizes(),
        "parameters": flops.params(model),
        "forward_flops": flops.forward_flops(model),
        "per": model.unit,
        "config": dataclasses.asdict(model),
    }


def _tree(model: ModelConfig) -> list[dict[str, Any]]:
    """One row per parameter: path, role, shape, axes, fan_in, count."""
    sizes = model.sizes()
    return [
        {
            "path": path,
            "role": f"{spec.of.value} {spec.role.value}" if spec.of else spec.role.value,
            "shape": (shape := [sizes[axis] for axis in spec.axes]),
            "axes": list(spec.axes),
            "fan_in": list(spec.fan_in),
            "count": math.prod(shape),
        }
        for path, spec in sorted(model.parameters().items())
    ]


if __name__ == "__main__":
    sys.exit(main())
