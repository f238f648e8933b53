"""Attacks that once worked: memory that no process is charged for, forged verdicts, other processes' memory."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from gradtrace.errors import GradtraceError
from gradtrace.tasks.rewards.code import unit_tests
from gradtrace.tasks.sandbox import SERVICE, linux
from gradtrace.tasks.sandbox.jail import Group, visible_folders
from gradtrace.tasks.verification.pool import WorkerPool
from tests.tasks.test_sandbox import (
    descendants,
    isolated,
    peek,
    run_without_isolation,
    score,
    script,
)

OUTSIDE_OF_ANY_PROCESS = (
    "import ctypes, mmap\nlibc = ctypes.CDLL(None)\n"
    "if libc.shmget(0, 1 << 28, 0o1666) >= 0: found.append('shmget')\n"
    "if libc.msgget(0, 0o1666) >= 0: found.append('msgget')\n"
    "if libc.semget(0, 1, 0o1666) >= 0: found.append('semget')\n"
    "if libc.syscall(240, b'q', 0o102, 0o666, 0) >= 0: found.append('mq_open')\n"
    "if libc.syscall(447, 0) >= 0: found.append('memfd_secret')\n"
    "try: os.memfd_create('x'); found.append('memfd_create')\nexcept OSError: pass\n"
    "try: mmap.mmap(-1, 4096); found.append('shared anonymous memory')\nexcept OSError: pass\n"
    "try: mmap.mmap(os.open('/dev/zero', os.O_RDWR), 4096); found.append('/dev/zero')\nexcept OSError: pass\n"
    "try: os.setxattr('/tmp', 'user.x', b'x' * 1000); found.append('attributes')\nexcept OSError: pass\n"
    "if mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) is None: found.append('no memory at all')\n"
)


@isolated
def test_memory_that_no_process_is_charged_for_is_refused() -> None:
    assert peek(OUTSIDE_OF_ANY_PROCESS) == 1.0


def test_it_is_refused_without_namespaces_as_well() -> None:
    code = "import os\nfound = []\n" + OUTSIDE_OF_ANY_PROCESS.replace("/dev/zero", "/tmp/none") + "print(found)"
    (line,) = run_without_isolation(
        "from gradtrace.tasks.verification.pool import WorkerPool\n"
        f"with WorkerPool({SERVICE!r}, 1) as pool: print(pool.map([{ {**script(code, '[]'), 'unsafe': True}!r}]))\n"
    )
    assert line == "[{'passed': [True], 'why': ''}]"


@isolated
def test_unknown_and_future_system_calls_are_refused() -> None:
    body = (
        "import ctypes, errno\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "for number in (*range(424, 433), 435, 440, *range(442, 449), *range(450, 600), 1 << 30, (1 << 30) + 39):\n"
        "    if libc.syscall(number, 0, 0, 0, 0, 0, 0) != -1 or ctypes.get_errno() not in (1, 38):\n"
        "        if number != 424: found.append(number)"
    )
    assert peek(body) == 1.0


@pytest.mark.parametrize("machine", linux.MACHINES)
def test_filter_allows_what_its_table_has_and_nothing_else(machine: str) -> None:
    """The filter, run by a machine of a dozen lines."""
    program = linux.build_filter(machine, linux.LOCAL)

    def run(number: int, *arguments: int) -> int:
        data = {0: number, 4: linux.MACHINES[machine], **{16 + 8 * i: a for i, a in enumerate(arguments)}}
        accumulator = position = 0
        while True:
            code, if_true, if_false, constant = program[position]
            position += 1
            if code == linux.RETURN:
                return constant
            if code == linux.LOAD_WORD:
                accumulator = data.get(constant, 0)
            elif code == linux.AND:
                accumulator &= constant
            else:
                holds = {
                    linux.JUMP_EQUAL: accumulator == constant,
                    linux.JUMP_GREATER_EQUAL: accumulator >= constant,
                    linux.JUMP_GREATER: accumulator > constant,
                    linux.JUMP_SET: bool(accumulator & constant),
                }[code]
                position += if_true if holds else if_false

    allowed = linux.allowed_numbers(machine)
    found = {number for number in range(1000) if run(number, 1) == linux.ALLOW}
    assert found == set(allowed.values())
    assert run(allowed["socket"], 2) != linux.ALLOW
    assert run(allowed["clone"], 0x10000000) != linux.ALLOW
    assert run(allowed["mmap"], 0, 0, 0, 0x21) != linux.ALLOW
    assert run(allowed["mmap"], 0, 0, 0, 0x22) == linux.ALLOW


@isolated
def test_every_program_has_an_ipc_namespace_of_its_own() -> None:
    with WorkerPool(SERVICE, 1) as pool:
        pool.map([script("print(1)", "1")])
        keeper = pool._keepers[0].process.pid
        waiting = threading.Thread(target=pool.map, args=([script("input()\nwhile True: pass", "")],))
        waiting.start()
        seen: set[str] = set()
        while waiting.is_alive() and len(seen) < 2:
            for pid in [keeper, *descendants(keeper)]:
                try:
                    seen.add(os.readlink(f"/proc/{pid}/ns/ipc"))
                except PermissionError:
                    if os.geteuid() != 0:
                        pytest.skip("only root may look")
                except OSError:
                    continue
        waiting.join()
    assert len(seen) == 2


@isolated
def test_sockets_are_limited_because_their_buffers_are_charged_to_nobody() -> None:
    code = (
        "import os, socket, time\n"
        "for _ in range(5): os.fork()\n"
        "held = [socket.socketpair() for _ in range(50)]\ntime.sleep(600)"
    )
    with WorkerPool(SERVICE, 1) as pool:
        (reply,) = pool.map([script(code, "")])
    assert reply == {"passed": [False], "why": "sockets"}


@isolated
def test_verdict_does_not_depend_on_what_else_the_machine_does() -> None:
    """Half a second of computing, with two allowed, on a core that seven others want."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(7)]
    code = "import time\nwhile time.process_time() < 0.5: pass\nprint(1)"
    try:
        with WorkerPool(SERVICE, 1) as pool:
            (reply,) = pool.map([{**script(code, "1"), "seconds": 2.0}])
    finally:
        for other in others:
            other.kill()
            other.wait()
        os.sched_setaffinity(0, cores)
    assert reply == {"passed": [True], "why": ""}


