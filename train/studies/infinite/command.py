"""`mupax presets dynamics`: training of a model with infinitely many heads, and of finite models.

Both train on one batch, and their results are arrays of the same kind. A run's config is translated
into the config of its infinite limit (`mupax.presets.infinite.stack`).

Shapes: Z networks, S training steps (S + 1 states: before each step and after the last),
B examples, T positions, C classes or channels, L layers, D width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
from tyro import conf

from mupax import command_line, disk, terminal
from mupax.command_line import Switch
from mupax.presets.infinite.block import BLOCK, LimitConfig
from mupax.presets.infinite.layers import cross_entropy
from mupax.presets.infinite.stack import Stack
from mupax.terminal import counted
from mupax.train import data
from mupax.train.config import cli
from mupax.train.config.checks import at_least, check_outputs
from mupax.train.config.preset import preset_of, with_group_constants
from mupax.train.config.run import Config
from mupax.zoo.configs import ConfigError, ViTConfig

if TYPE_CHECKING:
    import matplotlib.figure

PATHS = {
    "query": "block.attention.query",
    "key": "block.attention.key",
    "value": "block.attention.value",
    "out": "block.attention.out",
    "up": "block.mlp.up",
    "down": "block.mlp.down",
    "patch": "patch",
    "position": "position",
    "readout": "readout",
}
"""Path of a parameter in the zoo, by its name in `LimitConfig`."""
SHARE = 4
"""Divisor of the width that gives the largest number of directions to draw a matrix along.

A random matrix is drawn only along the directions (vectors) that it is applied to. Records of width
/ SHARE directions take as much memory as the matrix itself.
"""

PROG = "mupax presets dynamics"
MATRICES = 22
"""Number of vectors that a block records for each direction that its matrices are applied to.

