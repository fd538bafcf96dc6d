"""`mupax presets dynamics`: the infinite model's own loss curve, kernels and attention, and finite models of our own step beside it.

Both train on one batch and are described in the same terms.

Z networks, S steps (before each and after the last: S + 1), B examples, C classes, L layers, D width.

A run's config is read as the numbers of its infinite limit (`mupax.presets.infinite.stack`), or refused by one message.

The forward pass has a parameter as multiplier * w; SGD moves that by the square of the multiplier times w's rate.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from tyro import conf

from mupax import command_line, terminal
from mupax.command_line import Switch
from mupax.presets.infinite.block import BLOCK, LimitConfig
from mupax.presets.infinite.layers import cross_entropy
from mupax.presets.infinite.stack import Stack
from mupax.train import data
from mupax.train.config import cli
from mupax.train.config.checks import at_least
from mupax.train.config.preset import preset_of, with_group_constants
from mupax.train.config.run import Config
from mupax.zoo.configs import ConfigError, ViTConfig

if TYPE_CHECKING:
    import matplotlib.figure

PATHS = {
    **{name: f"block.{'mlp' if name in ('up', 'down') else 'attention'}.{name}" for name in BLOCK},
    **{name: name for name in ("patch", "position", "readout")},
}
"""What `LimitConfig` calls a parameter to its name in the zoo."""
SHARE = 4
"""A matrix is revealed along at most one in so many of its directions: its record of them is then as large as the matrix."""

PROG = "mupax presets dynamics"
MATRICES = 22
"""Vectors of a block that are recorded for each direction: of queries, keys and values 1 + 9, of the other three 4 each."""


def with_heads(config: Config, heads: int) -> Config:
    """The same run with so many heads of the same dimension, and the width with them.

    Args:
        config: the run.
        heads: H.
    """
    model = _vit(config)
    return dataclasses.replace(
        config,
        model=dataclasses.replace(
            model, num_heads=heads, width=heads * model.heads_dim, head_dim=None
        ),
    )


def numbers(config: Config) -> LimitConfig:
    """Everything that the limit needs of a run, at the run's own sizes.

    Raises:
        ConfigError: what of the model or optimizer has no limit here, why, and what to write.
        PresetError: as `mupax.train.config.preset.preset_of`.
    """
    check(config)
    model, preset, optimizer = _vit(config), preset_of(config), config.scaled_optimizer
    sizes, specs, depth = model.sizes(), model.parameters(), model.depth
    stds, rates = {}, {}
    for name, path in PATHS.items():
        scales = preset.scales(specs[path], sizes, "sgd")
        shape = (depth,) if name in BLOCK else ()
        multiplier = np.broadcast_to(np.asarray(scales.multiplier, float), shape)
        stds[name] = multiplier * scales.init_std
        rates[name] = optimizer.peak_lr * multiplier**2 * scales.lr
    factors = np.array(
        [
            [preset.residual_scale(sizes, layer, branch) for branch in ("attention", "mlp")]
            for layer in range(depth)
        ]
    )
    return LimitConfig(
        head_dim=model.heads_dim,
        heads=model.num_heads,
        depth=depth,
        mlp=model.mlp_dim,
        stds=stds,
        rates=rates,
        logit_scale=preset.logit_scale(sizes),
        skip=factors[..., 0],
        branch=factors[..., 1],
        momentum=optimizer.momentum,
        eps=model.norm_eps,
        centred_norm=model.norm == "layernorm",
        centred=model.centered,
        activation=model.activation,
    )


def check(config: Config) -> None:
    """Raises ConfigError for a run whose updates are not of low rank, or whose model is none that the limit knows."""
    model, optimizer = _vit(config), config.scaled_optimizer
    if optimizer.name not in ("sgd", "momentum"):
        raise ConfigError(
            f"the infinite limit follows updates of low rank, those of SGD with or without momentum; {optimizer.name} acts on every "
            "entry alone, which makes them full; write --optimizer.name sgd and a rate of its own"
        )
    owners: dict[str, Any] = {"": config, "model": model, "optimizer": optimizer, "ema": config.ema}
    plain = {
        "model.norm_gain": False,
        "model.bias": False,
        "model.qk_norm": False,
        "model.pool": "mean",
        "model.registers": None,
        "model.sincos": False,
        "model.distribution": "normal",
        "model.pre_logits": False,
        "model.layer_scale": None,
        "model.value_dim": None,
        "model.branch_activation": "none",
        "model.num_kv_heads": None if model.num_kv_heads is None else model.num_heads,
        "model.width": model.num_heads * model.heads_dim,
        "optimizer.schedule": "constant",
        "optimizer.warmup_steps": 0,
        "optimizer.weight_decay": 0,
        "optimizer.clip_norm": None,
        "ema.decay": None,
        "z_loss": 0.0,
        "freeze": (),
        "train_only": (),
    }
    for path, needed in plain.items():
        owner, _, name = path.rpartition(".")
        value = getattr(owners[owner], name)
        if value != needed:
            flag = path.replace("_", "-")
            raise ConfigError(
                f"{path} is {value}; the infinite limit is written for {needed}: --{flag} {_word(needed)}"
            )
    if model.activation not in ("gelu", "relu"):
        raise ConfigError(
            f"model.activation is {model.activation}; the infinite limit has gelu and relu"
        )


def check_rank(config: Config, images: int) -> int:
    """Directions that every matrix is looked at along, by so many steps and a last look.

    Args:
        config: has the steps, the positions of an image and the width of the matrices.
        images: of every step.

    Raises:
        ConfigError: they are more than are worth recording; the text says what fits.
    """
    model = _vit(config)
    looks, positions, most = config.steps + 1, model.seq_len, model.width // SHARE
    rank = looks * images * positions
    if rank > most:
        steps, fits = most // (images * positions) - 1, most // (looks * positions)
        fitting = [f"--heads {-(-rank * SHARE // model.heads_dim)}"]
        fitting += [f"--steps {steps}"] if steps > 0 else []
        fitting += [f"--images {fits}"] if fits else []
        raise ConfigError(
            f"{config.steps} steps on {images} images of {positions} positions look at {rank} directions of every matrix, and of "
            f"width {model.width} at most {most} are worth recording: a {SHARE}th takes the memory of the matrix itself; write "
            f"{', or '.join(fitting)}"
        )
    return rank


def patches(images_BHWC: np.ndarray, size: int) -> np.ndarray:
    """What the patch embedding reads, [B, T, size * size * C], in the order of the zoo's ViT.

    Args:
        images_BHWC: images.
        size: side of a patch.
    """
    batch, side, _, channels = images_BHWC.shape
    grid = side // size
    x = images_BHWC.reshape(batch, grid, size, grid, size, channels).swapaxes(2, 3)
    return x.reshape(batch, grid * grid, size * size * channels)


def _vit(config: Config) -> ViTConfig:
    if not isinstance(config.model, ViTConfig):
        raise ConfigError(
            f"the infinite limit is of vision transformers, and the model is a {config.model.family}"
        )
    return config.model


def _word(value: Any) -> str:
    return "''" if value == () else str(value)


@dataclasses.dataclass(frozen=True)
class Course:
    """Networks in training.

    Attributes:
        losses: nats, [Z, S + 1].
        logits: centred, [Z, S + 1, B, C].
        memory: C(t, s), of the features that the readout reads at two steps, mean over examples, [Z, S + 1, S + 1].
        kernels: of those features at two examples, [Z, S + 1, B, B].
        attention: as `mupax.presets.infinite.stack.Snapshot`, [Z, S + 1, L, 2]; empty for finite models.
    """

    losses: np.ndarray
    logits: np.ndarray
    memory: np.ndarray
    kernels: np.ndarray
    attention: np.ndarray

    @staticmethod
    def of(networks: Sequence[tuple[Any, Any, Any]], targets: np.ndarray) -> Course:
        """From logits [S + 1, B, C], features [S + 1, B, D] and attention of each network.

        Args:
            networks: Z of them.
            targets: [B].
        """
        logits, memory, kernels = [], [], []
        for outputs, features, _ in networks:
            x = np.asarray(features, np.float64)
            logits.append(np.asarray(outputs, np.float64))
            memory.append(np.einsum("tbd,sbd->ts", x, x, optimize=True) / (x.shape[1] * x.shape[2]))
            kernels.append(x @ x.swapaxes(1, 2) / x.shape[2])
        attention = np.array([one[2] for one in networks])
        outputs = np.array(logits)
        return Course(
            cross_entropy(outputs, targets)[0],
            outputs,
            np.array(memory),
            np.array(kernels),
            attention,
        )


def examples(config: Config, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Images and classes of the first `count` training examples of a run.

    Args:
        config: whose data.
        count: B.
    """
    source = dataclasses.replace(config.data, batch_size=count)
    batch = data.load(
        source, config.model, seed=config.data_seed, note=lambda line: None
    ).train_batch(0)
    return np.asarray(batch["inputs"]), np.asarray(batch["targets"])


