"""HTTP around a `Service`: uvicorn has the connections, starlette the routes (`app.py`)."""

from __future__ import annotations

import types

import uvicorn

from mupax.train.reuse.serve.addresses import is_local, listening
from mupax.train.reuse.serve.app import App
from mupax.train.reuse.serve.protocol import LARGEST_HEAD, LimitedProtocol
from mupax.train.reuse.serve.service import Service

_BACKLOG = 128
_CONNECTIONS = 512
"""Connections at a time. Further ones are answered 503."""
_IDLE_S = 60
"""How long a connection may be open between requests."""
_SHUTDOWN_S = 1
"""How long answers may go on after Ctrl-C."""


class Server:
    """The server. It listens at once, so that a taken port is noticed before weights are read; `serve_forever` answers.

    Args:
        host: address to listen at.
        port: 0 for any.

    Raises:
        UsageError: this machine has no such address, or the port is taken.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._listener = listening(host, port, _BACKLOG)
        self._uvicorn: uvicorn.Server | None = None
        self._is_stopping = False
        self.local = is_local(host)
        """True if only this machine is answered."""
        self.server_port: int = self._listener.getsockname()[1]
        self.service: Service | None = None

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        self._listener.close()

    @property
    def url(self) -> str:
        """Address for a browser."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self.server_port}/"

    def serve_forever(self) -> None:
        """Answer requests until `shutdown`, or a signal."""
        assert self.service is not None
        config = uvicorn.Config(
            App(self.service, is_local=self.local),
            loop="asyncio",
            http=LimitedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # what a client does wrong is no news for the log
            access_log=False,
            proxy_headers=False,
            server_header=False,
            limit_concurrency=_CONNECTIONS,
            backlog=_BACKLOG,
            timeout_keep_alive=_IDLE_S,
            timeout_graceful_shutdown=_SHUTDOWN_S,
            h11_max_incomplete_event_size=LARGEST_HEAD,
        )
        self._uvicorn = uvicorn.Server(config)
        self._uvicorn.should_exit = self._is_stopping
        self._uvicorn.run(sockets=[self._listener])

    def shutdown(self) -> None:
        """Let `serve_forever` return. To be called from another thread."""
        self._is_stopping = True
        if self._uvicorn is not None:
            self._uvicorn.should_exit = True
