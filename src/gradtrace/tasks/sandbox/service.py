"""The keeper's service for code: runs candidates in jails and says which tests they pass.

Requests: {"kind": "isolation"}, {"kind": "calls", "code", "setup", "tests": [source], "entry_points", "stop"},
{"kind": "functions", "code", "tests": [{"arguments", "expected": [value]}], "entry_points": [name], "stop"} or
{"kind": "script", "code", "tests": [{"input", "output"}], "stop"}, with "seconds" (of computing, for each run),
"memory" (bytes) and "unsafe". Replies: {"missing": why there is none},
{"passed": [bool], "why": what ended it early, or NO_ASSERTION},
or {"failed": "refused" | "setup" | "tests", "reason"}.
"""

from __future__ import annotations

import os
import select
import socket
import time
from typing import Any

from gradtrace.tasks.sandbox import NO_ASSERTION, NOTHING_ASKED, NOTHING_ASSERTED, PASSED, jail, linux
from gradtrace.tasks.sandbox.assertions import RowError
from gradtrace.tasks.sandbox.jail import Group
from gradtrace.tasks.sandbox.program import (
    Limits,
    Program,
    SetupError,
    descendants,
    kill_descendants,
    reap,
    wants_to_compute,
)
from gradtrace.tasks.verification.channel import Channel, Message
from gradtrace.tasks.verification.pool import TrainerGoneError

LOOK_EVERY = 0.1
"""Seconds between looks at time, memory and number of processes."""


def create() -> SandboxService:
    return SandboxService()


class SandboxService:
    def __init__(self) -> None:
        linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
        self.no_isolation = ""
        """Why there is none; empty if there is."""
        self.group = Group.create()
        try:
            jail.enter_namespaces()
            limits = Limits(seconds=60, memory=512 << 20)
            right, why = self._script("print(42)", {"input": "", "output": "42"}, limits, None, isolated=True)
            if not right:
                raise SetupError(f"a first program in it did not work: {why or 'wrong output'}")
        except (OSError, SetupError) as error:
            self.no_isolation = str(error).strip().splitlines()[-1]
        # The programs may run as our user: our memory has their tests, our descriptors take their verdicts.
        linux.prctl(linux.PR_SET_DUMPABLE, 0)

    def answer(self, request: Message, trainer: Channel) -> Message:
        if request["kind"] == "isolation":
            return {"missing": self.no_isolation}
        if self.no_isolation and not request["unsafe"]:
            return {"failed": "refused", "reason": self.no_isolation}
        limits = Limits(request["seconds"], request["memory"])
        try:
            if request["kind"] == "script":
                passed, why = self._scripts(request, limits, trainer)
            else:
                passed, why = self._calls(request, limits, trainer)
        except SetupError as error:
            return {"failed": "setup", "reason": str(error)}
        except RowError as error:
            return {"failed": "tests", "reason": str(error)}
        return {"passed": passed, "why": why}

    def close(self) -> None:
        kill_descendants()
        if self.group is not None:
            self.group.close()

    def _scripts(self, request: Message, limits: Limits, trainer: Channel) -> tuple[list[bool], str]:
        passed: list[bool] = []
        why = ""
        for test in request["tests"]:
            right, reason = self._script(request["code"], test, limits, trainer, not self.no_isolation)
            passed.append(right)
            why = why or reason
            if not right and request["stop"]:
                break
        return passed, why

    def _script(
        self, code: str, test: dict[str, str], limits: Limits, trainer: Channel | None, isolated: bool
    ) -> tuple[bool, str]:
        """Did the script print the right output, and end well?"""
        stdin = test["input"].encode("utf-8", "surrogatepass")
        payload = {"mode": "script", "code": code}
        watch = Watch(limits, trainer, isolated, self.group)
        program = Program("candidate", payload, limits, isolated, stdin, group=self.group)
        why = watch.run([program], program)
        right = not why and watch.exit_code == 0 and same_output(watch.output, test["output"])
        return right, why

    def _calls(self, request: Message, limits: Limits, trainer: Channel) -> tuple[list[bool], str]:
        isolated = not self.no_isolation
        asking, answering = socket.socketpair()
        payload = {"mode": request["kind"], "code": request["code"], "entry_points": request["entry_points"]}
        watch = Watch(limits, trainer, isolated, self.group)
        candidate = Program("candidate", payload, limits, isolated, channel=answering.fileno(), group=self.group)
        answering.close()  # before the next fork: a copy would hide from the examiner that the candidate ended
        questions = {key: request[key] for key in ("kind", "setup", "tests", "entry_points", "stop")}
        examiner = Program("examiner", questions, limits, isolated, channel=asking.fileno(), group=self.group)
        asking.close()
        why = watch.run([candidate, examiner], examiner)
        verdicts = [bytes([verdict]) for verdict in watch.output[: len(request["tests"])]]
        if NOTHING_ASKED in verdicts:
            test = request["tests"][verdicts.index(NOTHING_ASKED)]
            raise RowError(f"has a test that asks nothing of the program: {test[:200]!r}")
        if NOTHING_ASSERTED in verdicts:
            why = why or NO_ASSERTION
        return [verdict == PASSED for verdict in verdicts], why