def limit(
    config: Config,
    images: np.ndarray,
    targets: np.ndarray,
    *,
    heads: int,
    draws: int,
    seed: int = 0,
    responses: bool = True,
    dtype: type[np.floating] = np.float32,
) -> Course:
    """The infinite model on one batch at every step: networks of a width that stands for it, exact in law.

    Args:
        config: whose model at any number of heads, preset, optimizer and steps.
        images: [B, height, width, channels].
        targets: [B].
        heads: that stand for infinitely many.
        draws: independent networks Z, one after another.
        seed: of them.
        responses: see `mupax.presets.infinite.dice.LazyGaussian`.
        dtype: of the numbers.
    """
    wide = with_heads(config, heads)
    model: Any = wide.model
    of_run, inputs = numbers(wide), patches(images, model.patch_size)
    networks = []
    for rng in np.random.default_rng(seed).spawn(draws):
        shape = {
            "positions": inputs.shape[1],
            "patch": inputs.shape[2],
            "classes": model.num_classes,
        }
        stack = Stack(of_run, **shape, rng=rng, responses=responses, dtype=dtype)
        snapshots = [stack.step(inputs, targets) for _ in range(config.steps)] + [
            stack.look(inputs, targets)
        ]
        networks.append(
            tuple(
                np.concatenate([getattr(one, x) for one in snapshots])
                for x in ("logits", "features", "attention")
            )
        )
    return Course.of(networks, targets)