These are 1 + 9 for queries, keys and values together, and 4 for each of the other three matrices.
"""


def with_heads(config: Config, heads: int) -> Config:
    """Return the run with another number of heads, and with the width that these heads fill.

    The head dimension stays the same.

    Raises:
        ConfigError: The model is no vision transformer.
    """
    model = _vit(config)
    wide_model = dataclasses.replace(
        model, num_heads=heads, width=heads * model.heads_dim, head_dim=None
    )
    return dataclasses.replace(config, model=wide_model)


def numbers(config: Config) -> LimitConfig:
    """Translate a run's config into the config of its infinite limit.

    Initial stds, learning rates and scales are those that the run's preset gives at the run's own
    sizes.

    Raises:
        ConfigError: The limit does not cover the model or the optimizer (see `check`). The text
            says what to write.
        PresetError: See `mupax.train.config.preset.preset_of`.
    """
    check(config)
    model = _vit(config)
    preset = preset_of(config)
    optimizer = config.scaled_optimizer
    sizes = model.sizes()
    specs = model.parameters()
    stds = {}
    rates = {}
    for name, path in PATHS.items():
        # Momentum has the table of SGD, because both steps are proportional to the gradient.
        scales = preset.scales(specs[path], sizes, "sgd")
        shape = (model.depth,) if name in BLOCK else ()
        multiplier = np.broadcast_to(np.asarray(scales.multiplier, float), shape)
        stds[name] = multiplier * scales.init_std
        # The limit's weights are multiplier * w. A step of SGD on w changes them by lr *
        # multiplier^2 times their own gradient.
        rates[name] = optimizer.peak_lr * multiplier**2 * scales.lr

    residual_scales = []
    for layer in range(model.depth):
        attention = preset.residual_scale(sizes, layer, "attention")
        mlp = preset.residual_scale(sizes, layer, "mlp")
        residual_scales.append([attention, mlp])
    factors = np.array(residual_scales)
    return LimitConfig(
        head_dim=model.heads_dim,
        heads=model.num_heads,
        depth=model.depth,
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
    """Raise ConfigError for a run that the infinite limit does not cover.

    It covers vision transformers without gains and biases, trained by SGD, with or without
    momentum, at a constant learning rate.

    Raises:
        ConfigError: A field has an unsupported value. The text says what to write.
    """
    model = _vit(config)
    optimizer = config.scaled_optimizer
    if optimizer.name not in ("sgd", "momentum"):
        raise ConfigError(
            "the infinite limit follows updates of low rank, those of SGD with or without "
            f"momentum; {optimizer.name} acts on every entry alone, which makes them full; "
            "write --optimizer.name sgd and a rate of its own"
        )
    owners: dict[str, Any] = {"": config, "model": model, "optimizer": optimizer, "ema": config.ema}
    supported = {
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
        # One key head per query head: the field is None or the number of heads.
        "model.num_kv_heads": None if model.num_kv_heads is None else model.num_heads,
        "model.width": model.num_heads * model.heads_dim,
        "optimizer.schedule": "constant",
        "optimizer.warmup_steps": 0,
        "optimizer.weight_decay": 0,
        "optimizer.clip_norm": None,
        "optimizer.qk_clip": None,
        "ema.decay": None,
        "z_loss": 0.0,
        "freeze": (),
        "train_only": (),
    }
    for path, needed in supported.items():
        owner, _, name = path.rpartition(".")
        value = getattr(owners[owner], name)
        if value != needed:
            flag = path.replace("_", "-")
            raise ConfigError(
                f"{path} is {value}; the infinite limit is written for {needed}: "
                f"--{flag} {_word(needed)}"
            )
    if model.activation not in ("gelu", "relu"):
        raise ConfigError(
            f"model.activation is {model.activation}; the infinite limit has gelu and relu"
        )


def check_rank(config: Config, images: int) -> int:
    """Return the number of directions along which a run has to draw every initial matrix.

    A matrix is drawn only along the vectors that it is applied to. There is one for each position
    of each image at each step and after the last step.

    Args:
        config: Run with the steps, positions and width to count with.
        images: Number of images, the same in every step.

    Raises:
        ConfigError: The directions are more than a quarter of the width, so that recording them is
            not worthwhile. The text says how many heads, steps or images are possible.
    """
    model = _vit(config)
    # One more than steps, because the state after the last step is looked at, too.
    num_forward_passes = config.steps + 1
    positions = model.seq_len
    largest_rank = model.width // SHARE
    rank = num_forward_passes * images * positions
    if rank > largest_rank:
        # Rounded up to a whole number of heads.
        fitting = [f"--heads {-(-rank * SHARE // model.heads_dim)}"]
        fitting_steps = largest_rank // (images * positions) - 1
        if fitting_steps > 0:
            fitting.append(f"--steps {fitting_steps}")
        fitting_images = largest_rank // (num_forward_passes * positions)
        if fitting_images:
            fitting.append(f"--images {fitting_images}")
        raise ConfigError(
            f"{config.steps} steps on {images} images of {positions} positions look at {rank} "
            f"directions of every matrix, and of width {model.width} at most {largest_rank} are "
            f"worth recording: a {SHARE}th takes the memory of the matrix itself; write "
            f"{', or '.join(fitting)}"
        )
    return rank


def patches(images_BHWC: np.ndarray, size: int) -> np.ndarray:
    """Cut images into patches as the zoo does, and return the patches, [B, T, size * size * C].

    Args:
        images_BHWC: Square images, so that `H == W`.
        size: Side of a patch, in pixels. The side of the images must be a multiple of it.
    """
    batch, side, _, channels = images_BHWC.shape
    grid = side // size
    # [B, row, y, column, x, C]: y and column change places, so that a patch is contiguous.
    x = images_BHWC.reshape(batch, grid, size, grid, size, channels).swapaxes(2, 3)
    return x.reshape(batch, grid * grid, size * size * channels)


def _vit(config: Config) -> ViTConfig:
    """Return the model of a run. Raises ConfigError if it is no vision transformer."""
    if not isinstance(config.model, ViTConfig):
        raise ConfigError(
            f"the infinite limit is only known for a vit, and the model is a "
            f"{config.model.family}; write --model with a vit"
        )
    return config.model


def _word(value: Any) -> str:
    """Return a config value as text for the command line; an empty tuple is written ''."""
    return "''" if value == () else str(value)


class _NetworkStates(NamedTuple):
    """Records of one network before each of S training steps and after the last.

    Attributes:
        logits: Logits of the B examples, [S + 1, B, C].
        features: Inputs of the readout, [S + 1, B, D].
        attention: Mean over heads of the squared attention logits, and square of their mean over
            heads, for each layer, [S + 1, L, 2]. Empty for finite models.
    """

    logits: Any
    features: Any
    attention: np.ndarray


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """Losses, logits and kernels of several networks at every step of their training.

    Attributes:
        losses: Mean cross-entropy in nats, [Z, S + 1].
        logits: Logits, minus the initial logits if the model is centered, [Z, S + 1, B, C].
        memory: C(t, s), the mean over channels of the product of the readout's inputs at steps t
            and s, averaged over examples, [Z, S + 1, S + 1].
        kernels: Mean over channels of the product of the readout's inputs of two examples,
            [Z, S + 1, B, B].
        attention: Mean over heads of the squared attention logits, and square of their mean over
            heads, for each layer, [Z, S + 1, L, 2]. Empty for finite models.
    """

    losses: np.ndarray
    logits: np.ndarray
    memory: np.ndarray
    kernels: np.ndarray
    attention: np.ndarray

    @staticmethod
    def of(networks: Sequence[_NetworkStates], targets: np.ndarray) -> Trajectory:
        """Compute losses and kernels from the states of Z networks, and return the trajectory.

        Args:
            networks: Records of each network. Logits of a centered model have the initial logits
                subtracted already.
            targets: Classes of the examples, int [B].
        """
        logits = []
        memory = []
        kernels = []
        for states in networks:
            # Sums over thousands of channels lose digits in float32.
            x_TBD = np.asarray(states.features, np.float64)
            _, num_examples, width = x_TBD.shape
            logits.append(np.asarray(states.logits, np.float64))
            products = np.einsum("tbd,sbd->ts", x_TBD, x_TBD, optimize=True)
            memory.append(products / (num_examples * width))
            kernels.append(x_TBD @ x_TBD.swapaxes(1, 2) / width)
        attention = np.array([states.attention for states in networks])
        logits_ZTBC = np.array(logits)
        losses, _ = cross_entropy(logits_ZTBC, targets)
        return Trajectory(losses, logits_ZTBC, np.array(memory), np.array(kernels), attention)


def examples(config: Config, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return images and classes of the first training batch of a run, with `count` examples.

    Images are [B, height, width, channels], classes int [B], both NumPy arrays.
    The run's data is prepared if needed.
    """
    source = dataclasses.replace(config.data, batch_size=count)
    dataset = data.load(source, config.model, seed=config.data_seed, note=lambda line: None)
    batch = dataset.train_batch(0)
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
) -> Trajectory:
    """Train very wide networks that stand for the infinite model, with one batch at every step.

    The networks have a finite number of heads. Matrices are drawn only along the directions that
    they are applied to, which gives exactly the distribution of dense networks of that width.
    Return the trajectory of the networks.

    Args:
        config: Run with the model (at any number of heads), preset, optimizer and steps.
        images: Images of the batch, [B, height, width, channels].
        targets: Classes, int [B].
        heads: Number of heads that stands for infinitely many.
        draws: Number Z of independent networks. They are trained one after another.
        seed: Seed of all random numbers. The first networks are the same for any `draws`.
        responses: Whether products with a matrix and with its transpose are correlated, as they are
            in a real network. `False` is a control experiment
            (`mupax.presets.infinite.dice.LazyGaussian`).
        dtype: Dtype of the networks, float32 by default.

    Raises:
        ConfigError: The limit does not cover the model or the optimizer (see `check`).
    """
    wide = with_heads(config, heads)
    model: Any = wide.model
    limit_config = numbers(wide)
    inputs = patches(images, model.patch_size)
    networks = []
    # Spawned, so that the first networks are the same for any number of draws.
    for rng in np.random.default_rng(seed).spawn(draws):
        stack = Stack(
            limit_config,
            positions=inputs.shape[1],
            patch=inputs.shape[2],
            classes=model.num_classes,
            rng=rng,
            responses=responses,
            dtype=dtype,
        )
        snapshots = [stack.step(inputs, targets) for _ in range(config.steps)]
        # No step reports the state after the last one, so it is read separately.
        snapshots.append(stack.look(inputs, targets))
        logits = []
        features = []
        attention = []
        for snapshot in snapshots:
            logits.append(snapshot.logits)
            features.append(snapshot.features)
            attention.append(snapshot.attention)
        # A stack holds one network here, so the axis of draws becomes that of steps.
        states = _NetworkStates(
            logits=np.concatenate(logits),
            features=np.concatenate(features),
            attention=np.concatenate(attention),
        )
        networks.append(states)
    return Trajectory.of(networks, targets)


