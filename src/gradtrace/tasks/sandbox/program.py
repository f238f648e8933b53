"""One program in a jail: started, watched by whoever waits for it, and ended with all that it started.

    keeper ──▶ outer (makes namespaces) ──▶ init (process 1 inside, builds the root) ──▶ the program

When init ends the kernel kills every process of its namespace, however it forked. Init ends with the program, with
`outer`, and so with the keeper. Without namespaces the keeper adopts orphans (PR_SET_CHILD_SUBREAPER) and kills all
its descendants after every run.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import select
import signal
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradtrace.tasks.sandbox import CHANNEL, PATIENCE, PAYLOAD, examiner, jail, linux
from gradtrace.tasks.sandbox.jail import Group
from gradtrace.trace.files import write_all

START = (
    "import sys; sys.path.insert(0, {folder!r}); from gradtrace.tasks.sandbox.{runner} import main; main({packages!r})"
)


class SetupError(Exception):
    """The jail could not be built: trouble of ours, never a verdict."""


@dataclass(frozen=True)
class Limits:
    """Time is the program's own: how busy the machine is with other things does not change a verdict."""

    seconds: float
    """Seconds of computing by all its processes together; and as many again of waiting, while none of them computes
    or wants to."""
    memory: int
    """Bytes of address space of each process, and of resident memory of all together."""
    processes: int = jail.MOST_PROCESSES
    output: int = 4 << 20
    """Bytes of output; more is an error, not a long answer."""
    sockets: int = 256
    """Most sockets that may be open at once: their buffers are memory that no process is charged for."""

    @property
    def patience(self) -> float:
        """Seconds on the clock after which a program is given up, however little it could compute in them."""
        return PATIENCE * self.seconds


class Program:
    """`runner` (candidate or examiner) with a payload, reading `stdin` and, at descriptor 4, `channel`."""

    def __init__(
        self,
        runner: str,
        payload: dict[str, Any],
        limits: Limits,
        isolated: bool,
        stdin: bytes = b"",
        channel: int | None = None,
        group: Group | None = None,
    ) -> None:
        self.isolated = isolated
        self.group = group
        self._ended = False
        self.scratch = None if isolated else tempfile.TemporaryDirectory(prefix="gradtrace_sandbox_")
        self.output, output = os.pipe()
        self._failure, failure = os.pipe()
        inputs = [memory_file(stdin), output, memory_file(json.dumps(payload).encode("ascii"))]
        if channel is not None:
            inputs.append(channel)
        keeper = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                low, failure = failure, move_up(failure)
                os.close(low)
                linux.die_with_parent(keeper)
                if self.group is not None:
                    self.group.join()
                self._become(runner, limits, inputs, failure)
            except BaseException:
                os.write(failure, traceback.format_exc().encode()[-4000:])
            finally:
                os._exit(1)
        for descriptor in (*inputs[:3], failure):
            os.close(descriptor)

    def check_started(self) -> None:
        """Wait until the program runs; SetupError if it could not be started."""
        trouble = os.read(self._failure, 4096)  # closes without a word when the program is executed
        if trouble:
            raise SetupError(trouble.decode(errors="replace"))

    def wait(self) -> int:
        """The exit code, when the program has ended."""
        self._ended = True
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def end(self) -> None:
        """Kill it and all that it started. In a namespace they are gone when there is no child left to `reap`."""
        os.close(self.output)
        os.close(self._failure)
        if self.scratch is not None:
            kill_descendants()
            self.scratch.cleanup()
        elif not self._ended:
            os.kill(self.pid, signal.SIGKILL)

    def _become(self, runner: str, limits: Limits, inputs: list[int], failure: int) -> None:
        """Called in the new process: go into the jail and execute the program."""
        if not self.isolated:
            assert self.scratch is not None
            os.setsid()
            os.chdir(self.scratch.name)
            linux.drop_capabilities()
            self._execute(runner, str(jail.PACKAGE), limits, inputs)
        linux.unshare(linux.CLONE_NEWPID | linux.CLONE_NEWNS | linux.CLONE_NEWIPC)
        outer_lives, held = os.pipe()
        init = os.fork()
        if init:
            finish_with(init, close=[*inputs, failure])
        os.close(held)
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        # From inside of its namespace process 1 cannot see its parent's number; the pipe tells whether it is there.
        if select.select([outer_lives], [], [], 0)[0]:
            os._exit(1)
        os.close(outer_lives)
        linux.prctl(linux.PR_SET_DUMPABLE, 0)  # the program cannot look into it, even with the same user
        jail.build_root()
        program = os.fork()
        if program:
            finish_with(program, close=[*inputs, failure])
        os.setsid()
        os.chdir("/tmp")
        jail.become_nobody()
        self._execute(runner, jail.RUNNERS, limits, inputs)

    def _execute(self, runner: str, folder: str, limits: Limits, inputs: list[int]) -> None:
        for name in (signal.SIGINT, signal.SIGPIPE):  # Python and the keeper ignore them
            signal.signal(name, signal.SIG_DFL)
        jail.limit_resources(limits.seconds, limits.memory, self.isolated)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        # Through high numbers first, so that no descriptor is overwritten before it is copied.
        high = [move_up(descriptor) for descriptor in inputs]
        for target, descriptor in zip((0, 1, PAYLOAD, CHANNEL), high, strict=False):
            os.dup2(descriptor, target)
        os.dup2(nowhere, 2)
        start = START.format(folder=folder, runner=runner, packages=jail.package_folders())
        environment = jail.ENVIRONMENT if self.scratch is None else {**jail.ENVIRONMENT, "HOME": self.scratch.name}
        linux.install_filter(own_network=self.isolated)
        if runner == "examiner":
            self._examine(environment)
        os.execve(jail.INTERPRETER, [jail.INTERPRETER, "-s", "-S", "-c", start], environment)

    def _examine(self, environment: dict[str, str]) -> None:
        """Be the examiner without executing a program: that would take as long again as all the rest of a run, and
        without namespaces open its memory and descriptors, in /proc, to other programs of this user until it closes
        them."""
        os.environ.clear()
        os.environ.update(environment)
        os.closerange(CHANNEL + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        examiner.main(jail.package_folders())


def move_up(descriptor: int) -> int:
    """A copy with a number above all that programs start with; closed on exec."""
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)


