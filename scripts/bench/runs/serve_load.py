"""Throughput of a server with one client and with several at once, in turns on one server.

    mupax train lm-laptop --workdir runs/lm-laptop
    python -m scripts.bench.runs.serve_load runs/lm-laptop [--clients 8] [--tokens 128] [--rounds 5] [--json FILE.json]

Every client asks for one text of `--tokens` tokens, with a seed of its own. Every text must be the one that the server
writes when its client is alone. One client's throughput is also given for `mupax.train.reuse.generate.decode.Generator`,
which writes one text at a time and needs no HTTP.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import http.client
import json
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mupax.train.reuse.generate.sampling import Sampling
from mupax.train.reuse.serve import command
from mupax.train.reuse.serve.server import Server
from scripts.bench.in_turns import machine

PROMPT = "def main("


def main(argv: Sequence[str] | None = None) -> int:
    """Print the rates and their ratio. Return 1 if a text differs from the one that its client gets alone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workdir", type=Path)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    with serving(args.workdir) as server:
        result = measure(server, args.clients, args.tokens, args.rounds)
    print(json.dumps(result, indent=2))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    return int(not result["same_texts"])


@contextlib.contextmanager
def serving(workdir: Path) -> Iterator[Server]:
    """Serve a run in a thread while entered."""
    args = command.Serve(workdir=workdir, port=0)
    with Server(args.host, args.port) as server:
        server.service = command.opened_service(args)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
            server.service.close()


def measure(server: Server, clients: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Return tokens per second of one client, and of several at once, by the median over rounds."""
    alone = [ask(server, seed, tokens) for seed in range(clients)]  # which compiles
    rates: dict[str, list[float]] = {"one client": [], f"{clients} clients": [], "generator, one text": []}
    same_texts = True
    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        for _ in range(rounds):
            began = time.monotonic()
            ask(server, 0, tokens)
            rates["one client"].append(tokens / (time.monotonic() - began))
            began = time.monotonic()
            together = list(pool.map(lambda seed: ask(server, seed, tokens), range(clients)))
            rates[f"{clients} clients"].append(clients * tokens / (time.monotonic() - began))
            same_texts = same_texts and together == alone
            rates["generator, one text"].append(generator_rate(server, tokens))
    medians = {name: round(statistics.median(values), 1) for name, values in rates.items()}
    ratio = medians[f"{clients} clients"] / medians["one client"]
    return {
        "tokens_per_s": medians,
        "ratio": round(ratio, 2),
        "same_texts": same_texts,
        "tokens": tokens,
        "rounds": rounds,
        "machine": machine(),
    }


def ask(server: Server, seed: int, tokens: int) -> str:
    """Return the text of one request."""
    fields = {"prompt": PROMPT, "max_tokens": tokens, "temperature": 1, "seed": seed, "ignore_eos": True}
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=600)
    connection.request("POST", "/v1/completions", json.dumps(fields), {"Content-Type": "application/json"})
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return answer["choices"][0]["text"]


def generator_rate(server: Server, tokens: int) -> float:
    """Return tokens per second of the generator, while the server is idle."""
    assert server.service is not None
    generator = server.service.worker.generator
    prompt = np.frombuffer(PROMPT.encode(), np.uint8).astype(np.int32)
    began = time.monotonic()
    for _ in generator.stream(prompt, tokens, sampling=Sampling(temperature=1.0)):
        pass
    return tokens / (time.monotonic() - began)


if __name__ == "__main__":
    sys.exit(main())
