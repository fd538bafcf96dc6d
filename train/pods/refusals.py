"""What to say of a step that the TPU compiler refuses."""

from __future__ import annotations

from mupax.errors import MupaxError

_WORDS = 500
"""Most characters of the compiler's message that are shown."""


class RefusedError(MupaxError):
    """A step that the TPU compiler refuses. The text has its words, and what to write instead where that is known."""


def refused(topology: str, message: str, attention_block: int | None) -> RefusedError:
    """What to say of a step that does not compile.

    Args:
        topology: that it was compiled for.
        message: the compiler's.
        attention_block: of the run, a kernel's; its scratch memory is a core's own.
    """
    words = " ".join(message.split())[:_WORDS]
    hint = ""
    if "vmem" in message:
        smaller = (
            f"--model.compute.attention-block {attention_block // 2}, or "
            if attention_block
            else ""
        )
        hint = f"; a core's own memory is too small: write {smaller}more for one operation with --vmem-kib"
    return RefusedError(f"the compiler of {topology} refuses this step{hint}. It says: {words}")