def memory_file(content: bytes) -> int:
    """A descriptor that reads `content`."""
    descriptor = os.memfd_create("input")
    write_all(descriptor, content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def finish_with(child: int, close: list[int]) -> None:
    """Hold nothing, collect every child, and end as `child` does. Never returns."""
    for descriptor in close:
        os.close(descriptor)
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


@dataclass(frozen=True)
class Usage:
    """The fields that /proc gives of a process."""

    parent: int
    memory: int
    """Bytes of memory that are resident."""
    seconds: float
    """Seconds of computing, with those of its children that it has collected."""


def processes() -> dict[int, Usage]:
    """All processes by their numbers."""
    page, tick = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")
    found = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = Path(entry.path, "stat").read_bytes().rpartition(b")")[2].split()
                seconds = sum(map(int, fields[11:15])) / tick
                found[int(entry.name)] = Usage(int(fields[1]), int(fields[21]) * page, seconds)
    return found


def descendants(root: int) -> dict[int, Usage]:
    """All processes below `root`."""
    everyone = processes()
    children: dict[int, list[int]] = {}
    for pid, usage in everyone.items():
        children.setdefault(usage.parent, []).append(pid)
    found: dict[int, Usage] = {}
    waiting = list(children.get(root, []))
    while waiting:
        pid = waiting.pop()
        found[pid] = everyone[pid]
        waiting += children.get(pid, [])
    return found


def wants_to_compute(pid: int) -> bool:
    """Does a thread of the process run, wait for a core, or wait for the disk?"""
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                if Path(entry.path, "stat").read_bytes().rpartition(b")")[2].split()[0] in (b"R", b"D"):
                    return True
    return False


def kill_descendants() -> None:
    """Kill children until there are none: what they fork meanwhile is ours as well, because orphans come to us."""
    while below := descendants(os.getpid()):
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        reap(os.WNOHANG)


def reap(options: int = 0) -> None:
    """Collect all children when they have ended, or with WNOHANG those that have."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, options)[0]:
            pass