@isolated
@pytest.mark.parametrize(
    "code",
    ["import time\ntime.sleep(600)", "while True: pass", "import os\nos.fork()\nos.wait()\nwhile True: pass"],
)
def test_waiting_and_computing_both_end(code: str) -> None:
    with WorkerPool(SERVICE, 1) as pool:
        (reply,) = pool.map([{**script(code, ""), "seconds": 0.5}])
    assert reply == {"passed": [False], "why": "deadline"}


def test_cgroup_is_used_where_it_is_passed_on_and_only_there(tmp_path: Path) -> None:
    """The files of a group, without the kernel behind them: this shows what is written, not that it limits."""
    membership = tmp_path / "membership"
    membership.write_text("0::/session/own\n")
    own = tmp_path / "session" / "own"
    own.mkdir(parents=True)
    assert Group.create(tmp_path, membership) is None  # no cgroup file system of version 2
    (tmp_path / "cgroup.controllers").write_text("memory pids\n")
    (own.parent / "cgroup.subtree_control").write_text("pids\n")
    assert Group.create(tmp_path, membership) is None
    folder = tmp_path / "group"
    folder.mkdir()
    (folder / "cgroup.procs").touch()
    (folder / "memory.events").write_text("low 0\noom_kill 0\n")
    group = Group(folder)
    group.limit(512 << 20, 64)
    group.join()
    assert (folder / "memory.max").read_text() == str(512 << 20)
    assert (folder / "pids.max").read_text() == "64"
    assert (folder / "memory.swap.max").read_text() == "0"
    assert (folder / "cgroup.procs").read_text() == "0"
    assert not group.was_killed()
    (folder / "memory.events").write_text("low 0\noom_kill 2\n")
    assert group.was_killed() and not group.was_killed()
    group.close()


@pytest.mark.skipif(Group.create() is None, reason="no cgroup v2 that passes memory and pids on to this user")
@isolated
def test_cgroup_ends_a_program_for_its_memory() -> None:
    code = "x = [bytearray(b'x' * 10**6) for _ in range(1000)]"
    with WorkerPool(SERVICE, 1) as pool:
        (reply,) = pool.map([script(code, "")])
    assert reply == {"passed": [False], "why": "memory"}


