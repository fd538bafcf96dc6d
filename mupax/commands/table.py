"""Table of the commands of `mupax`.

`mupax --help`, dispatch, shell completion and docs/reference/commands.md are made from this table.
A row has a function that imports its command, so that a process imports only what was typed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

from mupax import plugins
from mupax.command_line import Runnable

Prepared = Literal["nothing", "run", "arrays", "weights"]
"""Checks before a command.

`nothing` checks nothing. `run` checks paths and memory. `arrays` and `weights` also check JAX's
settings. Commands of weights return freed memory to the system; the other two keep it for reuse.
"""
Main = Callable[[list[str]], int]
"""Function that runs a command. It takes the words after the name and returns the exit code."""
_MACHINE = "Take a smaller model, or a machine with more memory"
_ONE_BATCH = "Write a smaller --data.batch-size, or more --accumulation-steps"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """A row of the table: one command or subcommand.

    Attributes:
        summary: Line of `mupax --help`.
        example: Words of an example after `mupax`.
        run: Function that imports the command and returns it, either as a `Main` or as the
            dataclass of its flags. `None` if the command needs a subcommand.
        subcommands: Rows for the word after the command.
        default: Name of the subcommand that runs if the line names none.
        takes_recipe: `True` if the first word is a recipe. `--config FILE` may replace the recipe.
        prepared: Checks before the command is imported.
        is_local: `True` if paths in a bucket are refused.
        less_memory: Advice for the message about too little memory, one or more sentences.
    """

    name: str
    summary: str
    example: str
    run: Callable[[], Main | type[Runnable]] | None = None
    subcommands: tuple[Command, ...] = ()
    default: str | None = None
    takes_recipe: bool = False
    prepared: Prepared = "nothing"
    is_local: bool = False
    less_memory: str = _MACHINE


# Functions that import the code of one command each. Group TRAIN.


def _train():
    from mupax.train.run import command

    return command.main


def _finetune():
    from mupax.train.reuse.start import finetune
    from mupax.train.run import command

    def main(words: list[str]) -> int:
        # `words` may hold --plugin MODULE, which a child process of --restart needs. The flags of
        # the command do not include it.
        _, own_words = plugins.split(words)
        return command.start(finetune.command(own_words), ["finetune", *words])

    return main


def _data_prepare():
    from mupax.commands.data import Prepare

    return Prepare


def _data_show():
    from mupax.train.data.show import Show

    return Show


def _data_tokenizer():
    from mupax.train.data.tokenizer_command import TrainTokenizer

    return TrainTokenizer


def _checkpoints_list():
    from mupax.train.checkpoints import command

    return command.main


def _checkpoints_verify():
    from mupax.train.checkpoints import command

    # `mupax checkpoints RUN --verify` means the same, so one command does both.
    return lambda words: command.main([*words, "--verify"])


# Functions that import the code of one command each. Group TUNE.


def _sweep():
    from mupax.train.studies.sweep import command

    return command.main


def _tune():
    from mupax.train.studies.tune import command

    return command.main


def _transfer():
    from mupax.train.studies.transfer import command

    return command.main


def _plan():
    from mupax.train.studies.plan import command

    return command.main


def _plan_score():
    from mupax.train.studies.plan import score

    return score.main


# Functions that import the code of one command each. Group INSPECT.


def _check():
    from mupax.train.studies.check import command

    return command.main


def _eval():
    from mupax.train.run import eval_command

    return eval_command.main


def _noise():
    from mupax.train.run import noise

    return noise.main


def _compile():
    from mupax.train.pods import command

    return command.main


# Functions that import the code of one command each. Group USE.


def _predict():
    from mupax.train.reuse.predict import command

    return command.main


def _generate():
    from mupax.train.reuse.generate import command

    return command.main


def _serve():
    from mupax.train.reuse.serve import command

    return command.main


def _import():
    from mupax.train.reuse.huggingface.command import Import

    return Import


def _export():
    from mupax.train.reuse.huggingface.command import Export

    return Export


def _push():
    from mupax.train.reuse.huggingface import push

    return push.main


def _grow():
    from mupax.train.reuse.grow import command

    return command.main


def _convert():
    from mupax.train.reuse import forms

    return forms.main


# Functions that import the code of one command each. Group THEORY.


def _presets_list():
    from mupax.commands.presets import List

    return List


def _presets_constants():
    from mupax.commands.presets import Constants

    return Constants


def _presets_table():
    from mupax.commands.presets import Table

    return Table


def _presets_limits():
    from mupax.commands.presets import Limits

    return Limits


def _presets_desiderata():
    from mupax.commands.presets import Desiderata

    return Desiderata


def _presets_compare():
    from mupax.commands.presets import Compare

    return Compare


def _presets_joint():
    from mupax.presets.analysis.batch_command import Joint

    return Joint


def _presets_tuned():
    from mupax.commands.presets import Tuned

    return Tuned


def _presets_balance():
    from mupax.train.studies.check import balance_command

    return balance_command.main


def _presets_dynamics():
    from mupax.train.studies.infinite import command

    return command.main


def _models_list():
    from mupax.commands.models import List

    return List


def _models_describe():
    from mupax.commands.models import Describe

    return Describe


def _models_roles():
    from mupax.train.studies.roles import command

    return command.main


def _verify():
    from mupax.presets.verify.command import Verify

    return Verify


DATA = (
    Command(
        name="prepare",
        summary="write a data set to disk, or tokenize a text, before a run needs it",
        example="data prepare text:my_texts --tokenizer bpe:4096",
        run=_data_prepare,
    ),
    Command(
        name="show",
        summary="print examples of span denoising: input, target and text",
        example="data show text:my_texts --noise sentinels",
        run=_data_show,
    ),
    Command(
        name="tokenizer",
        summary="train a byte-level BPE tokenizer on your texts",
        example="data tokenizer text:my_texts --size 4096 --out my_tokenizer.json",
        run=_data_tokenizer,
    ),
)
CHECKPOINTS = (
    Command(
        name="list",
        summary="list a run's checkpoints: step, losses, size, age and health",
        example="checkpoints list runs/lm-tiny",
        run=_checkpoints_list,
        prepared="arrays",
    ),
    Command(
        name="verify",
        summary="list checkpoints, and compare every file and array with its digest",
        example="checkpoints verify runs/lm-tiny",
        run=_checkpoints_verify,
        prepared="arrays",
    ),
)
TRAIN = (
    Command(
        name="train",
        summary="train a recipe, a config file, or the run in --workdir again",
        example="train lm-tiny --steps 200 --workdir runs/lm-tiny",
        run=_train,
        takes_recipe=True,
        prepared="run",
    ),
    Command(
        name="finetune",
        summary="train on your own folder, from a run or imported weights",
        example="finetune my_images --from runs/vit-digits --workdir runs/mine",
        run=_finetune,
        prepared="run",
    ),
    Command(
        name="data",
        summary="prepare data, show text with noise, train a tokenizer",
        example=DATA[0].example,
        subcommands=DATA,
    ),
    Command(
        name="checkpoints",
        summary="list a run's checkpoints with their health, and verify them",
        example=CHECKPOINTS[0].example,
        run=_checkpoints_list,
        subcommands=CHECKPOINTS,
        prepared="arrays",
    ),
)
PLAN = (
    Command(
        name="score",
        summary="compare a forecast or a plan with the finished run",
        example="plan score plan.json runs/lm-tiny",
        run=_plan_score,
        prepared="arrays",
    ),
)
TUNE = (
    Command(
        name="sweep",
        summary="train many learning rates, seeds, constants and sizes; one compilation per shape",
        example="sweep lm-tiny --steps 200 --lr 2^-9:2^-5:5 --seeds 2",
        run=_sweep,
        takes_recipe=True,
        prepared="arrays",
        # Many small files belong on a disk: in a bucket, each of them is a request.
        is_local=True,
        less_memory=_ONE_BATCH,
    ),
    Command(
        name="tune",
        summary="search many constants together: rates, stds, multipliers and decays by group",
        example="tune lm-tiny --over lr,readout.lr --steps 200",
        run=_tune,
        takes_recipe=True,
        prepared="arrays",
        is_local=True,
        less_memory=_ONE_BATCH,
    ),
    Command(
        name="transfer",
        summary="measure whether the best learning rate stays as the model grows",
        example="transfer lm-tiny --steps 200 --grow head_dim=16,32,64",
        run=_transfer,
        takes_recipe=True,
        prepared="arrays",
        is_local=True,
        less_memory="Write a smaller --data.batch-size, or fewer sizes",
    ),
    Command(
        name="plan",
        summary="print a run's config, cost and, if a law reaches it, loss before it is run",
        example="plan lm-laptop --tokens 10m --out plan.json",
        run=_plan,
        subcommands=PLAN,
        takes_recipe=True,
        prepared="arrays",
    ),
)
INSPECT = (
    Command(
        name="check",
        summary="measure what a preset does as one size grows, and compare with theory",
        example="check lm-tiny --preset mup --grow heads",
        run=_check,
        takes_recipe=True,
        prepared="arrays",
        is_local=True,
        less_memory="Write fewer --sizes, or a smaller --model.seq-len",
    ),
    Command(
        name="eval",
        summary="compute loss and accuracy of any checkpoint, on its data or on other data",
        example="eval runs/lm-tiny --json scores.json",
        run=_eval,
        prepared="arrays",
        less_memory="Write a smaller --data.eval-batch-size",
    ),
    Command(
        name="noise",
        summary="estimate the gradient noise scale at a checkpoint, for joint rules",
        example="noise runs/lm-tiny --batches 8",
        run=_noise,
        prepared="arrays",
        less_memory="Write a smaller --data.batch-size, or fewer --batches",
    ),
    Command(
        name="compile",
        summary="compile a recipe for TPUs or GPUs that are not here: memory, collectives, step time",
        example="compile lm-1b --topology v5e:4x4",
        run=_compile,
        takes_recipe=True,
        prepared="arrays",
        is_local=True,
    ),
)
USE = (
    Command(
        name="predict",
        summary="print the likeliest classes of image files",
        example="predict runs/vit-digits my_images --top 3",
        run=_predict,
        prepared="arrays",
        less_memory="Name fewer images at a time",
    ),
    Command(
        name="generate",
        summary="write text with a language model, or hold a conversation",
        example="generate runs/lm-tiny --prompt def --tokens 100",
        run=_generate,
        prepared="arrays",
        less_memory="Write fewer --samples or a shorter --prompt",
    ),
    Command(
        name="serve",
        summary="serve a language model by OpenAI's API, with a page to try it in a browser",
        example="serve runs/lm-tiny --port 8000",
        run=_serve,
        prepared="arrays",
        less_memory="Ask for fewer samples at a time, or serve a smaller model",
    ),
    Command(
        name="import",
        summary="read weights of Hugging Face into a preset's form",
        example="import openai-community/gpt2 --out runs/gpt2",
        run=_import,
        # No training step could use freed memory again, so the process gives it back to the system.
        prepared="weights",
    ),
    Command(
        name="export",
        summary="write a run's weights as files of Hugging Face",
        example="export runs/lm-tiny --out exported",
        run=_export,
        prepared="weights",
    ),
    Command(
        name="push",
        summary="upload a run or a folder of weights to Hugging Face, private unless asked",
        example="push runs/lm-tiny --to user/my-model --dry-run",
        run=_push,
        prepared="arrays",
    ),
    Command(
        name="grow",
        summary="make a larger model of a checkpoint, with almost the same function",
        example="grow runs/lm-tiny --set depth=8 --out runs/lm-deeper",
        run=_grow,
        prepared="arrays",
    ),
    Command(
        name="convert",
        summary="convert a run's checkpoint to another form of its preset",
        example="convert runs/lm-tiny --form mean-field --out runs/lm-mean-field",
        run=_convert,
        prepared="arrays",
    ),
)
PRESETS = (
    Command(
        name="list",
        summary="list the presets",
        example="presets list",
        run=_presets_list,
    ),
    Command(
        name="constants",
        summary="list a preset's constants, and the sources that disagree on them",
        example="presets constants mup",
        run=_presets_constants,
    ),
    Command(
        name="table",
        summary="print every parameter's multiplier, std, learning rate, eps and decay",
        example="presets table mup --model gpt2-large --base gpt2",
        run=_presets_table,
    ),
    Command(
        name="limits",
        summary="print what each size does to activations, updates and gradients as it grows",
        example="presets limits mup --optimizer adam",
        run=_presets_limits,
    ),
    Command(
        name="desiderata",
        summary="print which sizes (width, heads, depth, ...) can grow alone",
        example="presets desiderata depth-mup",
        run=_presets_desiderata,
    ),
    Command(
        name="compare",
        summary="compare the verdicts of several presets",
        example="presets compare mup sp",
        run=_presets_compare,
    ),
    Command(
        name="joint",
        summary="print the rules for batch and tokens",
        example="presets joint --batch 8:64 --tokens 1:8",
        run=_presets_joint,
    ),
    Command(
        name="tuned",
        summary="list tuned presets, or describe one",
        example="presets tuned mup:lm-laptop-v2",
        run=_presets_tuned,
    ),
    Command(
        name="balance",
        summary="derive learning rates per layer from one batch, where no preset has a rule",
        example="presets balance vit-proxy --optimizer sgd --out rates.json",
        run=_presets_balance,
        takes_recipe=True,
        prepared="arrays",
        is_local=True,
    ),
    Command(
        name="dynamics",
        summary="train a model with infinitely many heads: loss, kernels and attention",
        example="presets dynamics --heads 64 --steps 4",
        run=_presets_dynamics,
        takes_recipe=True,
    ),
)
MODELS = (
    Command(
        name="list",
        summary="list the named models with sizes, parameters and FLOPs",
        example="models list",
        run=_models_list,
    ),
    Command(
        name="describe",
        summary="print every parameter of a model: path, role, shape and axes",
        example="models describe lm-tiny",
        run=_models_describe,
        # The word is the name of a model, but --config FILE may stand in its place.
        takes_recipe=True,
    ),
    Command(
        name="roles",
        summary="find the role of every parameter in the loss, and compare with what is declared",
        example="models roles lm-tiny",
        run=_models_roles,
        takes_recipe=True,
        prepared="arrays",
    ),
)
THEORY = (
    Command(
        name="presets",
        summary="list parameterizations, print their tables and what follows from them",
        example=PRESETS[2].example,
        subcommands=PRESETS,
        default="list",
    ),
    Command(
        name="models",
        summary="list and describe models, and find the roles of their parameters",
        example=MODELS[1].example,
        subcommands=MODELS,
        default="list",
    ),
    Command(
        name="verify",
        summary="check the parameterization of other code, from its values at two sizes",
        example="verify small.json large.json",
        # Nothing is prepared, because the training was done by other code, elsewhere.
        run=_verify,
    ),
)
GROUPS: dict[str, tuple[Command, ...]] = {
    "Train": TRAIN,
    "Tune": TUNE,
    "Inspect": INSPECT,
    "Use": USE,
    "Theory": THEORY,
}
"""Commands by group, in the order of `mupax --help`."""


def commands() -> dict[str, Command]:
    """Return every command by name, in the order of `mupax --help`, without subcommands."""
    rows: dict[str, Command] = {}
    for group in GROUPS.values():
        rows.update((command.name, command) for command in group)
    return rows
