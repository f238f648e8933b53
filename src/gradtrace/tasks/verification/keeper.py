"""A keeper: a process between the trainer and the process that judges, which it may have to kill.

    trainer (torch, threads) ──exec──▶ keeper (one thread) ──fork──▶ judge

The keeper never looks at an answer itself, so it cannot hang on one. It keeps the deadline, kills the judge that
misses it and forks the next from its own memory, where the imports are done already: a replacement is ready in
milliseconds. When the trainer is gone, even by SIGKILL, the keeper sees its socket close and ends, judge first.

Standard library only: importing torch here would cost seconds and a gigabyte for each worker.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Protocol

from gradtrace.tasks.sandbox import linux
from gradtrace.tasks.verification.channel import Channel, ClosedError, Message

Judge = Callable[[Message], Message]


class Service(Protocol):
    """What a keeper runs: one request at a time, answered before `request["timeout"]` seconds are much over."""

    def answer(self, request: Message, trainer: Channel) -> Message: ...

    def close(self) -> None: ...


class TrainerGoneError(Exception):
    """Nobody waits for the answer any more."""


def main(factory: str) -> None:
    """Serve requests from the socket on standard input until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which then closes the socket
    trainer = Channel(socket.socket(fileno=os.dup(0)))
    silence(0, 1, 2)
    module, _, name = factory.partition(":")
    try:
        service: Service = getattr(importlib.import_module(module), name)()
    except Exception as error:
        trainer.send({"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()})
        return
    with contextlib.suppress(ClosedError, TrainerGoneError):
        trainer.send({"ready": os.getpid()})
        while True:
            trainer.send(service.answer(trainer.receive(), trainer))
    service.close()


def silence(*descriptors: int) -> None:
    """Point descriptors at /dev/null: what a library prints must not reach a protocol or the user's terminal."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(nowhere, descriptor)
    os.close(nowhere)


class ForkedJudge:
    """A judge function in a forked process, with a deadline for every request and a bound on memory."""

    def __init__(self, judge: Judge, memory: int) -> None:
        self.judge = judge
        self.memory = memory
        self._pid = 0
        self._channel: Channel | None = None

    def answer(self, request: Message, trainer: Channel) -> Message:
        channel = self._ready()
        try:
            channel.send(request)
            if not self._wait(channel, time.monotonic() + request["timeout"], trainer):
                self.close()
                return {"failed": "deadline"}
            return channel.receive()
        except ClosedError:
            self.close()
            return {"failed": "crashed"}
        except TrainerGoneError:
            self.close()
            raise

    def close(self) -> None:
        if self._channel is None:
            return
        self._channel.close()
        self._channel = None
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    def _ready(self) -> Channel:
        if self._channel is None:
            ours, theirs = Channel.pair()
            keeper = os.getpid()
            self._pid = os.fork()
            if self._pid == 0:
                ours.close()
                self._serve(theirs, keeper)
            theirs.close()
            self._channel = ours
        return self._channel

    def _wait(self, channel: Channel, deadline: float, trainer: Channel) -> bool:
        """Is there an answer before the deadline?"""
        while (left := deadline - time.monotonic()) > 0:
            readable, _, _ = select.select([channel, trainer], [], [], left)
            if channel in readable:
                return True
            if trainer in readable:  # it sends nothing while it waits: the socket has closed
                raise TrainerGoneError
        return False

    def _serve(self, channel: Channel, keeper: int) -> None:
        """The life of the judge's process."""
        try:
            linux.die_with_parent(keeper)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_AS, (self.memory, self.memory))
            while True:
                request = channel.receive()
                try:
                    reply = self.judge(request)
                except Exception as error:  # MemoryError, RecursionError and what libraries raise on nonsense
                    reply = {"failed": "error", "error": f"{type(error).__name__}: {error}"[:500]}
                channel.send(reply)
        finally:
            os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