@pytest.mark.parametrize(
    "item",
    [
        {"test_list": []},
        {"answer": {"test_list": [], "test_imports": []}},
        {"answer": {"inputs": [], "outputs": [], "fn_name": "f"}},
        {"answer": {"inputs": [], "outputs": []}},
        {"test_list": ["assert f(1) == 1", "  # nothing\n"]},
    ],
)
@pytest.mark.parametrize("partial", [False, True])
def test_tests_that_test_nothing_are_an_error_of_the_data(item: dict[str, Any], partial: bool) -> None:
    with pytest.raises(GradtraceError, match=r"train\.jsonl, row 7 has (no tests|a test that tests nothing)"):
        score("anything", {**item, "row": "train.jsonl, row 7"}, partial=partial)


YES = (
    "class Yes:\n"
    "    def __eq__(self, other): return True\n"
    "    def __contains__(self, value): return True\n"
    "    def __bool__(self): return True\n"
    "    def __iter__(self): return iter(())\n"
    "    def __len__(self): return 0\n"
    "    def __array__(self, *a): raise StopIteration\n"
    "    __hash__ = None\n"
    "    equals = __eq__\n"
)


@isolated
@pytest.mark.parametrize(
    ("code", "test"),
    [
        ("class math:\n    isclose = lambda *a: True\ndef f(x): return 0", "assert math.isclose(f(3), 9)"),
        ("class np:\n    allclose = staticmethod(lambda *a: True)\ndef f(x): return 0", "assert np.allclose(f(3), 9)"),
        ("def f(x): raise StopIteration", "for value in zip(map(f, [1, 2]), [1, 4]):\n    assert value == (1, 1)"),
        ("def f(x): raise StopIteration", "assert all(map(f, [1, 2]))"),
        ("def f(x): raise StopAsyncIteration", "assert all(map(f, [1, 2]))"),
        (f"{YES}def f(x): return Yes()", "assert f(3)"),
        (f"{YES}def f(x): return Yes()", "assert 9 in f(3)"),
        (f"{YES}def f(x): return Yes()", "assert f(3) == 9"),
        (f"{YES}def f(x): return Yes()", "assert f(3).__eq__(9)"),
        (f"{YES}def f(x): return Yes()", "assert [f(3)].count(9)"),
        (f"{YES}def f(x): return [Yes()]", "assert 9 in f(3)"),
        (f"{YES}def f(x): return Yes()", "import operator\nassert operator.contains(f(3), 9)"),
        (f"{YES}def f(x): return Yes()", "if not f(3): raise AssertionError"),
    ],
)  # fmt: skip
def test_only_data_is_compared_and_only_by_the_examiner(code: str, test: str) -> None:
    assert score(code, {"test_list": [test]}) == 0.0


@isolated
def test_modules_that_tests_name_without_importing_are_the_examiners() -> None:
    assert score("def f(x): return x * x + 1e-12", {"test_list": ["assert math.isclose(f(3), 9)"]}) == 1.0


HELPER = (
    "Here is a helper.\n\nimport math\n\ndef close(a, b):\n    return math.fabs(a - b) < 1e-6\n\n"
    'def root(x: float) -> float:\n    """The square root."""\n\nAnswer with code.'
)


@isolated
def test_helper_of_the_prompt_is_not_the_candidates_to_define() -> None:
    item = {"prompt": HELPER, "test_list": ["assert close(root(9.0), 3.0)"]}
    assert score("def root(x): return x ** 0.5", item) == 1.0
    assert score("def root(x): return 0\ndef close(a, b): return True", item) == 0.0
    humaneval = {
        "prompt": HELPER,
        "entry_point": "root",
        "test": "def check(candidate):\n    assert close(candidate(9.0), 3.0)\n",
    }
    assert score("def root(x): return x ** 0.5", humaneval) == 1.0
    assert score("def root(x): return 0\ndef close(a, b): return True", humaneval) == 0.0