def finite(config: Config, images: np.ndarray, targets: np.ndarray, *, seeds: int) -> Course:
    """The run's own model, trained by our own step on the same batch, from several seeds.

    Args:
        config: the run, its data apart.
        images: [B, height, width, channels].
        targets: [B].
        seeds: Z.
    """
    import jax
    import jax.numpy as jnp

    from mupax.train.core.program import assemble

    count = len(targets)
    config = dataclasses.replace(
        config, data=dataclasses.replace(config.data, batch_size=count, eval_batch_size=count)
    )
    program = assemble(config, jax.devices()[:1])
    step, definition = program.compile_train(), program.definition
    batch = {
        "inputs": jnp.asarray(images),
        "targets": jnp.asarray(targets, jnp.int32),
        "weights": jnp.ones(count),
    }

    @jax.jit
    def look(params: Any, run: Any) -> tuple[jax.Array, jax.Array]:
        readings = [
            definition.model(weights, run.factors.multiplier, run.factors.forward).readout_inputs(
                batch["inputs"]
            )
            for weights in (params, run.reference)
            if weights is not None
        ]
        logits = readings[0].logits() - (readings[1].logits() if readings[1:] else 0.0)
        return logits, readings[0].features

    networks = []
    for seed in range(seeds):
        of_seed = dataclasses.replace(program, config=dataclasses.replace(config, seed=seed))
        run, state = of_seed.step_inputs(), of_seed.placed(of_seed.initial_state(), step)
        outputs = [look(state.params, run)]
        for _ in range(config.steps):
            state, _ = step(state, run, batch)
            outputs.append(look(state.params, run))
        networks.append(
            (*(np.stack(jax.device_get(x)) for x in zip(*outputs, strict=True)), np.zeros(0))
        )
    return Course.of(networks, targets)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dynamics:
    """How a model with infinitely many heads learns a few images by heart: loss, kernels and attention, with error bars.

    Every initial matrix is drawn only along what it has acted on, so the network has the law of a dense one of its width, and an
    update of SGD is of low rank. The images are of the endless set unless --data.name names others; --model.*, --preset.*,
    --optimizer.* and --seed are those of the recipe.
    """

    model: Annotated[str, conf.arg(metavar="MODEL|RECIPE|FILE")] = "bordelon-vit"
    """A vision transformer of `mupax models` without gains and biases, a recipe, or a config file (also `--config FILE`); its heads grow
    to --heads."""
    steps: Annotated[int, conf.arg(metavar="N")] = 8
    """Steps of SGD, all on the same images."""
    images: Annotated[int, conf.arg(metavar="N")] = 2
    """Images."""
    heads: Annotated[int, conf.arg(metavar="H")] = 512
    """Heads that stand for infinitely many, from which they are H^-1/2 away, and their means 1/H."""
    draws: Annotated[int, conf.arg(metavar="N")] = 2
    """Independent networks, whose standard error is the error bar."""
    finite: Annotated[tuple[int, ...], conf.arg(metavar="H ...")] = ()
    """Also train models of so many heads by the zoo and our own step."""
    seeds: Annotated[int, conf.arg(metavar="N")] = 4
    """Initializations of each of those."""
    float64: Switch = False
    """Twice the digits in twice the memory."""
    figure: Annotated[str | None, conf.arg(metavar="PATH")] = None
    """Draw loss, kernels and attention (PNG)."""
    json: Annotated[str | None, conf.arg(metavar="PATH")] = None
    """Write all numbers as JSON."""
    dry_run: Switch = False
    """Say how large the network and its records are; train nothing."""

    def __post_init__(self) -> None:
        at_least("--", self, 1, "steps", "images", "heads")
        at_least("--", self, 2, "draws", "seeds")


