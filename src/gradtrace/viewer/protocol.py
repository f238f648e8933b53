"""HTTP connections that say nothing are closed: otherwise a few hundred half-open ones would block the viewer."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 5.0
"""From the first byte of a request, or from the connection, to the end of its headers."""


class ImpatientProtocol(H11Protocol):
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._arm()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_waiting():
            self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def _is_waiting(self) -> bool:
        """No request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _arm(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(HEADER_SECONDS, self._close_if_waiting, self.cycle)

    def _close_if_waiting(self, cycle: Any) -> None:
        """Unless a request has come since the clock was set."""
        self._timer = None
        if self.cycle is cycle and self._is_waiting() and not self.transport.is_closing():
            self.transport.close()
