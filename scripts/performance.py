"""Runs the named benchmarks and writes docs/performance.md from what these and earlier runs of them measured.

    python -m scripts.performance [NAME ... | --all]

Names are those of `scripts/bench` that run anywhere; all of them take an hour. Every one leaves docs/performance/NAME.json,
and the page is made from the files there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent.parent / "docs" / "performance.md"
FOLDER = PAGE.with_suffix("")
NAMES = {
    "torch_step": "A training step against PyTorch",
    "torch_parts": "Where a step's time goes, part by part",
    "preset_cost": "What a preset costs",
    "layers": "Layers as a scan, unrolled, and with fused projections",
    "attention": "Attention",
    "cross_entropy": "Cross-entropy",
    "devices": "One device and eight simulated ones",
    "generate": "Text with a cache of keys and values",
    "sweep_cost": "A sweep against runs of their own",
    "start": "From the command to the first step",
}
"""Benchmark to its heading."""

ABOUT = {
    "torch_step": "Same weights, shapes, loss and AdamW in float32, one process, in turns; the first losses agree to 1e-4. "
    "`lm`: width 256, depth 4, 8 sequences of 256 bytes. `vit`: ViT-S/16, 16 images of 64x64. The process keeps freed memory, as commands of "
    "`mupax train` do, which is worth 5 % to PyTorch and up to a third to ours: "
    "without it the ratios to torch.compile are 0.90 and 0.77.",
    "torch_parts": "Parts of the same steps, forward and backward, each compiled alone and counted as often as a step has it; the "
    "products within attention are part of it. AdamW takes the gradients' norm too, the loss counts what was right: PyTorch's do not.",
    "preset_cost": "The step of `lm` under `depth-mup` against the same model without a factor under plain `optax.adamw`.",
    "layers": "The same steps. Fused: one product for queries, keys and values, and one for an MLP's gate and up.",
    "attention": "Forward and backward, 8 sequences of 256, 8 heads of 32, float32.",
    "cross_entropy": "Loss and gradients, 4096 tokens, width 256, float32. Memory is the compiler's temporaries.",
    "devices": "The step of `lm`. Simulated devices share the cores: the ratio is what splitting costs, not what it gains.",
    "generate": "One greedy text that fills the context, by `python -m train generate`'s loop and with the whole context read anew "
    "for every token; both write the same tokens. `lm-tiny`: width 128, depth 4, 120 tokens. `gpt2`: its layout at width 256, "
    "depth 4, vocabulary 2048, 248 tokens.",
    "sweep_cost": "`lm-tiny`, 9 learning rates and 2 seeds, as `python -m train sweep` and as one `python -m train` a point, from the start of "
    "the process to its exit; some of the runs were started, and the median stands for all.",
    "start": "Processor time of a command from its start, imports and all; of a run, to the end of its first step. Cold: no compiled program "
    "is on disk. Warm: the same command again ([running.md](running.md)); its losses are bitwise the same. Data are prepared. "
    "Compiling the initializer takes 1.0 s of `lm-tiny`'s and 1.2 s of `vit-digits`'; with a draw of its own for each parameter 4.2 and "
    "7.2 s.",
}
HEAD = """# Performance

Made by `python -m scripts.performance --all` from the files in `docs/performance/`. Times are medians of rounds in which everything
compared has its turn; a ratio is the median over rounds, with its quartiles, of the first column's time over the
other's, so below 1 the first is faster. Measured on two shared x86-64 cores, whose speed drifts: quote the ratios. With
`--one-core` a process kept to one core counts its CPU time, which other work on the machine changes little.
"""
TPU = """## TPU steps compiled ahead of time

Estimated cycles, arguments and temporaries of a chip, and what it sends for gradients, by the TPU compiler (libtpu 0.0.42); no TPU
ran. Llama-3-8B on v5e:16x16 at 1x4096: `python -m train compile lm-8b --topology v5e:16x16 --model.seq-len 4096 --data.batch-size 256`.
MaxText 0.2.5 with the same shapes, types and full remat: `train_compile` with `compile_topology=v5e-256`.

