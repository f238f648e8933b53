"""A pool of keepers: requests in, answers out in the same order, whatever happens to the processes in between.

    trainer (torch, threads) ──exec──▶ keeper (one thread) ──fork──▶ judge

A keeper is a process between the trainer and the process that judges, which it may have to kill. It never looks at an
answer itself, so it cannot hang on one. It keeps the deadline, kills the judge that misses it and forks the next from
its own memory, where the imports are done already: a replacement is ready in milliseconds. When the trainer is gone,
even by SIGKILL, the keeper sees its socket close and ends, judge first.

No torch here: importing it would cost seconds and a gigabyte for each worker.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import resource
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import gradtrace
from gradtrace.errors import GradtraceError
from gradtrace.tasks.sandbox import linux
from gradtrace.tasks.verification.channel import Channel, ClosedError, Message

MOST_WORKERS = 16
STARTUP = 120.0
"""Seconds for a keeper to import what it needs, on a busy machine."""
GRACE = 15.0
"""Seconds after a request's own deadline until the keeper itself is taken for dead and replaced."""
ATTEMPTS = 2
BOOT = (
    "import sys; del sys.path[0]; import json; sys.path[:] = json.loads(sys.argv[1]); "
    "from gradtrace.tasks.verification.pool import main; main(sys.argv[2])"
)


class WorkerPool:
    """`workers` keepers (0: one per core, at most 16), started when the first requests come.

    They are programs of their own, not forks of this process, which may have threads and gigabytes of weights.
    """

    def __init__(self, factory: str, workers: int = 0) -> None:
        self.factory = factory
        self.workers = workers or min(len(os.sched_getaffinity(0)), MOST_WORKERS)
        self.replaced = 0
        """Keepers that died and were replaced."""
        self._keepers: list[Keeper] = []
        self._lock = threading.Lock()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def size(self) -> int:
        """Keepers that are alive."""
        return sum(keeper.process.poll() is None for keeper in self._keepers)

    def map(self, requests: Sequence[Message]) -> list[Message]:
        """An answer to each request, in order. Each names its own `timeout` in seconds.

        One that took its keeper down twice is answered with {"failed": "lost"}.
        """
        with self._lock:
            try:
                return self._map(requests)
            except BaseException:
                # Interrupted half-way: answers still under way must not meet the next requests.
                self._close()
                raise

    def close(self) -> None:
        with self._lock:
            self._close()

    def _close(self) -> None:
        for keeper in self._keepers:
            keeper.close()
        self._keepers = []

    def _map(self, requests: Sequence[Message]) -> list[Message]:
        answers: list[Message] = [{"failed": "lost"} for _ in requests]
        waiting = deque((index, 1) for index in range(len(requests)))
        self._start(min(self.workers, len(requests)))
        idle = list(self._keepers)
        busy: dict[Keeper, tuple[int, int, float]] = {}
        with selectors.DefaultSelector() as selector:
            while waiting or busy:
                while waiting and idle:
                    keeper, (index, attempt) = idle.pop(), waiting.popleft()
                    with contextlib.suppress(ClosedError):  # a dead keeper is noticed when it is read
                        keeper.channel.send(requests[index])
                    busy[keeper] = (index, attempt, time.monotonic() + requests[index]["timeout"] + GRACE)
                    selector.register(keeper.channel, selectors.EVENT_READ, keeper)
                patience = min(deadline for _, _, deadline in busy.values()) - time.monotonic()
                ready = {key.data for key, _ in selector.select(max(patience, 0))}
                now = time.monotonic()
                overdue = {keeper for keeper, (_, _, deadline) in busy.items() if deadline <= now}
                for keeper in ready | overdue:
                    index, attempt, _ = busy.pop(keeper)
                    selector.unregister(keeper.channel)
                    try:
                        if keeper not in ready:
                            raise ClosedError
                        answers[index] = keeper.channel.receive()
                        idle.append(keeper)
                    except ClosedError:
                        idle.append(self._replace(keeper))
                        if attempt < ATTEMPTS:
                            waiting.append((index, attempt + 1))
        return answers

    def _start(self, count: int) -> None:
        for keeper in [keeper for keeper in self._keepers if keeper.process.poll() is not None]:
            self._replace(keeper)
        started = [Keeper(self.factory) for _ in range(count - len(self._keepers))]
        self._keepers += started
        for keeper in started:  # all of them import at the same time
            keeper.wait_until_ready()

    def _replace(self, keeper: Keeper) -> Keeper:
        keeper.close()
        self._keepers.remove(keeper)
        new = Keeper(self.factory)
        self._keepers.append(new)
        self.replaced += 1
        new.wait_until_ready()
        return new


class Keeper:
    """The trainer's side of one keeper process."""

    def __init__(self, factory: str) -> None:
        ours, theirs = socket.socketpair()
        # An editable install may be reached by an import hook alone, which -S does not run.
        path = [str(Path(gradtrace.__file__).parents[1]), *filter(None, sys.path)]
        self.factory = factory
        self.process = subprocess.Popen(
            [sys.executable, "-s", "-S", "-c", BOOT, json.dumps(path), factory],
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # Nothing else of the trainer's environment: tokens and keys are no business of what judges.
            env={
                "PATH": os.defpath,
                "LANG": "C.UTF-8",
                "PYTHONHASHSEED": "0",  # what judges gives the same reward, whatever order its sets have
                **{k: v for k, v in os.environ.items() if k == "LD_LIBRARY_PATH"},
            },
            start_new_session=True,
        )
        theirs.close()
        self.channel = Channel(ours)

    def wait_until_ready(self) -> None:
        self.channel.connection.settimeout(STARTUP)
        try:
            message = self.channel.receive()
        except ClosedError:
            message = {"error": "it ended, or did not answer, before it was ready"}
        self.channel.connection.settimeout(None)
        if "error" in message:
            self.close()
            raise GradtraceError(
                f"A worker process for {self.factory} could not start: {message['error']}\n"
                + message.get("traceback", "")
            )

    def close(self) -> None:
        """End the process: it goes by itself when the socket closes, and by force when it does not."""
        self.channel.close()
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


_shared: dict[tuple[int, str, int], WorkerPool] = {}


def shared_pool(factory: str, workers: int) -> WorkerPool:
    """The pool of this process for `factory`: all rewards and all calls use the same one. Closed at exit."""
    key = (os.getpid(), factory, workers)  # a forked child has no use for its parent's sockets
    if key not in _shared:
        _shared[key] = WorkerPool(factory, workers)
    return _shared[key]


def close_shared_pools() -> None:
    for pid, factory, workers in list(_shared):
        pool = _shared.pop((pid, factory, workers))
        if pid == os.getpid():
            pool.close()


atexit.register(close_shared_pools)


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