def main(argv: Sequence[str]) -> int:
    """Trains, prints, draws, writes: the exit code 0."""
    args, rest = command_line.parse_known(
        Dynamics, PROG, with_group_constants(_with_model_flag(argv))
    )
    named = cli.is_recipe(args.model)
    recipe = args.model if named else "bordelon-vit"
    words = rest if named else ["--model", args.model, *rest]
    if recipe == "bordelon-vit" and not any(word.startswith("--data.name") for word in words):
        words = [*words, "--data.name", "shapes"]
    config = cli.parse(recipe, cli.recipe(recipe), words, command_line.flags(Dynamics)).config
    config = dataclasses.replace(config, steps=args.steps)
    check(config)
    wide = with_heads(config, args.heads)
    rank = check_rank(wide, args.images)
    model: Any = wide.model
    size = terminal.gib(MATRICES * model.width * rank * model.depth * (8 if args.float64 else 4))
    terminal.say(
        f"{args.model} of N = {model.heads_dim}, L = {model.depth}, {args.heads} heads (width {model.width}) for infinitely many; "
        f"{args.images} images, {args.steps} steps; {rank} directions of every matrix, {size} of records"
    )
    if args.dry_run:
        return 0
    images, targets = examples(config, args.images)
    dtype = np.float64 if args.float64 else np.float32
    infinite = limit(
        config, images, targets, heads=args.heads, draws=args.draws, seed=config.seed, dtype=dtype
    )
    nets = {
        count: finite(with_heads(config, count), images, targets, seeds=args.seeds)
        for count in args.finite
    }
    terminal.say(f"\n{terminal.table(rows(infinite, nets))}")
    if args.json:
        record = {
            "limit": _plain(infinite),
            "finite": {str(count): _plain(net) for count, net in nets.items()},
        }
        Path(args.json).write_text(json.dumps({"heads": args.heads, **record}) + "\n")
    if args.figure:
        picture(infinite, nets, f"{args.model}, N = {model.heads_dim}, L = {model.depth}").savefig(
            args.figure
        )
    return 0


