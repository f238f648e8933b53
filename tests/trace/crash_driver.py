"""Run one scenario of writes again and again, each time with a fault at the next file operation, until it completes.

`python crash_driver.py MODE FSYNC FOLDER` prints a JSON object: how many faults were tried, and the violations of
"the reader sees the state before an operation or after it, and nothing else". Every try is a process of its own.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faulty_disk import KILLED, KILLS, FaultyDisk
from trace_fakes import entropy_columns, influence_columns

from gradtrace.errors import GradtraceError
from gradtrace.instruments.entropy_trace import ENTROPY_TRACE
from gradtrace.instruments.influence import INFLUENCE_TRACE
from gradtrace.trace.reader import RunReader
from gradtrace.trace.run_files import RunFiles
from gradtrace.trace.writer import TraceWriter

KINDS = (ENTROPY_TRACE, INFLUENCE_TRACE)
# what a run does, with a resume in the middle: steps after 2 are dropped and written again
SCENARIO: list[tuple[Any, ...]] = [
    ("open",),
    ("log", 1),
    ("write", KINDS[0], 1, 1),
    ("write", KINDS[1], 1, 2),
    ("write", KINDS[1], 2, 3),
    ("write", KINDS[1], 2, 4),
    ("log", 2),
    ("write", KINDS[1], 3, 5),
    ("summary", 1),
    ("log", 3),
    ("open",),
    ("truncate", KINDS[1], 2),
    ("truncate_metrics", 2),
    ("write", KINDS[1], 3, 6),
    ("log", 33),
    ("summary", 2),
]
State = dict[str, Any]


def apply(state: State, action: tuple[Any, ...]) -> State:
    """What the reader should see after `action`."""
    new = json.loads(json.dumps(state))
    match action:
        case ("write", kind, step, seed):
            new[kind][str(step)] = seed
        case ("truncate", kind, last):
            new[kind] = {step: seed for step, seed in new[kind].items() if int(step) <= last}
        case ("log", value):
            new["metrics"].append(value)
        case ("truncate_metrics", last):
            new["metrics"] = [value for value in new["metrics"] if value <= last]
        case ("summary", value):
            new["summary"] = value
    return new


EMPTY: State = {KINDS[0]: {}, KINDS[1]: {}, "metrics": [], "summary": None}


def read_state(folder: Path) -> tuple[State, list[str]]:
    if not folder.exists():
        return EMPTY, []
    run = RunReader(folder.resolve())
    state = json.loads(json.dumps(EMPTY))
    for kind in KINDS:
        for step in run.readable_steps(kind):
            state[kind][str(step.step)] = int(step["optimizer_step"][0])
    state["metrics"] = [record["value"] for record in run.metrics()[0]]
    state["summary"] = run.summary.get("value")
    return state, [str(problem) for problem in run.problems]


class Actor:
    def __init__(self, folder: Path, fsync: bool) -> None:
        self.folder = folder
        self.fsync = fsync
        self.writers: dict[str, TraceWriter] = {}
        self.files: RunFiles | None = None

    def failed(self) -> int:
        return sum(writer.stats.failed for writer in self.writers.values())

    def do(self, action: tuple[Any, ...]) -> None:
        match action:
            case ("open",):
                for writer in self.writers.values():
                    writer.close()
                self.files = RunFiles(self.folder, self.fsync)
                for kind in KINDS:
                    self.writers[kind] = TraceWriter(self.folder, kind, fsync=self.fsync)
            case ("write", kind, step, seed):
                columns = entropy_columns(seed) if kind == KINDS[0] else influence_columns(seed)
                self.writers[kind].write(step, columns)
                self.writers[kind].flush()
            case ("truncate", kind, last):
                self.writers[kind].truncate_after(last)
            case ("log", value):
                assert self.files
                self.files.log(value % 10, {"value": value})
            case ("truncate_metrics", last):
                assert self.files
                self.files.truncate_after(last)
            case ("summary", value):
                assert self.files
                self.files.write_summary({"value": value})


def in_child(work: Callable[[], Any]) -> int:
    """Run `work` in a forked process; its exit code."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def try_kill(folder: Path, mode: str, fsync: bool, fail_at: int) -> tuple[bool, list[str]]:
    """(the scenario completed, violations)."""
    done_file = folder.with_suffix(".done")
    done_file.write_text("0")

    def work() -> None:
        FaultyDisk(folder, mode, fail_at).install()
        actor = Actor(folder, fsync)
        for number, action in enumerate(SCENARIO, 1):
            actor.do(action)
            done_file.write_text(str(number))

    code = in_child(work)
    if code not in (0, KILLED):
        return False, [f"{mode} at {fail_at}: the process ended with {code}"]
    done = int(done_file.read_text())
    before = EMPTY
    for action in SCENARIO[:done]:
        before = apply(before, action)
    allowed = [before, apply(before, SCENARIO[done])] if done < len(SCENARIO) else [before]
    violations = []
    state, problems = read_state(folder)
    where = f"{mode} at {fail_at}, after {done} of the scenario"
    if state not in allowed:
        violations.append(f"{where}: saw {state}, allowed {allowed}")
    if problems:
        violations.append(f"{where}: problems {problems}")
    violations += resume_violations(folder, fsync, state, f"{mode} at {fail_at}")
    return code == 0, violations