@pytest.mark.parametrize(
    ("item", "names"),
    [
        ({"test_list": ["assert close(f(3), 9)"]}, "close, f"),
        ({"test_list": ["assert f(3) == NINE"]}, "NINE"),
        ({"test_list": ["x = f(3)\nassert close(x, 9)"]}, "close, f"),
        ({"test_list": ["assert close(f(3), 9)"], "entry_points": ["f"]}, "close"),
        ({"test": "def check(candidate):\n    assert close(candidate(3), 9)", "entry_point": "f"}, "close"),
    ],
)
def test_names_that_might_judge_are_refused_with_the_row(item: dict[str, Any], names: str) -> None:
    with pytest.raises(GradtraceError, match=f"tests of a.jsonl, row 3 use {names}, which they do not define"):
        unit_tests({**item, "row": "a.jsonl, row 3"})


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ({"test_list": ["assert f([Pair(1, 2)]) == 1"], "code": "class Pair: pass\ndef f(x): pass"}, {"Pair", "f"}),
        ({"test_list": ["assert f(Pair(1, 2)) == 1"], "entry_points": ["f", "Pair"]}, {"Pair", "f"}),
        ({"test_list": ["assert f(3) == ceil(8.5)"], "test_imports": ["from math import *"]}, set()),
        ({"answer": {"inputs": [[float("nan")]], "outputs": [[float("inf")]], "fn_name": "f"}}, {"f"}),
    ],
)  # fmt: skip
def test_entry_points_are_declared_or_found_in_the_reference(item: dict[str, Any], expected: set[str]) -> None:
    assert set(unit_tests(item).entry_points) == expected


def test_tests_that_are_no_python_are_an_error_of_the_data() -> None:
    with pytest.raises(GradtraceError, match="row 1 are no Python"):
        unit_tests({"test_list": ["assert f("], "row": "row 1"})


LOOK_INTO_THE_KEEPER = (
    "import glob, os\n"
    "found = []\n"
    "for path in glob.glob('/proc/[0-9]*/cmdline'):\n"
    "    try: line = open(path).read()\n    except OSError: continue\n"
    "    if not line.endswith('sandbox.service:create\\0'): continue\n"
    "    for name in ('mem', 'environ', 'maps', *(f'fd/{n}' for n in range(20))):\n"
    "        for mode in (os.O_RDONLY, os.O_WRONLY | os.O_NONBLOCK):\n"
    "            try: os.close(os.open(path.replace('cmdline', name), mode)); found.append(name)\n"
    "            except OSError: pass\n"
)


def test_without_isolation_keepers_and_examiners_are_closed_to_programs() -> None:
    """Their memory has the tests, their descriptors take the verdict. Two at once: one looks into both."""
    calls = {"kind": "calls", "setup": "", "entry_points": [], "tests": ["assert f() == []"], "unsafe": True}
    code = f"{LOOK_INTO_THE_KEEPER}def f(): return found"
    (line,) = run_without_isolation(
        "from gradtrace.tasks.verification.pool import WorkerPool\n"
        f"with WorkerPool({SERVICE!r}, 2) as pool: print(pool.map([{ {**script(code, ''), **calls}!r}] * 4))\n"
    )
    assert line == str([{"passed": [True], "why": ""}] * 4)


@isolated
def test_file_systems_mounted_inside_of_visible_folders_are_read_only() -> None:
    inside = [
        str(path)
        for folder in visible_folders()
        for name in ("ssl", "tmpfiles.d", "sysctl.d", "systemd", "apt", "pip")
        if (path := Path(folder, name)).is_dir() and not path.is_symlink()
    ]
    if not inside:
        pytest.skip("no folder to mount on")
    mounted = f'mount -t tmpfs none {inside[0]} && chmod 777 {inside[0]} && exec "$@"'
    host = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mounted, "sh"]
    if subprocess.run([*host, "true"], capture_output=True, check=False).returncode:
        pytest.skip("cannot mount here")
    code = f"try: open({inside[0] + '/out'!r}, 'w'); print('written')\nexcept OSError as error: print(error.errno)"
    program = (
        "from gradtrace.tasks.verification.pool import WorkerPool\n"
        f"with WorkerPool({SERVICE!r}, 1) as pool: print(pool.map([{script(code, '30')!r}]))\n"
    )
    done = subprocess.run([*host, sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[{'passed': [True], 'why': ''}]\n"  # 30: read-only file system