def _with_model_flag(argv: Sequence[str]) -> list[str]:
    """Return a command line with `--model PATH` for `--config PATH`."""
    words = cli.with_file_first(argv)
    return ["--model", *words] if words and cli.is_file(words[0]) else words


def mean(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean over networks, axis 0, and its standard error."""
    return values.mean(0), values.std(0, ddof=1) / len(values) ** 0.5


def rows(limit: Course, nets: Mapping[int, Course]) -> list[list[str]]:
    """A line per step: losses, C(t, t), C(t, 0) over the root of both own, root mean square attention logits, and how far they agree.

    Args:
        limit: the infinite model.
        nets: finite models by heads.
    """

    def cell(values: np.ndarray) -> list[str]:
        return [f"{x:.4f} ± {e:.4f}" for x, e in zip(*mean(values), strict=True)]

    own = np.einsum("ztt->zt", limit.memory)
    columns = {
        "step": [str(step) for step in range(own.shape[1])],
        "loss, infinite": cell(limit.losses),
        **{f"loss, H = {count}": cell(net.losses) for count, net in nets.items()},
        "C(t, t)": cell(own),
        "C(t, 0) / root": cell(limit.memory[:, 0] / np.sqrt(own * own[:, :1])),
        "attention logits, rms": cell(np.sqrt(limit.attention[..., 0].mean(-1))),
        "the same in all heads": cell(np.sqrt(limit.attention[..., 1].mean(-1))),
    }
    return [list(columns), *(list(row) for row in zip(*columns.values(), strict=True))]


def picture(limit: Course, nets: Mapping[int, Course], title: str) -> matplotlib.figure.Figure:
    """Loss, C(t, s) and attention logits by layer over steps.

    Args:
        limit: the infinite model.
        nets: finite models by heads, beside its loss.
        title: above all.
    """
    from matplotlib.figure import Figure

    from mupax.train.run.report.plotting import BLUE, GREY, INK, ORANGE, style

    figure = Figure(figsize=(13, 3.8), dpi=110, layout="constrained")
    figure.suptitle(title, fontsize=12, color=INK, x=0.01, ha="left")
    left, middle, right = figure.subplots(1, 3)
    steps = np.arange(limit.losses.shape[1])
    for one, name in (
        (left, "Loss, nats"),
        (middle, "Kernels C(t, s), each line an s"),
        (right, "Attention logits, rms"),
    ):
        style(one, 0, int(steps[-1]))
        one.set_title(name, fontsize=10, color=INK, loc="left")
        one.set_xlabel("step t", fontsize=9)
    for fade, (count, net) in zip(
        np.linspace(0.4, 0.9, len(nets)), sorted(nets.items()), strict=True
    ):
        left.plot(steps, net.losses.T, color=ORANGE, alpha=fade / 3, linewidth=0.8)
        left.plot(
            steps, net.losses.mean(0), color=ORANGE, alpha=fade, label=f"our step, H = {count}"
        )
    middle_loss, error = mean(limit.losses)
    left.errorbar(steps, middle_loss, error, color=BLUE, capsize=2, label="infinitely many heads")
    for step in steps:
        middle.plot(
            steps, limit.memory.mean(0)[step], color=BLUE, alpha=0.25 + 0.75 * step / steps[-1]
        )
    for layer, (squares, of_mean) in enumerate(
        np.moveaxis(np.sqrt(limit.attention.mean(0)), 0, -1)
    ):
        fade = 0.4 + 0.6 * (layer + 1) / limit.attention.shape[2]
        right.plot(steps, squares, color=BLUE, alpha=fade, label="all" if fade == 1 else None)
        right.plot(
            steps,
            of_mean,
            "--",
            color=GREY,
            alpha=fade,
            label="their mean over heads" if fade == 1 else None,
        )
    left.legend(fontsize=8, frameon=False)
    right.legend(fontsize=8, frameon=False, title="layers faint to full", title_fontsize=8)
    return figure


def _plain(of: Course) -> dict[str, Any]:
    return {name: np.asarray(x).round(6).tolist() for name, x in vars(of).items()}
