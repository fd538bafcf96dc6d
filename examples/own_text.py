"""Own text, from records to a model that writes: tokenizer, sweep, training, server and export.

    python examples/own_text.py

Run it in a new folder. The texts are docstrings of Python's standard library, one in a line of
JSON. A sweep finds the best rate of a small model, and a larger model is trained with it. Each line
that it prints can be typed with another folder. It takes about three minutes on two CPU cores.
Flags go to the larger run, such as `--steps 60`. The last part needs `transformers` and is left out
without it.
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

DATA = (
    "--data.name records:mine --data.document-mask --data.tokenizer bpe:1024 "
    "--model.vocab-size 1024"
)
SMALL = "--model lm-proxy --model.depth 2 --model.seq-len 64"
LARGE = f"{SMALL} --model.width 128 --model.num-heads 4 --model.depth 4"
PROMPT = "Return the "
TOKENS = 40
"""Number of tokens to generate."""
ABSENT = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
"""Packages that are not installed. The comparison with `transformers` needs both."""


def docstrings(count: int) -> Iterator[str]:
    """Yield the first `count` docstrings of the standard library."""
    num_texts = 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                continue
            text = ast.get_docstring(node)
            if text:
                yield inspect.cleandoc(text)
                num_texts += 1
                if num_texts == count:
                    return


def run(words: str) -> str:
    """Print a command line, run it, and return its output.

    Args:
        words: Words of the command after `mupax`.

    Raises:
        SystemExit: The command failed.
    """
    argv = shlex.split(words)
    print(f"$ mupax {shlex.join(argv)}", flush=True)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        code = mupax(argv)
    if code:
        print(output.getvalue())
        raise SystemExit(code)
    return output.getvalue()


def served(workdir: str, *flags: str) -> str:
    """Return the greedy completion of `PROMPT` by a server that runs only for this request.

    Args:
        *flags: Additional flags of `mupax serve`.

    Raises:
        SystemExit: The server did not start.
    """
    words = ["serve", workdir, "--port", "0", *flags]
    print(f"$ mupax {shlex.join(words)}", flush=True)
    command = [sys.executable, "-u", "-m", "mupax", *words]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert server.stdout is not None
    try:
        # The server prints its address as soon as it answers.
        lines: list[str] = []
        address: re.Match[str] | None = None
        while address is None:
            lines.append(server.stdout.readline())
            if not lines[-1]:
                raise SystemExit("".join(lines))
            address = re.search(r"http://[^\s;]+", lines[-1])
        body = json.dumps({"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}).encode()
        url = f"{address[0].rstrip('/')}/v1/completions"
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)["choices"][0]["text"]
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(timeout=30)
        server.stdout.close()


def transformers_text(folder: Path) -> str:
    """Return `PROMPT` and its greedy completion by `transformers`, up to the end of a document.

    Args:
        folder: Folder that `mupax export` wrote.
    """
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
    """Prepare text, sweep, train, generate, serve and export in the current folder.

    Args:
        lr: Learning rates of the sweep, as `--lr` of `mupax sweep`.
        small: Additional flags of the sweep's runs, such as `--steps 30`.
        large: Additional flags of the larger run, which uses the best rate.
        texts: Number of docstrings that are written as records, by default 4,000.

    Returns:
        `PROMPT` with its greedy completion by mupax, and by `transformers`, or `None` if a package
        for the comparison is missing.
    """
    if ABSENT:
        print(
            f"not installed: {' and '.join(ABSENT)}; the last part is left out, until "
            "pip install 'mupax[torch]'"
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
    text = run(f"generate runs/mine --prompt '{PROMPT}' --tokens {TOKENS} --temperature 0")
    print(f"the server answers {served('runs/mine')!r}")

    run("export runs/mine --out exported")
    if ABSENT:
        return text, None
    # The text of transformers ends with the document; that of mupax goes on.
    exported_text = transformers_text(Path("exported"))
    comparison = "the same" if text.startswith(exported_text) else f"otherwise: {exported_text}"
    print(f"transformers writes {comparison}")
    return text, exported_text


if __name__ == "__main__":
    main(large=" ".join(["--steps 400", *sys.argv[1:]]))
