"""Text with a cache of keys and values against the whole context read anew for every token: one greedy text each.

python -m scripts.bench.runs.generate [--models lm-tiny gpt2] [--rounds 3] [--json FILE.json]
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mupax.train.config.run import Config, DataConfig, MeshConfig, PresetConfig
from mupax.train.core.program import assemble
from mupax.train.core.step import logits_of
from mupax.train.reuse.generate.decode import Generator
from mupax.train.reuse.generate.sampling import Sampling
from mupax.zoo import configs
from mupax.zoo.configs import DecoderConfig
from scripts.bench.in_turns import add_arguments, compared, in_turns, machine, one_core, write

PROMPT = 8
SMALLER = {"gpt2": {"width": 256, "num_heads": 4, "depth": 4, "vocab_size": 2048, "seq_len": 256}}
"""Of models too slow for two cores without a cache: what is made smaller."""


def measure(name: str, rounds: int, *, tiny: bool = False) -> dict[str, Any]:
    """Times and ratio of a text that fills the context; both ways must write the same tokens."""
    model = dataclasses.replace(configs.get(name), **SMALLER.get(name, {}))
    assert isinstance(model, DecoderConfig)
    if tiny:
        model = dataclasses.replace(model, width=32, num_heads=2, depth=1, seq_len=24)
    data, preset = DataConfig(name="text:none", batch_size=1), PresetConfig(name="sp")
    config = Config(recipe=name, model=model, data=data, preset=preset, mesh=MeshConfig(data=1), steps=1)
    program = assemble(config, jax.devices()[:1])
    params, numbers = program.initial_state().params, program.step_inputs()
    prompt, length = np.arange(1, 1 + PROMPT, dtype=np.int32), model.seq_len - PROMPT
    generator = Generator(program, params, numbers, sampling=Sampling(temperature=0))

    @jax.jit
    def next_token(params: Any, window_BT: jax.Array, position: jax.Array) -> jax.Array:
        logits_BTV = logits_of(program.definition, params, numbers, window_BT)
        return jnp.argmax(logits_BTV[0, position])

    def uncached() -> np.ndarray:
        window_BT = np.zeros((1, model.seq_len), np.int32)
        window_BT[0, :PROMPT] = prompt
        for end in range(PROMPT, model.seq_len):
            window_BT[0, end] = next_token(params, window_BT, np.int32(end - 1))
        return window_BT[0, PROMPT:]

    ways = {
        "cached": lambda: generator.complete(prompt, length)[0],
        "uncached": uncached,
    }
    np.testing.assert_array_equal(ways["cached"](), ways["uncached"]())
    result = compared(in_turns(ways, rounds, steps_per_turn=1), "cached")
    rates = {way: round(1e3 * length / ms, 1) for way, ms in result["ms"].items()}
    sizes = {"width": model.width, "depth": model.depth, "seq_len": model.seq_len}
    return {"model": name, **sizes, "tokens": length, "tokens_per_s": rates, **result}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; returns the exit code 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["lm-tiny", "gpt2"], metavar="NAME", help="decoders of the zoo")
    add_arguments(parser, 3)
    args = parser.parse_args(argv)
    if args.one_core:
        one_core()
    results = [measure(name, args.rounds, tiny=args.tiny) for name in args.models]
    for result in results:
        rates = " and ".join(f"{rate:,.0f} tokens/s {way}" for way, rate in result["tokens_per_s"].items())
        print(f"{result['model']}: {1 / result['ratio']['uncached']:.1f} times as fast with the cache, {rates}")
    write({"benchmark": "generate", **machine(), "results": results}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
