"""From text of one's own to a model that writes it, here and elsewhere: records, a tokenizer, the best rate of a small model, a larger one.

    python examples/own_text.py

in a new folder: the texts are what Python's standard library says of itself, a docstring a line of JSON. Each line that it
prints can be typed with another folder. About three minutes on two CPU cores. Flags go to the larger run, such as `--steps 60`.
The last part needs `transformers` and is left out where that is not installed.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import inspect
import io
import json
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mupax.__main__ import main as mupax

DATA = "--data.name records:mine --data.document-mask --data.tokenizer bpe:1024 --model.vocab-size 1024"
SMALL = "--model lm-proxy --model.depth 2 --model.seq-len 64"
LARGE = f"{SMALL} --model.width 128 --model.num-heads 4 --model.depth 4"
PROMPT, TOKENS = "Return the ", 40
ABSENT = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]


def docstrings(most: int) -> Iterator[str]:
    """What modules, classes and functions of the standard library say of themselves.

    Args:
        most: how many.
    """
    count = 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (
                text := ast.get_docstring(node)
            ):
                yield inspect.cleandoc(text)
                count += 1
                if count == most:
                    return


def run(words: str) -> str:
    """What a command prints; its line is shown first.

    Raises:
        SystemExit: it failed.
    """
    argv = shlex.split(words)
    print(f"$ mupax {shlex.join(argv)}", flush=True)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = mupax(argv)
    if code:
        print(out.getvalue())
        raise SystemExit(code)
    return out.getvalue()


def served(workdir: str, *flags: str) -> str:
    """The likeliest text as a server of the model answers it, which is started on a free port and stopped again.

    Args:
        workdir: of the run.
        *flags: of `mupax serve`.

    Raises:
        SystemExit: the server did not start.
    """
    words = ["serve", workdir, "--port", "0", *flags]
    print(f"$ mupax {shlex.join(words)}", flush=True)
    command = [sys.executable, "-u", "-m", "mupax", *words]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert server.stdout is not None
    try:
        lines: list[str] = []
        while not (address := re.search(r"http://[^\s;]+", lines[-1] if lines else "")):
            lines.append(server.stdout.readline())
            if not lines[-1]:
                raise SystemExit("".join(lines))
        body = json.dumps({"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}).encode()
        url = f"{address[0].rstrip('/')}/v1/completions"
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)["choices"][0]["text"]
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(timeout=30)
        server.stdout.close()


def elsewhere(folder: Path) -> str:
    """The likeliest text as `transformers` writes it with an exported folder; it ends where a document does."""
    import transformers

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = tokenizer(PROMPT, return_tensors="pt")
    written = model.generate(
        **ids, max_new_tokens=TOKENS, do_sample=False, pad_token_id=tokenizer.eos_token_id
    )
    return tokenizer.decode(written[0], skip_special_tokens=True)


def main(
    lr: str = "2^-9:2^-4:6",
    small: str = "--steps 150 --optimizer.warmup-steps 15",
    large: str = "--steps 400",
    texts: int = 4000,
) -> tuple[str, str | None]:
    """All of it, in the present folder; the likeliest text that the model writes here, and elsewhere: None without `transformers`.

    Args:
        lr: rates of the sweep.
        small: flags of its runs.
        large: flags of the run that uses its best rate.
        texts: how many records are made.
    """
    if ABSENT:
        print(
            f"not installed: {' and '.join(ABSENT)}; the last part is left out, until pip install 'mupax[torch]'"
        )
    Path("mine").mkdir()
    lines = (json.dumps({"text": text}) for text in docstrings(texts))
    Path("mine/docstrings.jsonl").write_text("\n".join(lines) + "\n")
    print(run("data prepare records:mine --tokenizer bpe:1024"))
    print(run(f"sweep lm-tiny {SMALL} {DATA} --lr {lr} --preset mup --save-tuned own {small}"))
    print(run("presets tuned mup:own"))
    run(f"train lm-tiny {LARGE} {DATA} --preset mup:own --workdir runs/mine {large}")
    print(run("eval runs/mine"))
    print(run(f"generate runs/mine --prompt '{PROMPT}' --tokens {TOKENS} --seed 1"))
    here = run(f"generate runs/mine --prompt '{PROMPT}' --tokens {TOKENS} --temperature 0")
    print(f"the server answers {served('runs/mine')!r}")
    run("export runs/mine --out exported")
    if ABSENT:
        return here, None
    there = elsewhere(Path("exported"))
    print(f"transformers writes {'the same' if here.startswith(there) else f'otherwise: {there}'}")
    return here, there


if __name__ == "__main__":
    main(large=" ".join(["--steps 400", *sys.argv[1:]]))
