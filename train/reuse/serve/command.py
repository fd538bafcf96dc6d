"""`mupax serve WORKDIR`: a language model behind OpenAI's API, with a page to try it."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from tyro import conf

from mupax import command_line, extras, terminal
from mupax.train.checkpoints.command import TEMPLATE_FLAG, ModelFlags
from mupax.train.reuse.serve.logs import one_line

if TYPE_CHECKING:
    from mupax.train.reuse.serve.service import Service


@dataclasses.dataclass(frozen=True, kw_only=True)
class Serve(ModelFlags):
    """A language model behind OpenAI's API, and a page to try it in a browser.

    WORKDIR is a run, one of its steps, a folder that `mupax import` wrote, one of Hugging Face, or
    ORG/NAME of its hub. The routes are /v1/completions, /v1/chat/completions if there is a chat
    template beside the tokenizer, /v1/models and /health. By default only this machine is answered,
    because there is no key and no encryption. Ctrl-C ends the server.
    """

    host: Annotated[str, conf.arg(metavar="ADDRESS")] = "127.0.0.1"
    """Address to listen at. 0.0.0.0 answers everyone who reaches this machine."""
    port: Annotated[int, conf.arg(metavar="N")] = 8000
    """Port to listen at. 0 takes any free port."""
    tokenizer: Annotated[str | None, conf.arg(name="data.tokenizer", metavar="bytes|FILE")] = None
    """Tokenizer of weights without a run that have no tokenizer.json beside them."""
    separator: Annotated[str | None, conf.arg(name="data.separator", metavar="TOKEN")] = None
    """Token that ends a document, for weights without a run, if it has none of the usual names."""
    chat_template: Annotated[str | None, TEMPLATE_FLAG] = None
    """Jinja2 template of chats, in place of the one beside the tokenizer."""
    slots: Annotated[int, conf.arg(metavar="N")] = 8
    """Number of texts that are written at once. Each takes the memory of a full context."""
    max_tokens: Annotated[int, conf.arg(metavar="N")] = 100_000
    """Largest number of tokens that a request may ask for in each of its texts."""
    max_seconds: Annotated[float, conf.arg(metavar="S")] = 600.0
    """Time limit of a request. Its incomplete texts then end with finish_reason length."""
    max_waiting: Annotated[int, conf.arg(metavar="N")] = 64
    """Largest number of requests that wait for a slot. Further requests are answered 503."""


def main(argv: Sequence[str]) -> int:
    """Serve a model until a signal ends the process. Ctrl-C gives exit code 130.

    Raises:
        UsageError: A flag is out of its range, or the extra `serve` is not installed.
        WorkdirError, DataError: The model or its tokenizer cannot be read.
    """
    args = command_line.parse(Serve, "mupax serve", argv)
    _check(args)
    from mupax.train.reuse.serve.server import Server

    # The server listens before weights are read, so that a port that is in use is noticed at once.
    with Server(args.host, args.port) as server:
        service = opened_service(args)
        server.service = service
        if not server.local:
            terminal.note(
                f"caution: {args.host} is answered to whoever reaches this machine, without a key "
                "or encryption"
            )
        chat = "chat and completions" if service.template else "completions, no chat template"
        terminal.say(f"serving {one_line(service.name)} ({chat}) at {server.url}; Ctrl-C ends it")
        # Ctrl-C while uvicorn starts leaves one of its coroutines unstarted, and Python would warn.
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        try:
            server.serve_forever()
        finally:
            service.close()
    return 0


def _check(args: Serve) -> None:
    """Raise `UsageError` for a flag out of its range, or if the extra `serve` is not installed."""
    if not 0 <= args.port < 1 << 16:
        raise command_line.UsageError(f"--port is {args.port}; write a number from 0 to 65535")
    positive = {
        "--slots": args.slots,
        "--max-tokens": args.max_tokens,
        "--max-waiting": args.max_waiting,
    }
    for flag, value in positive.items():
        if value < 1:
            raise command_line.UsageError(f"{flag} is {value}; write at least 1")
    if not 0 < args.max_seconds < math.inf:
        raise command_line.UsageError(
            f"--max-seconds is {args.max_seconds}; write a positive number"
        )
    extras.require("serve", "mupax serve", command_line.UsageError)


def opened_service(args: Serve) -> Service:
    """Load the model of a command line and return its service, whose worker thread is started.

    A model of the Hugging Face hub is downloaded first. A model or template that does not fit
    raises an error before weights are read.
    """
    from mupax.train.checkpoints.assets import end_ids
    from mupax.train.reuse import runs, trained
    from mupax.train.reuse.generate.decode import Generator
    from mupax.train.reuse.huggingface import hub
    from mupax.train.reuse.serve.service import Limits, Service

    source = hub.local(args.workdir, args.revision)
    run = trained.open_model(
        source, args.step, args.average, tokenizer=args.tokenizer, separator=args.separator
    )
    run.check_decoder("serve")
    tokenizer = run.tokenizer()
    template = run.template(args.chat_template)
    program = runs.on_one_device(run.config)
    generator = Generator(
        program, run.params(program.abstract), program.step_inputs(), sampling=None
    )
    limits = Limits(
        slots=args.slots,
        max_tokens=args.max_tokens,
        max_seconds=args.max_seconds,
        max_waiting=args.max_waiting,
    )
    ends = end_ids(run.config.data.tokenizer, tokenizer)
    return Service(args.workdir.absolute().name, run, tokenizer, template, ends, generator, limits)