class Watch:
    """Waits for the `last` of some programs to end, within the limits, then ends them all."""

    def __init__(self, limits: Limits, trainer: Channel | None, own_network: bool, group: Group | None) -> None:
        self.limits = limits
        self.trainer = trainer
        self.own_network = own_network
        self.group = group
        self.output = b""
        """What the last program printed."""
        self.exit_code: int | None = None
        self._computed = self._counted = self._waited = 0.0
        if group is not None:
            group.limit(limits.memory, limits.processes)

    def run(self, programs: list[Program], last: Program) -> str:
        """Why it was ended early: deadline, output, memory, sockets or processes; empty if it was not."""
        ended = os.pidfd_open(last.pid)
        try:
            for program in programs:
                program.check_started()
            why = self._wait(ended, last, {program.output: 0 for program in programs})
            return "memory" if self.group is not None and self.group.was_killed() else why
        finally:
            os.close(ended)
            for program in programs:
                program.end()
            reap()

    def _wait(self, ended: int, last: Program, produced: dict[int, int]) -> str:
        """`produced`: bytes of output so far, by the pipe that they came through."""
        pipes = dict.fromkeys(produced)
        started = looked = time.monotonic()
        others: list[Any] = [ended] if self.trainer is None else [ended, self.trainer]
        while True:
            now = time.monotonic()
            if now - started > self.limits.patience:
                return "deadline"
            if now - looked >= LOOK_EVERY:
                if excess := self._excess(now - looked):
                    return excess
                looked = now
            ready = select.select([*pipes, *others], [], [], LOOK_EVERY)[0]
            if self.trainer in ready:
                raise TrainerGoneError
            for pipe in [pipe for pipe in pipes if pipe in ready]:
                part = os.read(pipe, 1 << 16)
                produced[pipe] += len(part)
                if produced[pipe] > self.limits.output:
                    return "output"
                if pipe == last.output:
                    self.output += part
                if not part:
                    del pipes[pipe]
            # It has ended, and all it wrote is read: the pipe is closed, or has nothing more in it.
            if ended in ready and (last.output not in pipes or last.output not in ready):
                self.exit_code = last.wait()
                return ""

    def _excess(self, passed: float) -> str:
        """The limit that is passed, `passed` seconds after the last look."""
        below = descendants(os.getpid())
        if len(below) > self.limits.processes:
            return "processes"
        if sum(usage.memory for usage in below.values()) > self.limits.memory:
            return "memory"
        if self.own_network and open_sockets() > self.limits.sockets:
            return "sockets"
        seconds = sum(usage.seconds for usage in below.values())
        # Less than before when a process that nobody collects is gone.
        computed, self._counted = max(0.0, seconds - self._counted), seconds
        self._computed += computed
        if not computed and not any(map(wants_to_compute, below)):
            self._waited += passed
        return "deadline" if max(self._computed, self._waited) > self.limits.seconds else ""


def open_sockets() -> int:
    """Number of sockets that all processes of this network namespace have open."""
    with open("/proc/net/sockstat", "rb") as file:
        return int(file.readline().split()[-1])  # sockets: used 17


def same_output(printed: bytes, expected: str) -> bool:
    """Equal, but for white space at the ends of lines and empty lines at the end."""

    def lines(text: str) -> list[str]:
        return [line.rstrip() for line in text.rstrip().splitlines()]

    return lines(printed.decode("utf-8", "replace")) == lines(expected)