def finite(config: Config, images: np.ndarray, targets: np.ndarray, *, seeds: int) -> Trajectory:
    """Train the run's own model by the zoo's training step, with the same batch at every step.

    Return the trajectory, in which `attention` is empty. All networks train on one device.

    Args:
        config: Run with the model, preset, optimizer and steps. Its data are not used.
        images: Images of the batch, [B, height, width, channels].
        targets: Classes, int [B].
        seeds: Number Z of networks, initialized from seeds 0 to `seeds` - 1.
    """
    import jax
    import jax.numpy as jnp

    from mupax.train.core.program import assemble

    count = len(targets)
    data_config = dataclasses.replace(config.data, batch_size=count, eval_batch_size=count)
    config = dataclasses.replace(config, data=data_config)
    # One device, because the few images may not divide evenly over more.
    program = assemble(config, jax.devices()[:1])
    step = program.compile_train()
    definition = program.definition
    batch = {
        "inputs": jnp.asarray(images),
        "targets": jnp.asarray(targets, jnp.int32),
        "weights": jnp.ones(count),
    }

    @jax.jit
    def outputs_of(params: Any, step_inputs: Any) -> tuple[jax.Array, jax.Array]:
        """Return the logits and the inputs of the readout.

        If there are reference parameters (of a centered model), their logits are subtracted.
        """
        factors = step_inputs.factors
        readings = []
        for weights in (params, step_inputs.reference):
            if weights is not None:
                module = definition.model(weights, factors.multiplier, factors.forward)
                readings.append(module.readout_inputs(batch["inputs"]))
        logits = readings[0].logits()
        reference_logits = readings[1].logits() if len(readings) > 1 else 0.0
        return logits - reference_logits, readings[0].features

    networks = []
    for seed in range(seeds):
        # The compiled step is reused, because the seed is no part of it.
        seed_program = dataclasses.replace(program, config=dataclasses.replace(config, seed=seed))
        step_inputs = seed_program.step_inputs()
        state = seed_program.placed(seed_program.initial_state(), step)
        outputs = [outputs_of(state.params, step_inputs)]
        for _ in range(config.steps):
            state, _ = step(state, step_inputs, batch)
            outputs.append(outputs_of(state.params, step_inputs))
        logits = []
        features = []
        # Fetched after all steps, because each fetch would wait for the device.
        for step_logits, step_features in jax.device_get(outputs):
            logits.append(step_logits)
            features.append(step_features)
        states = _NetworkStates(np.stack(logits), np.stack(features), attention=np.zeros(0))
        networks.append(states)
    return Trajectory.of(networks, targets)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dynamics:
    """Training of a model with infinitely many heads on a few images: loss, kernels and attention.

    All have error bars. Every initial matrix is drawn only along directions that it has acted on,
    so the network has the law of a dense one of its width. Updates of SGD are of low rank. The
    images are synthetic (`shapes`) unless --data.name names others. --model.*, --preset.*,
    --optimizer.* and --seed are the flags of the recipe.
    """

    model: Annotated[str, conf.arg(metavar="MODEL|RECIPE|FILE")] = "bordelon-vit"
    """Vision transformer of `mupax models` without gains and biases, a recipe, or a config file.

    `--config FILE` is the same. Its number of heads grows to --heads.
    """
    steps: Annotated[int, conf.arg(metavar="N")] = 8
    """Number of SGD steps, all on the same images."""
    images: Annotated[int, conf.arg(metavar="N")] = 2
    """Number of images."""
    heads: Annotated[int, conf.arg(metavar="H")] = 512
    """Number of heads that stands for infinitely many.

    A network differs from the limit by H^-1/2, the mean of many networks by 1/H.
    """
    draws: Annotated[int, conf.arg(metavar="N")] = 2
    """Number of independent networks. Their standard error is the error bar."""
    finite: Annotated[tuple[int, ...], conf.arg(metavar="H ...")] = ()
    """Also train models with these numbers of heads by the zoo's training step."""
    seeds: Annotated[int, conf.arg(metavar="N")] = 4
    """Number of initializations of each finite model."""
    float64: Switch = False
    """Compute the infinite model in float64, in twice the memory."""
    figure: Annotated[str | None, conf.arg(metavar="PATH")] = None
    """Draw loss, kernels and attention (PNG)."""
    json: Annotated[str | None, conf.arg(metavar="PATH")] = None
    """Write all values as JSON."""
    dry_run: Switch = False
    """Print the size of the network and its records, and train nothing."""

    def __post_init__(self) -> None:
        at_least("--", self, 1, "steps", "images", "heads")
        at_least("--", self, 2, "draws", "seeds")
        for count in self.finite:
            if count < 1:
                raise ConfigError(f"--finite has {count}; write numbers of heads of at least 1")
        if not self.finite:
            cure = "add --finite H ..., such as --finite 8"
            command_line.refuse_idle(self, ("seeds",), "without --finite", cure)


