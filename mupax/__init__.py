"""mupax: transformers in JAX whose hyperparameters carry over from small to large.

The text of the exceptions here is a message for the user: what is wrong, where, and what to write
instead. `mupax.terminal` prints the text and ends the process with the exit code.
"""

from __future__ import annotations

__version__ = "0.1.0"


class MupaxError(ValueError):
    """Error about bad input. Its text is printed without a traceback, and the exit code is 2."""


class MupaxFailure(RuntimeError):
    """Error about a failure of the machine, such as a full disk.

    Its text is printed without a traceback, and the exit code is 1.
    """