| | cycles | arguments, GB | temporaries, GB | sent for gradients, GB | of it beside products |
|---|---|---|---|---|---|
| MaxText | 2.517e9 | 0.380 | 4.35 | | |
| gradients left to the compiler, chunked loss | 2.401e9 | 0.637 | 5.52 | 34.7 | |
| by hand, loss by parts of the vocabulary | 2.199e9 | 0.377 | 3.67 | 34.1 | 77 % |

The first has none of the work on rotary positions and padding, which the last has, too. `--xla-flags scatter`, before that work:
2.316e9 cycles (2.307e9 without), 15.4 GB, every matrix' ring but those of keys and values beside products; 0.12e9 of the cycles pad
what is scattered. Its flags are the compiler's experiments: they may refuse a shape, and take several times as long to compile.

Readout and loss of the same step: in chunks of tokens 180 M cycles, by parts of the vocabulary 130 M. An MLP's gate kept out of
products: 53.3 to 48.7 M cycles of a layer's backward pass.

Rotary positions by a product, state without padding, and on v6e gathers of parameters beside products, without the work above on
gradients and the loss. MaxText's 1.2 B (16 layers, width 2048, 16 heads, MLP 8192, V 32,000) has
`--xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000`. Kernels have no estimated cycles.
Ours: `python -m train compile lm-1b --topology v5e:4x4 --model.vocab-size 32000 --model.num-kv-heads 16 --model.no-tied
--data.tokenizer bpe:32000 --data.batch-size 64`; lm-8b as above, on v6e:16x16 with `--data.batch-size 512`.

| | cycles | of MaxText's | arguments, GB | temporaries, GB | gathers in the layers, GB: beside products + alone |
|---|---|---|---|---|---|
| 1.2 B, v5e:4x4, 4x2048, MaxText | 0.724e9 | | 0.905 | 1.914 | |
| before | 0.715e9 | 0.99 | 0.904 | 1.995 | 3.78 + 0.25 |
| after | 0.644e9 | 0.89 | 0.904 | 1.995 | 3.78 + 0.25 |
| 8 B, v5e:16x16, 1x4096, MaxText | 2.517e9 | | 0.380 | 4.35 | |
| before | 2.401e9 | 0.95 | 0.637 | 5.52 | 27.8 + 0 |
| after | 2.302e9 | 0.91 | 0.377 | 5.50 | 27.8 + 0 |
| 8 B, v6e:16x16, 2x4096, MaxText | 1.688e9 | | 0.380 | 5.59 | |
| before | 1.853e9 | 1.10 | 0.638 | 6.43 | 0 + 26.8 |
| after | 1.610e9 | 0.95 | 0.377 | 6.15 | 26.7 + 0 |

All of it together against MaxText (cycles as the report counts them; libtpu 0.0.42.1 for the rows "one after another" and "in the loop"):

| | cycles | of MaxText's | arguments, of MaxText's | temporaries, GB | of MaxText's |
|---|---|---|---|---|---|
| 1.2 B, v5e:4x4, 4x2048, parts of the vocabulary as the compiler ordered them | 0.652e9 | 0.90 | 1.00 | 2.29 | 1.20 |
| the same, the readout's gradient done before the layers | 0.650e9 | 0.90 | 1.00 | 1.82 | 0.95 |
| the same, parts one after another | 0.652e9 | 0.90 | 1.00 | 1.79 | 0.93 |
| the same, a layer's weights times their multipliers in the loop | 0.651e9 | 0.90 | 1.00 | 1.68 | 0.88 |
| the same, as ordered, `--model.compute.cross-entropy chunked` | 0.654e9 | 0.90 | 1.00 | 2.03 | 1.06 |
| 8 B, v5e:16x16, 1x4096, as ordered | 2.199e9 | 0.87 | 0.99 | 3.67 | 0.84 |
| the same, parts one after another, three of eight kept | 2.204e9 | 0.88 | 0.99 | 2.54 | 0.58 |
| the same, multipliers in the loop | 2.205e9 | 0.88 | 0.99 | 2.50 | 0.57 |
| 8 B, v6e:16x16, 2x4096, as ordered | 1.544e9 | 0.91 | 1.00 | 6.83 | 1.22 |
| the same, one after another, ten of sixteen parts kept | 1.550e9 | 0.92 | 1.00 | 4.36 | 0.78 |
| the same, multipliers in the loop | 1.568e9 | 0.93 | 0.99 | 4.44 | 0.79 |
| the same, log-sum-exp from one lane by a sum | 1.558e9 | 0.92 | 1.00 | 4.44 | 0.79 |
| 8 B, v5p:4x4x4, 4x4096, as ordered (MaxText 4.728e9, 1.509 + 14.14 GB) | 4.806e9 | 1.02 | 0.99 | 13.3 | 0.94 |
| the same, parts one after another, 22 of 32 kept | 4.790e9 | 1.01 | 1.00 | 9.10 | 0.64 |
| the same, multipliers in the loop, as a torus, gathers beside products, `--vmem-kib` 32768 | 3.980e9 | 0.84 | 1.00 | 8.51 | 0.60 |