def resume_violations(folder: Path, fsync: bool, state: State, where: str) -> list[str]:
    """After a crash the run goes on: what was there stays, what is written comes on top."""
    actor = Actor(folder, fsync)
    for action in (("open",), ("write", KINDS[1], 9, 9), ("log", 9)):
        actor.do(action)
        state = apply(state, action)
    for writer in actor.writers.values():
        writer.close()
    seen, problems = read_state(folder)
    leftovers = [str(path) for path in folder.rglob("*.tmp")]
    wrong = [f"{where}, resumed: saw {seen}, expected {state}"] if seen != state else []
    return wrong + [f"{where}, resumed: {what}" for what in (problems, leftovers) if what]


def try_error(folder: Path, mode: str, fsync: bool, fail_at: int) -> tuple[bool, list[str]]:
    """A failing operation leaves the old state and is reported; the run goes on."""
    report = folder.with_suffix(".report")

    def work() -> None:
        disk = FaultyDisk(folder, mode, fail_at)
        disk.install()
        actor = Actor(folder, fsync)
        state = EMPTY
        violations = []
        looks = 0
        for action in SCENARIO:
            failed_before = actor.failed()
            faults_before = len(disk.log)
            raised = False
            try:
                actor.do(action)
            except (OSError, GradtraceError):
                raised = True
                if action == ("open",):
                    break  # a run that cannot open its files says so at once
            if not disk.log and action != SCENARIO[-1]:
                state = apply(state, action)
                continue
            looks += 1
            if looks > 4:  # three actions after the fault say whether the run recovered from it
                break
            reported = raised or actor.failed() > failed_before
            seen, problems = read_state(folder)
            after = apply(state, action)
            if seen not in (state, after):
                violations.append(f"{mode} at {fail_at}, in {action}: saw {seen}, allowed {state} or {after}")
            if seen == state != after and not reported:
                violations.append(f"{mode} at {fail_at}, in {action}: nothing was written and nothing was reported")
            if len(disk.log) == faults_before and seen != after:
                violations.append(f"{mode} at {fail_at}, in {action}: no fault, and still {seen}")
            if problems:
                violations.append(f"{mode} at {fail_at}, in {action}: problems {problems}")
            state = seen
        with open(report, "w") as file:
            json.dump({"violations": violations, "faults": len(disk.log)}, file)

    code = in_child(work)
    if code != 0:
        return False, [f"{mode} at {fail_at}: a fault killed the run ({code})"]
    result = json.loads(report.read_text())
    return result["faults"] == 0, result["violations"]


def main(mode: str, fsync: bool, folder: Path) -> None:
    logging.disable()  # the faults are reported; that is the point, not the output
    attempt = try_kill if mode in KILLS else try_error
    violations: list[str] = []
    fail_at = 0
    completed = False
    while not completed:
        fail_at += 1
        completed, found = attempt(folder / f"run{fail_at}", mode, fsync, fail_at)
        violations += found
        if len(violations) > 20:
            break
    print(json.dumps({"tries": fail_at, "violations": violations}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "fsync", Path(sys.argv[3]))
