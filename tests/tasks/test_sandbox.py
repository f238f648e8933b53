"""A model's program can neither leave its sandbox nor outlive it, nor say itself that it is right."""

from __future__ import annotations

import ast
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest

from gradtrace.errors import GradtraceError
from gradtrace.tasks.rewards import named_reward
from gradtrace.tasks.rewards.code import unit_tests
from gradtrace.tasks.sandbox import SERVICE, missing_isolation
from gradtrace.tasks.sandbox.jail import visible_folders
from gradtrace.tasks.verification.pool import shared_pool

MBPP = Path(os.environ.get("GRADTRACE_DATA", "/work/shared/data")) / "mbpp" / "sanitized-mbpp.json"
WORKERS = 2
PATIENT = 60.0
"""Seconds for programs that end by themselves, on a machine that may be busy."""
DOUBLE = {"test_list": ["assert double(2) == 4", "assert double(5) == 10", "assert double('ab') == 'abab'"]}
RIGHT = "def double(x):\n    return x + x\n"
MARK = f"gradtrace-orphan-{os.getpid()}"  # not those of another test run on this machine
WAYS_TO_PACKAGES = [folder.split("/")[2] for folder in visible_folders() if folder.startswith("/tmp/")]
"""What is in the jail's /tmp from the start: the way to an environment that was made under /tmp."""


def script(code: str, output: str) -> dict[str, Any]:
    tests = [{"input": "", "output": output}]
    limits = {"seconds": PATIENT, "timeout": PATIENT, "memory": 512 << 20}
    return {"kind": "script", "code": code, "tests": tests, "stop": True, "unsafe": False, **limits}


NO_ISOLATION = missing_isolation()
isolated = pytest.mark.skipif(bool(NO_ISOLATION), reason=f"no isolation on this machine: {NO_ISOLATION}")


def score(code: str, item: dict[str, Any] = DOUBLE, timeout: float = PATIENT, **options: Any) -> float:
    return named_reward("code", {"workers": WORKERS, "timeout": timeout, **options})([code], [item])[0]


def descendants(pid: int) -> set[int]:
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        new = children.get(waiting.pop(), [])
        found.update(new)
        waiting += new
    return found