What filled the memory: on v6e, at the end of the loss, sixteen parts' products with their slopes in float32 (2.1 GB) that were added up
there, and the slopes (2.1 GB); of the 1.2 B step slopes and products of the readout's gradient (0.46 GB) that stood through the
layers' backward loop. Of the 1.79 GB then 0.54 are the layers' inputs, 0.40 three arrays of an MLP's hidden layer, 0.27 gradients
and 0.13 all layers' weights times their multipliers, in bfloat16 before the loop. Where fsdp splits parameters a layer's are now
taken times theirs in the loop, each device its own part before it is gathered: the same bits, and 1.68 GB.

Where cycles beside products are: the splash kernel writes its log-sum-exp into all 128 lanes, and the compiler transposed all of it
before one was taken (in JAX's `splash_attention_kernel`): 21.6 of the v6e step's 1544 M cycles, 3.9 of the 1.2 B step's 652. One lane is now
taken by a sum over lanes of which the others are zero: of two attention layers 23.4 to 22.1 M and 1.00 to 0.87 GB of temporaries on v6e
(2x4096, 32 heads), 20.5 to 20.8 M and 0.48 to 0.46 GB on v5e (4x2048, 16 heads), where the transposed lanes stayed in a core's own memory. The
1.2 B step has 0.632e9 cycles with it (0.630e9 without), and reads and writes 171 GB in place of 173. Gradients
of the stream, and those that queries, keys and values give their input, are added in passes of their own: 13.6 of 652 M, 27.7 of
1544. The number correct took an argmax of each part, 4.7 of 652 M; it is now summed with the exponentials: 54.5 to 49.8 M
outside of the layers' loops, and 106.3 to 98.1 M on v6e with six parts' logits computed twice; inside 597.9 to 601.9 M and 1437 to
1452 M, by where the compiler puts arrays. Parts one after another wait for more of the readout's sums: on v6e 1.84 in place of 0.52
of 4.21 GB alone, and of its gathers 1.38 in place of 1.11 of 2.09. With what waits, a step is bound by 0.828 s as before, and that of
1.2 B by 0.453 in place of 0.454.

`--model.compute.cross-entropy auto` and `--search` read one estimate of what each way takes (`train/core/costs`): on TPU `auto` is what
raises the step's peak memory least, and of those that raise it as little the fastest; exponentials of as many parts are kept as a
layer's backward pass leaves room for. By the estimate, in bytes above the layers' peak: of the 1.2 B step parts of the vocabulary 0, chunks
250 MiB, all logits 755 MiB; on v6e 0, 1.96 and 7.08 GiB. At the peak the compiler takes 0.99 and 1.07 of what is expected.

Positions split over devices, whose keys are gathered (`--model.compute.attention splash`) or go round in a ring (`auto`): `python -m
train compile lm-8b --topology v5p:4x4x4 --model.seq-len 131072 --data.batch-size 8 --mesh.fsdp 8 --mesh.sequence 8`, and on
v5e:16x16 `--model.seq-len 32768 --data.batch-size 64 --mesh.fsdp 64 --mesh.sequence 4`. A step is kernels at the chip's peak, on
the device that has most to do, and the estimated cycles of all else, where a branch counts as its longest.

| | arguments, GB | temporaries, GB | cycles | kernels | step at least | sent over `sequence`, GB: beside products + alone |
|---|---|---|---|---|---|---|
| 131,072 on v5p, gathered | 12.0 | 13.7 | 4.91e9 | 12.7 s | 15.5 s | 30 + 83 |
| 131,072 on v5p, ring | 12.0 | 13.4 | 6.16e9 | 6.8 s | 10.3 s | 76 + 4 |
| 32,768 on v5e, gathered | 1.5 | 5.7 | 4.65e9 | 3.5 s | 6.6 s | 16 + 8 |
| 32,768 on v5e, ring | 1.5 | 5.7 | 5.41e9 | 2.0 s | 5.6 s | 0 + 17 |

Keys of a context are small beside the rest (0.5 GB a layer at 131,072 tokens): what a ring saves is the wait for the last device. Its
other cycles put parts together. On v5e:16x16, where the axis is four devices of a row of sixteen, the compiler sends keys alone; on
v5e:4x4, where it is a row, and on v5p beside products. `auto` takes a ring from 4096 positions of a device on, where both gain.

What `--search --limit 3` compiled of lm-8b on v5e:8x8 (`--model.seq-len 4096 --data.batch-size 128`, `docs/performance/search.json`),
before its estimate waited for sums of activations, and since, with the run as it stands first:

| | expected | found | alone |
|---|---|---|---|
| fsdp 4, sequence 4, tensor 4, `dots`, plain | 2.16 s, 13.5 GiB | 4.87 s, 14.8 GiB | 1.26 s |
| fsdp 8, sequence 4, tensor 2, batch 256, `dots`, by parts | 4.33 s, 15.9 GiB | 22.8 GiB | |
| data 2, fsdp 8, tensor 4, batch 256, `dots`, plain | 4.35 s, 14.7 GiB | 15.8 GiB | |
| since: fsdp 64, `block` | 2.90 s, 6.12 GiB | 3.04 s, 8.01 GiB | |
| fsdp 64, batch 256 in 4, `dots`, by parts | 4.38 s, 15.8 GiB | 17.6 GiB | |
| fsdp 32, sequence 2, batch 256 in 8, `dots`, plain, blocks of 2048 | 4.67 s, 13.9 GiB | refused: 20 MiB of 16 of a core's own memory | |

A whole search, `lm-tiny --topology v5e:2x2 --search --limit 4`, said about 2 min of one core and took 155 s on two busy ones. Of a
model so small the estimate knows nothing: 45 us for steps of 805, 814 and 872, which it took for equal.

Since then memory is taken to need 4/3 of what is expected, and blocks of 2048 are not tried. With fsdp 4 and tensor 4 the 1.2 B step
above takes 0.939e9 cycles and 3.92 GB of temporaries.

`--vmem-kib` is how much of a core's own memory one operation may take: 32768 on v5e and v5p unless given, where the compiler has 16384,
and the compiler's on v6e, which is 32768. The 8 B step on v5e:16x16 is that of 1x4096 above, the 1.2 B one has multipliers in the loop:

| | `--vmem-kib` | cycles | of MaxText's | temporaries, GB | step at least | processor time of the compiler |
|---|---|---|---|---|---|---|
| 1.2 B, v5e:4x4 | 16384 | 0.651e9 | 0.900 | 1.685 | 0.452 s | 2.0 min |
| | 24576 | 0.646e9 | 0.892 | 1.710 | 0.449 s | 2.2 min |
| | 32768 | 0.630e9 | 0.870 | 1.683 | 0.438 s | 3.1 min |
| | 36864 | 0.634e9 | 0.876 | 1.685 | 0.441 s | 3.1 min |
| | 40960 | 0.633e9 | 0.874 | 1.685 | 0.440 s | 3.7 min |
| 8 B, v5e:16x16 | 16384 | 2.205e9 | 0.876 | 2.50 | | |
| | 32768 | 2.048e9 | 0.814 | 2.50 | 1.43 s | 5.6 min |
| 8 B, v5p:4x4x4, as a torus | 32768 | 3.980e9 | 0.842 | 8.51 | 2.29 s | 5.7 min |

MaxText's is without it. Its own configs have 98304 for dense models on v6e and for Llama 3.1 8B on v5e, none for others on v5e. Of a loop
over four layers (2048 to 8192 and back, 4096 tokens a chip, forward, matrices gathered over all chips), millions of cycles:

| | 16384 | 32768 | 40960 | 49152 | 65536 | 98304 |
|---|---|---|---|---|---|---|
| v5p:4x4x4 | 5.18 | 4.61 | | 4.61 | | |
| v6e:16x16 | 2.93 | 2.43 | 3.61 | 4.08 | 3.61 | 2.37 |

What v6e gains at 98304 takes the compiler ten times as long (83 s in place of 8). lm-8b with 49152 on v5p:4x4x4 was not compiled in 15
minutes, where without it takes 4.

Slices of v5p in whole cubes are tori, and so are whole pods of v5e and v6e; the compiler takes a mesh without links around unless told,
and then gathers over a cube by sums of whole arrays. The loop above on v5p:4x4x4 has 6.59 M cycles and 528 MB sent as a mesh, 5.17 M and 264 MB
as a torus; on v5e:16x16 and v6e:16x16 the cycles are the same. Of the 8 B step
25.6 GiB are gathered in the layers' loops, all but 0.5 beside products, and a step's 57 GiB have 8.5 alone. Rows of v5p on this page that do
not say so are of a mesh; MaxText's is of a torus.

Attention blocks of 1024 with one backward kernel cost the 1.2 B step 0.667e9 cycles: sums of queries' gradients.
On a CPU the product takes 1.28 times as long as halves, which stay there (`python -m scripts.bench.rotary --one-core`): the first
loss has the same bits, and over 50 steps of a small decoder a loss differs by at most 3.3e-7; with the sums of queries, keys and
values in another order by 4.2e-7.
"""
ROUNDED = """## Options that round

`lm-tiny`, 50 steps at a constant rate (`--steps 50 --optimizer.schedule constant --optimizer.warmup-steps 5`), beside the same run
with its gradients summed in another order (`--accumulation-steps 2`): the largest difference of a step's loss, and the last one's.

| | largest | last | saves |
|---|---|---|---|
| AdamW, another order | 3.8e-6 | 4.8e-7 | |
| AdamW, `--optimizer.moment-dtype bfloat16` | 1.8e-4 | 2.4e-6 | 2 of 12 bytes a parameter |
| Lion at 3e-4, another order | 3.8e-6 | 0 | |
| Lion, `--optimizer.moment-dtype bfloat16` | 4.1e-5 | 2.3e-5 | 2 of 8 bytes a parameter |
| all in bfloat16 (`--model.compute.dtype bfloat16`), against float32 | 2.9e-3 | 1.3e-3 | |
| bfloat16, another order | 1.0e-3 | 2.5e-4 | |
| bfloat16, `--model.compute.product-dtype int8` | 2.1e-2 | 2.1e-3 | |
| bfloat16, `--model.compute.product-dtype float8` | 1.5e-2 | 6.7e-3 | |
| `--mesh.fsdp 4`, 8 sequences, against `--mesh.data 2 --mesh.fsdp 2` | 4.8e-7 | 0 | |
| the same, `--mesh.gradient-dtype bfloat16` | 4.6e-3 | 1.2e-4 | half of what fsdp's gradients send |
| in bfloat16, against `--mesh.data 2 --mesh.fsdp 2` | 3.3e-3 | 1.1e-3 | |
| the same, `--mesh.gradient-dtype bfloat16` | 1.3e-2 | 3.7e-4 | sums in float32; the readout's half |

Products of 8 bits (qwix 0.1.8, extra `quantized`) are those of blocks with their weights, forward and back: each row of the
activations and column of the weights over its largest number, float8 as e4m3, and as e5m2 for gradients. The CPU computes int8 as such
and widens float8. Weights are gathered as they are and rounded after it, so nothing less is sent. The
TPU compiler estimates as many cycles of the 1.2 B step below on v5e:4x4 with int8 as without, 0.653e9.
"""
GPU = """## One GPU against PyTorch

Not measured: no GPU was at hand. `python -m scripts.bench.gpu_mfu --json gpu.json` tries GPT-2 (124 M), GPT-2 medium (350 M), a
1 B decoder and ViT-S/16 and B/16 at 224 in bfloat16 at growing batches, each beside PyTorch with flash attention under
`torch.compile` in the same run, and prints step time, throughput and MFU of the best of both.
"""


def table(rows: Sequence[Sequence[str]]) -> str:
    """Markdown of a heading row and the rest."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def rows_of(results: Sequence[dict[str, Any]]) -> list[list[str]]:
    """What every benchmark has: a time of each, and the first one's ratio to the others."""
    names = list(results[0]["ms"])
    ours = next(name for name in names if name not in results[0]["ratio"])
    others = [name for name in names if name != ours]
    memory = "temporary_bytes" in results[0]
    head = ["", *[f"{name}, ms" for name in (ours, *others)], *[f"{ours} / {name}" for name in others]]
    counts = [name for name in ("flops", "bytes") if name in results[0]]
    found = [[*head, *(f"{name}, MB" for name in (ours, *others) if memory), *(f"{name}, ratio" for name in counts)]]
    for result in results:
        ratios = [_ratio(result, name) for name in others]
        times = [f"{result['ms'][name]:.1f}" for name in (ours, *others)]
        bytes_ = [f"{result['temporary_bytes'][name] / 1e6:.0f}" for name in (ours, *others) if memory]
        found.append([_label(result), *times, *ratios, *bytes_, *(f"{result[name]:.4f}" for name in counts)])
    return found


def _ratio(result: dict[str, Any], name: str) -> str:
    spread = result.get("quartiles", {}).get(name)
    return f"{result['ratio'][name]:.2f}" + (f" ({spread[0]:.2f}-{spread[1]:.2f})" if spread else "")


def _label(result: dict[str, Any]) -> str:
    if "model" in result:
        return str(result["model"])
    if "vocab" in result:
        return f"vocabulary {result['vocab']}"
    if "causal" in result:
        return "causal" if result["causal"] else "whole"
    return "lm"


def page(folder: Path) -> str:
    """The text of docs/performance.md."""
    parts = [HEAD]
    for name, heading in NAMES.items():
        if (path := folder / f"{name}.json").exists():
            found = json.loads(path.read_text())
            versions = ", ".join(f"{key} {found[key]}" for key in ("python", "jax", "torch") if key in found)
            rounds = found["results"][0]["rounds"]
            how = " --one-core" if found["cores"] == 1 else ""
            command = f"`python -m scripts.bench.{name}{how}` ({versions}; {rounds} rounds)"
            parts.append(f"## {heading}\n\n{ABOUT[name]}\n{command}\n\n{table(rows_of(found['results']))}\n")
    return "\n".join([*parts, ROUNDED, TPU, GPU])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is named, and write the page; returns the exit code 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"to measure, of {', '.join(NAMES)}; none: only the page")
    parser.add_argument(
        "--one-core", action="store_true", help="one core, CPU time: for a machine busy with other work"
    )
    parser.add_argument("--all", action="store_true", help="measure all of them, for an hour")
    args = parser.parse_args(argv)
    unknown = set(args.names) - set(NAMES)
    if unknown:
        parser.error(f"no benchmark is named {', '.join(sorted(unknown))}; write {', '.join(NAMES)}")
    for name in NAMES if args.all else args.names:
        words = [sys.executable, "-m", f"scripts.bench.{name}", "--json", str(FOLDER / f"{name}.json")]
        words += ["--one-core"] if args.one_core else []
        subprocess.run(words, check=True)
    PAGE.write_text(page(FOLDER))
    return 0


if __name__ == "__main__":
    sys.exit(main())