def main(argv: Sequence[str]) -> int:
    """Run `mupax presets dynamics`: train the networks, print a table, and write JSON and a figure.

    JSON and figure are written if flags name their paths, and existing files are replaced. A dry
    run only prints the sizes of the network and of its records. Return exit code 0.

    Raises:
        UsageError, ConfigError, PresetError: The flags or the model do not fit.
    """
    args, rest = command_line.parse_known(
        Dynamics, PROG, with_group_constants(_with_model_flag(argv))
    )
    config = _config(args, rest)
    check(config)
    wide = with_heads(config, args.heads)
    rank = check_rank(wide, args.images)
    model: Any = wide.model
    bytes_per_value = 8 if args.float64 else 4
    size = terminal.gib(MATRICES * model.width * rank * model.depth * bytes_per_value)
    terminal.say(
        f"{args.model} of N = {model.heads_dim}, L = {model.depth}, {args.heads} heads "
        f"(width {model.width}) for infinitely many; "
        f"{counted(args.images, 'image')}, {counted(args.steps, 'step')}; "
        f"{rank} directions of every matrix, {size} of records"
    )
    if args.dry_run:
        return 0
    check_outputs(args, "json", pictures=("figure",))

    images, targets = examples(config, args.images)
    infinite = limit(
        config,
        images,
        targets,
        heads=args.heads,
        draws=args.draws,
        seed=config.seed,
        dtype=np.float64 if args.float64 else np.float32,
    )
    nets = {}
    for count in args.finite:
        nets[count] = finite(with_heads(config, count), images, targets, seeds=args.seeds)
    terminal.say(f"\n{terminal.table(rows(infinite, nets))}")
    if args.json:
        record = {
            "heads": args.heads,
            "limit": _as_json(infinite),
            "finite": {str(count): _as_json(net) for count, net in nets.items()},
        }
        Path(args.json).write_text(disk.json_text(record) + "\n")
    if args.figure:
        title = f"{args.model}, N = {model.heads_dim}, L = {model.depth}"
        picture(infinite, nets, title).savefig(args.figure)
    return 0