def marked() -> list[str]:
    """Processes anywhere on the machine that carry our mark."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if MARK.encode() in file.read_bytes():
                found.append(file.parent.name)
        except OSError:
            continue
    return found


@pytest.fixture(autouse=True)
def no_process_is_left_behind() -> Iterator[None]:
    yield
    for workers in (0, WORKERS, 8):
        pool = shared_pool(SERVICE, workers)
        assert [pid for keeper in pool._keepers for pid in descendants(keeper.process.pid)] == []
    assert marked() == []


@isolated
def test_right_and_wrong_programs() -> None:
    assert score(RIGHT) == 1.0
    assert score(f"Here it is:\n```python\n{RIGHT}```\nDone.") == 1.0
    assert score(RIGHT.replace("x + x", "x * x")) == 0.0
    assert score(RIGHT.replace("x + x", "2 * int(x)")) == 0.0
    assert score("def other(x): return 2 * x") == 0.0
    assert score("def double(x) return") == 0.0
    assert score("") == 0.0


@isolated
def test_partial_credit_is_the_share_of_tests() -> None:
    assert score("def double(x): return 2 * int(x)", partial=True) == pytest.approx(2 / 3)
    assert score("def double(x):\n    if x == 5: raise ValueError\n    return x + x", partial=True) == pytest.approx(
        2 / 3
    )


HANGING = {
    "infinite loop": "while True: pass",
    "ignored signals": (
        "import signal, time\n"
        "for s in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}: signal.signal(s, signal.SIG_IGN)\n"
        "while True: time.sleep(1)"
    ),
    "hang in a call": "def double(x):\n    while True: pass",
    "hang in a thread": "import threading\nthreading.Thread(target=lambda: [0 for _ in iter(int, 1)]).start()\n1 / 0",
}
EXCESSIVE = {
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "memory bomb": "x = bytearray(10**11)",
    "slow memory bomb": "x = []\nwhile True: x.append(bytearray(10**6))",
    "memory bomb in many processes": (
        "import os, time\nfor _ in range(20):\n    if os.fork() == 0:\n        x = bytearray(b'x') * (64 << 20)\n"
        "        time.sleep(600)\ntime.sleep(600)"
    ),
    "a gigabyte of output": "import os\nfor _ in range(1000): os.write(1, b'x' * 10**6)",
    "disk full": "with open('/tmp/x', 'wb') as f:\n    while True: f.write(b'x' * 10**6)",
}
CHEATING = {
    "sys.exit(0)": "import sys\nsys.exit(0)",
    "os._exit(0)": "import os\nos._exit(0)",
    "sys.exit(0) in a call": "import sys\ndef double(x): sys.exit(0)",
    "os._exit(0) in a call": "import os\ndef double(x): os._exit(0)",
    "always equal": (
        "class Yes:\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n"
        "    def __bool__(self): return True\n    __hash__ = None\ndef double(x): return Yes()"
    ),
    "always equal, by inheritance": (
        "class Yes(int):\n    def __eq__(self, other): return True\n    __hash__ = None\ndef double(x): return Yes(7)"
    ),
    "patched assert and builtins": (
        "import builtins, sys\n"
        "class Quiet(BaseException):\n    def __new__(cls, *a): return SystemExit(0)\n"
        "builtins.AssertionError = Quiet\nbuiltins.exec = lambda *a: None\nsys.excepthook = lambda *a: None\n"
        "def double(x): return 0"
    ),
    "patched runner": (
        "import sys\n"
        "for module in list(sys.modules.values()):\n"
        "    for name in ('decode', 'encode', 'run', 'update'):\n"
        "        if hasattr(module, name): setattr(module, name, lambda *a: True)\n"
        "def double(x): return 0"
    ),
    "verdict written to every descriptor": (
        "import os\n"
        "for fd in range(256):\n"
        "    for text in (b'1111', b'\\x00\\x00\\x00\\x20{\"value\": true, \"after\": []}    '):\n"
        "        try: os.write(fd, text)\n        except OSError: pass\n"
        "def double(x): return 0"
    ),
    "forged messages instead of values": (
        "import os, struct, json\n"
        "def double(x):\n"
        "    for message in ({'passed': [True] * 3}, {'value': {'name': 'double'}, 'after': []}, {'score': 1}):\n"
        "        data = json.dumps(message).encode()\n"
        "        os.write(4, struct.pack('!I', len(data)) + data)\n"
        "    return 0"
    ),
    "frames and objects searched": (
        "import gc, sys\n"
        "def double(x):\n"
        "    frame = sys._getframe()\n"
        "    while frame:\n        frame.f_globals.update(passed=True, verdict=1, reply={'value': True})\n"
        "        frame = frame.f_back\n"
        "    for thing in gc.get_objects():\n"
        "        if isinstance(thing, dict) and 'arguments' in thing: thing['value'] = True\n"
        "    return 0"
    ),
}


@isolated
@pytest.mark.parametrize("name", HANGING)
def test_programs_that_never_end_score_zero(name: str) -> None:
    assert score(HANGING[name], timeout=1.0) == 0.0


@isolated
@pytest.mark.parametrize("name", EXCESSIVE)
def test_programs_that_take_everything_score_zero(name: str) -> None:
    """Ended by a limit long before the deadline, which would fail this test by its own timeout."""
    assert score(EXCESSIVE[name], timeout=600.0) == 0.0
    assert score(RIGHT) == 1.0


@isolated
@pytest.mark.parametrize("name", CHEATING)
def test_programs_that_claim_to_be_right_score_zero(name: str) -> None:
    assert score(CHEATING[name]) == 0.0
    output = {"inputs": ["2"], "outputs": ["4"]}
    assert score(CHEATING[name], output) == 0.0


@isolated
def test_expected_value_is_nowhere_in_the_candidates_process() -> None:
    """It searches all it can reach for the value it should return."""
    search = (
        "import gc, glob, os, re, sys\n"
        "def secret():\n"
        "    seen = [repr(vars(m)) for m in list(sys.modules.values())] + [repr(os.environ), repr(sys.orig_argv)]\n"
        "    seen += [repr(thing) for thing in gc.get_objects() if isinstance(thing, (dict, list, tuple, str))]\n"
        "    for fd in range(64):\n"
        "        try: os.lseek(fd, 0, 0); seen.append(repr(os.read(fd, 1 << 20)))\n        except OSError: pass\n"
        "    for path in glob.glob('/tmp/**', recursive=True) + glob.glob('/proc/*/*') + glob.glob('/dev/fd/*'):\n"
        "        try: seen.append(open(path).read())\n        except (OSError, ValueError): pass\n"
        "    found = re.findall('xyz' + 'zy-[0-9]+', ' '.join(seen))\n"
        "    return found[0] if found else None\n"
    )
    item = {"test_list": ["assert secret() == 'xyzzy-48151623'"]}
    assert score(search, item) == 0.0
    assert score(search, {"test_list": ["assert secret() is None"]}) == 1.0  # it ran, and found nothing


@isolated
def test_builtins_in_a_test_are_not_the_candidates() -> None:
    item = {"test_list": ["assert set(f([1, 2])) == set((2, 1))", "assert sorted(f([3])) == [3]"]}
    assert score("def f(x): return x", item) == 1.0
    assert score("def f(x): return [9]\nset = lambda x: 0\nsorted = lambda x: [3]", item) == 0.0


def peek(body: str, *tests: str) -> float:
    """Score of a program whose `peek()` lists what it could do; it should be nothing."""
    code = "import os, socket, glob\ndef peek():\n    found = []\n" + "".join(
        f"    {line}\n" for line in body.splitlines()
    )
    return score(f"{code}    return found\n", {"test_list": ["assert peek() == []", *tests]})


@isolated
def test_host_files_and_environment_are_out_of_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADTRACE_SECRET", "s3cret")
    shared_pool(SERVICE, WORKERS).close()  # started again, with the secret in our environment
    secret = tmp_path / "secret.txt"
    secret.write_text("s3cret")
    secret.chmod(0o644)
    body = (
        f"for path in {[str(secret), __file__, '/etc/passwd', '/etc/shadow', os.path.expanduser('~/.bashrc')]!r}:\n"
        "    try: found.append(open(path).read()[:9])\n    except OSError: pass\n"
        "found += [text for text in os.environ.values() if 's3cret' in text]\n"
        "found += glob.glob('/proc/*')[:3] + glob.glob('/home/*') + glob.glob('/etc/*') + glob.glob('/sys/*')\n"
        f"found += [name for name in os.listdir('/tmp') if name not in {WAYS_TO_PACKAGES!r}]"
    )
    assert peek(body) == 1.0


@isolated
def test_writes_stay_inside(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    targets = [
        str(tmp_path / "out"),
        "/out",
        "/usr/lib/out",
        f"{sys.base_prefix}/out",
        "/dev/out",
        "/runner/out",
    ]
    body = (
        f"for path in {targets!r}:\n"
        "    try:\n        open(path, 'w').write('x')\n        found.append(path)\n    except OSError: pass\n"
        "open('/tmp/gradtrace_inside', 'w').write('fine')\n"
        "if open('/tmp/gradtrace_inside').read() != 'fine': found.append('no /tmp')"
    )
    assert peek(body) == 1.0
    assert not any(Path(path).exists() for path in [*targets, "/tmp/gradtrace_inside"])
    left = f"found += [name for name in os.listdir('/tmp') if name not in {WAYS_TO_PACKAGES!r}]"
    assert peek(left) == 1.0  # nothing of the run before


@isolated
def test_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind(f"\0gradtrace-{os.getpid()}")
        local.listen()
        body = (
            f"for family, address in ((socket.AF_INET, {server.getsockname()!r}),"
            f" (socket.AF_UNIX, {local.getsockname()!r}), (socket.AF_INET, ('8.8.8.8', 53))):\n"
            "    try:\n"
            "        with socket.socket(family) as s:\n            s.settimeout(3)\n            s.connect(address)\n"
            "        found.append(str(address))\n    except OSError: pass\n"
            "found += [name for _, name in socket.if_nameindex() if name not in ('lo', 'tunl0', 'sit0', 'ip6tnl0')]"
        )
        assert peek(body) == 1.0


@isolated
def test_no_privileges() -> None:
    body = (
        "import ctypes\nlibc = ctypes.CDLL(None)\n"
        "if os.getuid() == 0: found.append('root')\n"
        "if libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0: found.append('mount')\n"
        "if libc.unshare(0x00020000) == 0: found.append('unshare')\n"
        "if libc.unshare(0x10000000) == 0: found.append('user namespace')\n"
        "for family in (socket.AF_VSOCK, socket.AF_PACKET, socket.AF_ALG):\n"
        "    try: socket.socket(family, socket.SOCK_STREAM); found.append(str(family))\n    except OSError: pass\n"
        "for pid in range(1, 100):\n"
        "    if pid != os.getpid() and libc.ptrace(16, pid, 0, 0) == 0: found.append(f'ptrace {pid}')\n"
        "try: os.kill(1, 9)\nexcept OSError: pass"
    )
    assert peek(body, "assert peek() == []") == 1.0


ORPHAN = (
    "import os, sys\n"
    "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
    f"        os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(1000)', {MARK!r}])\n"
    "    os._exit(0)\n"
)


@isolated
def test_double_forked_orphans_die_with_their_program() -> None:
    """The autouse fixture looks for the orphan. The program itself is right and says so by its values."""
    assert score(ORPHAN + RIGHT) == 1.0
    assert score(ORPHAN + "while True: pass", timeout=2.0) == 0.0
    assert score(ORPHAN + "print(4)", {"inputs": [""], "outputs": ["4"]}) == 1.0


@isolated
@pytest.mark.parametrize(
    ("code", "tests", "expected"),
    [
        ("n = int(input())\nprint(sum(int(input()) for _ in range(n)))", [("2\n3\n4\n", "7\n")], 1.0),
        ("print(input())", [("a", "a"), ("b", "b  \n\n")], 1.0),
        ("print(input())", [("a", "a"), ("b", "c")], 0.0),
        ("print(input()); raise SystemExit(1)", [("a", "a")], 0.0),
        ("import sys\nprint(sys.stdin.read(), end='')", [("ä\n\n ü", "ä\n\n ü")], 1.0),
        ("if __name__ == '__main__':\n    print(4)", [("", "4")], 1.0),
        ("print(4)\nimport os\nos._exit(0)", [("", "4")], 0.0),
        ("import os\nos.write(1, b'4')\nos._exit(0)", [("", "4")], 1.0),
    ],
)
def test_scripts_are_judged_by_what_they_print(code: str, tests: list[tuple[str, str]], expected: float) -> None:
    inputs, outputs = zip(*tests, strict=True)
    assert score(code, {"answer": json.dumps({"inputs": inputs, "outputs": outputs})}) == expected
    listed = [{"input": given, "output": right, "testtype": "stdin"} for given, right in tests]
    assert score(code, {"reward_model": {"ground_truth": json.dumps(listed)}}) == expected


@isolated
@pytest.mark.parametrize(
    ("code", "test"),
    [
        ("def f(a):\n    a.sort()", "a = [3, 1]\nf(a)\nassert a == [1, 3]"),
        ("def f(n):\n    yield from range(n)", "assert list(f(3)) == [0, 1, 2]"),
        ("class S:\n    def f(self, a, *, b): return {a: (b, None)}", "assert S().f(1, b=2.5) == {1: (2.5, None)}"),
        ("class P:\n    def __init__(self, x): self.x = x", "p = P(3)\np.x = 4\nassert p.x == 4"),
        ("def f(x):\n    raise KeyError(x)", "try:\n    f(1)\nexcept KeyError:\n    pass\nelse:\n    assert False"),
        ("def f(): return 10 ** 5000", "assert f() == 10 ** 5000"),
        ("def f(): return float('nan')", "import math\nassert math.isnan(f())"),
        ("def f(): return 1 + 2j, b'x', {(1, 2): {3}}", "assert f() == (1 + 2j, b'x', {(1, 2): {3}})"),
        ("from fractions import Fraction\ndef f(): return Fraction(1, 2)", "assert f() == 0.5"),
        ("import os, sys\ndef f(): return os.spawnv(0, sys.executable, ['x', '-Sc', '1/0'])", "assert f() == 1"),
        ("import subprocess as s, sys\ndef f(): return s.call([sys.executable, '-Sc', '1/0'])", "assert f() == 1"),
        (
            "import threading\ndef f():\n    a = []\n    t = threading.Thread(target=a.append, args=(1,))\n"
            "    t.start()\n    t.join()\n    return a",
            "assert f() == [1]",
        ),
        ("def sum(a, b): return a - b", "assert sum(5, 3) == 2"),
        ("import ssl, sqlite3, decimal, zoneinfo, multiprocessing\ndef f(): return 1", "assert f() == 1"),
        ("def f(x): return x + 1\ndef g(h, x): return h(h(x))", "assert g(f, 1) == 3"),
    ],
)  # fmt: skip
def test_tests_see_values_objects_and_effects_as_python_has_them(code: str, test: str) -> None:
    assert score(code, {"test_list": [test]}) == 1.0


@isolated
def test_same_program_gets_the_same_value_every_time() -> None:
    code = "def f(): return list({'a', 'b', 'c', 'd', 'e', 'f', 'g'})"
    values = {str(score(code, {"test_list": [f"assert f()[{i}] == 'a'"]})) for i in (0, 0, 0)}
    assert len(values) == 1
    assert sum(score(code, {"test_list": [f"assert f()[{i}] == 'a'"]}) for i in range(7)) == 1.0


@isolated
def test_installed_packages_can_be_imported() -> None:
    code = "import numpy\ndef f(n): return numpy.arange(n).reshape(2, -1) ** 2, numpy.int64(3), numpy.float32(0.5)"
    assert score(code, {"test_list": ["assert f(4) == ([[0, 1], [4, 9]], 3, 0.5)"]}) == 1.0


HOSTS = {
    "user": ["unshare", "--user", "--map-user=1000", "--map-group=1000"],
    "root of a container": ["unshare", "--user", "--map-root-user"],
    "root that may not make user namespaces": [
        *["unshare", "--user", "--map-root-user", "sh", "-c"],
        *['echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"', "sh"],
    ],
}


@isolated
@pytest.mark.parametrize("host", HOSTS)
def test_no_capabilities_and_no_writes_on_other_kinds_of_hosts(host: str) -> None:
    if subprocess.run([*HOSTS[host], "true"], capture_output=True, check=False).returncode:
        pytest.skip("cannot be imitated on this machine")
    code = (
        "import ctypes\n"
        "def capabilities():\n"
        "    header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()\n"
        "    ctypes.CDLL(None).capget(header, data)\n    return sum(data)\n"
        "def write():\n"
        "    for path in ('/usr/lib/x', '/x', '/dev/x'):\n"
        "        try: open(path, 'w')\n        except OSError: continue\n        return path\n"
    )
    tests = ["assert capabilities() == 0", "assert write() is None"]
    request = {**script(code, ""), "kind": "calls", "tests": tests, "setup": "", "entry_points": []}
    program = (
        "from gradtrace.tasks.verification.pool import WorkerPool\n"
        f"with WorkerPool({SERVICE!r}, 1) as pool: print(pool.map([{request!r}]))\n"
    )
    done = subprocess.run([*HOSTS[host], sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[{'passed': [True, True], 'why': ''}]\n"


@isolated
def test_human_eval_form() -> None:
    test = "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(-1) == 1\n"
    item = {"test": test, "entry_point": "square"}
    assert score("def square(x): return x * x", item) == 1.0
    assert score("def square(x): return x + x", item) == 0.0


@pytest.mark.parametrize(
    ("item", "kind", "tests", "setup"),
    [
        (
            {"test_list": numpy.array(["assert f()"]), "test_imports": numpy.array(["import m"])},
            "calls", ["assert f()"], "import m\n",
        ),
        ({"answer": '{"test_list": ["assert f()"], "test_imports": []}'}, "calls", ["assert f()"], ""),
        (
            {"answer": {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}},
            "functions", [{"arguments": [1, 2], "expected": [3]}], "",
        ),
        ({"input_output": '{"inputs": ["1"], "outputs": ["2"]}'}, "script", [{"input": "1", "output": "2"}], ""),
        ({"answer": [{"input": "1", "output": ["2", "3"]}]}, "script", [{"input": "1", "output": "2\n3"}], ""),
        (
            {"answer": [{"input": "[1]\n2", "output": "3", "testtype": "functional", "metadata": {"func_name": "f"}}]},
            "functions", [{"arguments": [[1], 2], "expected": [3]}], "",
        ),
    ],
)  # fmt: skip
def test_forms_of_tests(item: dict[str, Any], kind: str, tests: list[Any], setup: str) -> None:
    found = unit_tests(item)
    assert (found.kind, found.tests, found.setup) == (kind, tests, setup)


def test_item_without_tests_is_refused() -> None:
    with pytest.raises(GradtraceError, match=r"no tests.*`test_list`"):
        unit_tests({"prompt": "p", "answer": "42"})


def no_namespaces(*command: str) -> list[str]:
    """The command where Linux grants none, for real: no user namespaces and no capabilities."""
    forbid = 'echo 0 > /proc/sys/user/max_user_namespaces && exec setpriv --bounding-set=-all --no-new-privs "$@"'
    return ["unshare", "--user", "--map-root-user", "sh", "-c", forbid, "sh", *command]


def run_without_isolation(program: str) -> list[str]:
    """The lines that a Python program prints where Linux isolates nothing."""
    command = [sys.executable, "-c", program]
    if not NO_ISOLATION:
        if shutil.which("setpriv") is None or subprocess.run(no_namespaces("true"), check=False).returncode:
            pytest.skip("cannot take namespaces away on this machine")
        command = no_namespaces(*command)
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def test_without_isolation_nothing_runs_unless_told_to(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    code = (
        f"open({str(ran)!r}, 'a').write('x')\n"
        "import socket\ntry: network = socket.socket()\nexcept OSError: network = None\n"
        "def f(): return 1 if network is None else 'network'\n"
    )
    refused, told = run_without_isolation(
        "from gradtrace.errors import GradtraceError\n"
        "from gradtrace.tasks.rewards import named_reward\n"
        f"code, item = {ORPHAN + code!r}, {{'test_list': ['assert f() == 1']}}\n"
        "run = lambda **options: named_reward('code', {'workers': 1, **options})([code], [item])\n"
        "try: print('ran', run())\n"
        "except GradtraceError as error: print('refused:', error)\n"
        "print('told to:', run(allow_unsafe=True, timeout=60.0))\n"
    )
    assert refused.startswith("refused:") and "no isolation" in refused and "allow_unsafe=true" in refused
    assert told == "told to: [1.0]"
    assert ran.read_text() == "x"  # once: the refusal came before anything ran


FORGE_BY_PROC = (
    "import glob, os\n"
    "for path in glob.glob('/proc/[0-9]*/fd/1'):\n"
    "    for fd in range(16):\n"
    "        try:\n"
    "            if 'sandbox.exam' + 'iner import' in open(path.replace('fd/1', 'cmdline')).read():\n"
    "                os.write(os.open(f'{path[:-1]}{fd}', os.O_WRONLY | os.O_NONBLOCK), b'111')\n"
    "        except OSError: pass\n"
    "def double(x): return 0"
)


def test_without_isolation_time_memory_output_and_verdict_are_kept() -> None:
    """And orphans: the autouse fixture looks for them."""
    hostile = [
        *(HANGING[name] for name in ("infinite loop", "ignored signals")),
        *(EXCESSIVE[name] for name in ("slow memory bomb", "a gigabyte of output")),
        *(CHEATING[name] for name in ("os._exit(0) in a call", "always equal", "verdict written to every descriptor")),
        ORPHAN + "while True: pass",
        FORGE_BY_PROC,
    ]
    calls = {"kind": "calls", "setup": "", "entry_points": [], "tests": DOUBLE["test_list"], "unsafe": True}
    requests = [{**script(code, ""), **calls, "seconds": 3.0} for code in hostile]
    requests += [
        {**script(ORPHAN + RIGHT, ""), **calls},
        {**script(ORPHAN + "print(4)", "4"), "unsafe": True},
    ]
    (line,) = run_without_isolation(
        "from gradtrace.tasks.verification.pool import WorkerPool\n"
        f"with WorkerPool({SERVICE!r}, 4) as pool:\n"
        f"    print([[reply['passed'].count(True), reply['why']] for reply in pool.map({requests!r})])\n"
    )
    *ended, right, printed = ast.literal_eval(line)
    assert [passed for passed, _ in ended] == [0] * len(hostile)
    assert right == [3, ""] and printed == [1, ""]


@isolated
@pytest.mark.slow
def test_two_hundred_at_once_with_hostile_ones_among_them() -> None:
    hostile = [*HANGING.values(), *EXCESSIVE.values(), *CHEATING.values()]
    codes, expected = [], []
    for i in range(200):
        if i % 10 == 3:
            codes.append(hostile[i // 10 % len(hostile)])
        else:
            codes.append(RIGHT if i % 3 else RIGHT.replace("x + x", "x"))
        expected.append(float(codes[-1] == RIGHT))
    reward = named_reward("code", {"workers": 8, "timeout": 1.0})
    pool = shared_pool(SERVICE, 8)
    assert reward(codes, [DOUBLE] * 200) == expected
    assert pool.size == 8 and pool.replaced == 0


def mutated(row: dict[str, Any]) -> str:
    """The reference, but the first value that it returns to its tests is turned into its opposite."""
    calls = [node.func for test in row["test_list"] for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Call)]
    called = {function.id for function in calls if isinstance(function, ast.Name)}
    functions = [node.name for node in ast.parse(row["code"]).body if isinstance(node, ast.FunctionDef)]
    name = next(name for name in functions if name in called)
    return (
        f"{row['code']}\n"
        f"_right, _depth, _returned = {name}, [], []\n"
        f"def {name}(*arguments, **named):\n"
        "    _depth.append(1)\n"
        "    value = _right(*arguments, **named)\n"
        "    _depth.pop()\n"
        "    if _depth or _returned: return value\n"
        "    _returned.append(value)\n"
        "    return not value\n"
    )


def check_references(rows: list[dict[str, Any]]) -> None:
    reward = named_reward("code", {"timeout": 5 * PATIENT})  # one reference of MBPP computes for seconds
    right = reward([row["code"] for row in rows], rows)
    assert [row["code"] for row, value in zip(rows, right, strict=True) if value != 1.0] == []
    wrong = reward([mutated(row) for row in rows], rows)
    assert [row["code"] for row, value in zip(rows, wrong, strict=True) if value != 0.0] == []


@isolated
def test_references_score_one_and_zero_with_one_mutated_return_value() -> None:
    check_references(
        [
            {"code": RIGHT, **DOUBLE},
            {
                "code": "def even(n):\n    return n % 2 == 0",
                "test_list": ["assert even(2)", "assert not even(3)", "assert even(0) == True"],
            },
            {
                "code": "import math\ndef root(x):\n    return math.sqrt(x)",
                "test_imports": ["import math"],
                "test_list": ["assert math.isclose(root(2), 1.41421356, rel_tol=1e-6)"],
            },
            {
                "code": "def fact(n):\n    return 1 if n < 2 else n * fact(n - 1)",
                "test_list": ["assert fact(5) == 120"],
            },
        ]
    )


@isolated
@pytest.mark.slow
@pytest.mark.skipif(not MBPP.is_file(), reason=f"no MBPP at {MBPP}; set GRADTRACE_DATA to the folder of data sets")
def test_every_mbpp_reference_scores_one_and_zero_with_one_mutated_return_value() -> None:
    rows = json.loads(MBPP.read_text())
    assert len(rows) == 427
    check_references(rows)
