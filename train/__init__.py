"""Training: data, mesh, optimizer, step, loop and checkpoints.

In Python::

    import dataclasses
    from mupax import train

    config = dataclasses.replace(train.RECIPES["lm-tiny"](), steps=200)
    run = train.fit(config)  # the same as `mupax train lm-tiny --steps 200`
    print(run.workdir, run.step, run.evaluation["eval_loss"])

    # The trained model of a run, a workdir, an imported folder, or ORG/NAME of Hugging Face.
    model = train.load(run)
    print(model.generate("def ", tokens=100))
    # A model of images has model.predict(["a.png", "b.png"]) instead.

    # The model, step and optimizer of a config, for a training loop of your own.
    program = train.assemble(config.resolved())

    # A preset for a model and a training loop of any framework.
    train.parameterize(definition, preset, optimizer)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mupax.train.config.recipes import RECIPES
    from mupax.train.config.run import (
        CheckpointConfig,
        Config,
        DataConfig,
        DistributedConfig,
        MeshConfig,
        OptimizerConfig,
        PresetConfig,
    )
    from mupax.train.core.functional.parameterization import Parameterization, parameterize
    from mupax.train.core.program import Program, assemble
    from mupax.train.reuse.model import Model, Prediction, load
    from mupax.train.run.fit import Run, TrainingFailed, fit
    from mupax.train.run.hooks import HookRun, every
    from mupax.train.run.runtime import HookError

__all__ = [
    "RECIPES",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "DistributedConfig",
    "HookError",
    "HookRun",
    "MeshConfig",
    "Model",
    "OptimizerConfig",
    "Parameterization",
    "Prediction",
    "PresetConfig",
    "Program",
    "Run",
    "TrainingFailed",
    "assemble",
    "every",
    "fit",
    "load",
    "parameterize",
]

_MODULES = {
    "Parameterization": "core.functional.parameterization",
    "parameterize": "core.functional.parameterization",
    "RECIPES": "config.recipes",
    "Program": "core.program",
    "assemble": "core.program",
    "fit": "run.fit",
    "every": "run.hooks",
    "HookRun": "run.hooks",
    "HookError": "run.runtime",
    "Run": "run.fit",
    "TrainingFailed": "run.fit",
    "load": "reuse.model",
    "Model": "reuse.model",
    "Prediction": "reuse.model",
}
"""Public name to the module below `mupax.train` that defines it.

`__getattr__` imports the module when the name is first used, because some of the modules import
JAX. Public names that are not listed here are in `config.run`.
"""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    module_name = _MODULES.get(name, "config.run")
    module = importlib.import_module(f"mupax.train.{module_name}")
    return getattr(module, name)