def _config(args: Dynamics, rest: Sequence[str]) -> Config:
    """Return the config of the run whose infinite limit is computed.

    A model without a recipe gets the recipe `bordelon-vit`. That recipe trains on synthetic images
    (`shapes`) unless `--data.name` is given. The run has `args.steps` steps.

    Args:
        rest: Words of the command line that are no flags of `Dynamics`.
    """
    if cli.is_recipe(args.model):
        recipe = args.model
        words = list(rest)
    else:
        recipe = "bordelon-vit"
        words = ["--model", args.model, *rest]
    # Synthetic images need no download.
    if recipe == "bordelon-vit" and not any(word.startswith("--data.name") for word in words):
        words = [*words, "--data.name", "shapes"]
    parsed = cli.parse(recipe, cli.recipe(recipe), words, command_line.flags(Dynamics))
    cli.refuse_session_flags(PROG, parsed)
    return dataclasses.replace(parsed.config, steps=args.steps)


def _with_model_flag(argv: Sequence[str]) -> list[str]:
    """Return the command line with its model written as `--model NAME`.

    The user may have written a config file as `--config PATH`, or any model as the first word, as
    other commands take it.
    """
    words = cli.with_file_first(argv)
    if words and not words[0].startswith("-"):
        return ["--model", *words]
    return words


