"""Errors for steps that the compiler of a TPU or GPU refuses."""

from __future__ import annotations

from mupax import MupaxError

_MAX_CHARACTERS = 500
"""Most characters of the compiler's message that are shown."""


class RefusedError(MupaxError):
    """Step that the compiler refuses. The message has the compiler's words and maybe a hint."""


def refused(topology: str, message: str, attention_block: int | None) -> RefusedError:
    """Return the error for a step that does not compile, with the compiler's words.

    If a core's own memory (vmem) is too small, the message has a hint on flags.

    Args:
        topology: Topology that the step was compiled for.
        attention_block: Side of the run's attention blocks. `None` if the kernel chooses it.
    """
    words = " ".join(message.split())[:_MAX_CHARACTERS]
    hint = ""
    # An attention kernel's scratch memory is in a core's own memory, which XLA calls vmem.
    if "vmem" in message:
        smaller = ""
        if attention_block:
            smaller = f"--model.compute.attention-block {attention_block // 2}, or "
        hint = (
            "; a core's own memory is too small: "
            f"write {smaller}more for one operation with --vmem-kib"
        )
    return RefusedError(f"the compiler of {topology} refuses this step{hint}. It says: {words}")