def mean(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean over networks, axis 0, and its standard error, NaN for a single network."""
    # ddof=1 needs two networks, which `Dynamics` demands.
    return values.mean(0), values.std(0, ddof=1) / len(values) ** 0.5


def rows(limit: Trajectory, nets: Mapping[int, Trajectory]) -> list[list[str]]:
    """Return the table of results as text: a header and a line per step.

    Columns after the step are means over networks with their standard errors: losses, the kernel
    C(t, t) of the readout's inputs, C(t, 0) divided by the square root of C(t, t) C(0, 0), and the
    root mean squares of the attention logits and of their mean over heads.

    Args:
        limit: Networks that stand for the infinite model.
        nets: Finite models by their number of heads. Only their losses are in the table.
    """
    own_kernel_ZT = np.einsum("ztt->zt", limit.memory)
    correlation_ZT = limit.memory[:, 0] / np.sqrt(own_kernel_ZT * own_kernel_ZT[:, :1])
    columns = {
        "step": [str(step) for step in range(own_kernel_ZT.shape[1])],
        "loss, infinite": _cells(limit.losses),
    }
    for count, net in nets.items():
        columns[f"loss, H = {count}"] = _cells(net.losses)
    columns["C(t, t)"] = _cells(own_kernel_ZT)
    columns["C(t, 0) / root"] = _cells(correlation_ZT)
    columns["attention logits, rms"] = _cells(np.sqrt(limit.attention[..., 0].mean(-1)))
    columns["the same in all heads"] = _cells(np.sqrt(limit.attention[..., 1].mean(-1)))
    lines = [list(columns)]
    for row in zip(*columns.values(), strict=True):
        lines.append(list(row))
    return lines


def _cells(values: np.ndarray) -> list[str]:
    """Return the mean over networks with its standard error, as text for each step."""
    means, errors = mean(values)
    cells = []
    for value, error in zip(means, errors, strict=True):
        cells.append(f"{value:.4f} ± {error:.4f}")
    return cells


def picture(
    limit: Trajectory, nets: Mapping[int, Trajectory], title: str
) -> matplotlib.figure.Figure:
    """Return a figure over the steps: loss, kernel C(t, s), and attention logits by layer.

    Args:
        limit: Networks that stand for the infinite model. C(t, s) is `Trajectory.memory`.
        nets: Finite models by their number of heads. Only their losses are drawn.
    """
    # `Figure` and not pyplot, which keeps figures in global state and may ask for a display.
    from matplotlib.figure import Figure

    from mupax.train.run.report.plotting import INK, style

    figure = Figure(figsize=(13, 3.8), dpi=110, layout="constrained")
    figure.suptitle(title, fontsize=12, color=INK, x=0.01, ha="left")
    loss_axes, kernel_axes, attention_axes = figure.subplots(1, 3)
    steps = np.arange(limit.losses.shape[1])
    titles = {
        "Loss, nats": loss_axes,
        "Kernels C(t, s), each line an s": kernel_axes,
        "Attention logits, rms": attention_axes,
    }
    for name, axes in titles.items():
        style(axes, 0, int(steps[-1]))
        axes.set_title(name, fontsize=10, color=INK, loc="left")
        axes.set_xlabel("step t", fontsize=9)
    _draw_losses(loss_axes, steps, limit, nets)
    _draw_kernels(kernel_axes, steps, limit)
    _draw_attention(attention_axes, steps, limit)
    return figure


def _draw_losses(
    axes: Any, steps: np.ndarray, limit: Trajectory, nets: Mapping[int, Trajectory]
) -> None:
    """Draw the losses of finite models and of the infinite limit over the steps.

    Every finite network has a thin line, and the mean of a model's networks has a thick one. Models
    with fewer heads are fainter. The limit is a mean with error bars.
    """
    from mupax.train.run.report.plotting import BLUE, ORANGE

    opacities = np.linspace(0.4, 0.9, len(nets))
    for opacity, (count, net) in zip(opacities, sorted(nets.items()), strict=True):
        axes.plot(steps, net.losses.T, color=ORANGE, alpha=opacity / 3, linewidth=0.8)
        label = f"our step, H = {count}"
        axes.plot(steps, net.losses.mean(0), color=ORANGE, alpha=opacity, label=label)
    mean_losses, errors = mean(limit.losses)
    axes.errorbar(steps, mean_losses, errors, color=BLUE, capsize=2, label="infinitely many heads")
    axes.legend(fontsize=8, frameon=False)


def _draw_kernels(axes: Any, steps: np.ndarray, limit: Trajectory) -> None:
    """Draw the kernel C(t, s) over t, with a line for each s (darker for a later s).

    C(t, s) is `Trajectory.memory`, averaged over networks.
    """
    from mupax.train.run.report.plotting import BLUE

    memory = limit.memory.mean(0)
    for step in steps:
        axes.plot(steps, memory[step], color=BLUE, alpha=0.25 + 0.75 * step / steps[-1])


def _draw_attention(axes: Any, steps: np.ndarray, limit: Trajectory) -> None:
    """Draw two lines per layer: RMS of the attention logits, and RMS of their mean over heads."""
    from mupax.train.run.report.plotting import BLUE, GREY

    num_layers = limit.attention.shape[2]
    rms_TL2 = np.sqrt(limit.attention.mean(0))
    for layer in range(num_layers):
        opacity = 0.4 + 0.6 * (layer + 1) / num_layers
        # Only the last layer, which is drawn in full, is in the legend.
        is_last = opacity == 1
        all_label = "all" if is_last else None
        mean_label = "their mean over heads" if is_last else None
        axes.plot(steps, rms_TL2[:, layer, 0], color=BLUE, alpha=opacity, label=all_label)
        axes.plot(steps, rms_TL2[:, layer, 1], "--", color=GREY, alpha=opacity, label=mean_label)
    axes.legend(fontsize=8, frameon=False, title="layers faint to full", title_fontsize=8)


def _as_json(trajectory: Trajectory) -> dict[str, Any]:
    """Return the arrays of a trajectory as lists, rounded to six decimals."""
    lists = {}
    for name, x in vars(trajectory).items():
        lists[name] = np.asarray(x).round(6).tolist()
    return lists
