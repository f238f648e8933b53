"""Programs that try to have executed an assertion that was not, or to end a test without one."""

from __future__ import annotations

import pytest

from tests.tasks.test_sandbox import isolated, score

FORMS = {
    "assert": "assert f(3) == 9",
    "pytest": "def test_f():\n    assert f(3) == 9",
    "TestCase": (
        "import unittest\nclass Squares(unittest.TestCase):\n"
        "    def test_f(self): self.assertEqual(f(3), 9)\n    def test_g(self): self.assertEqual(f(2), 4)"
    ),
    "exception": (
        "import unittest\nclass Squares(unittest.TestCase):\n    def test_f(self):\n"
        "        try: self.assertEqual(f(3), 9)\n        except Exception: pass"
    ),
}
COUNTED_BY_ITSELF = {
    "unittest": (
        "import unittest\nfor name in dir(unittest.TestCase):\n"
        "    if name.startswith(('assert', 'run', 'fail')): setattr(unittest.TestCase, name, lambda *a, **k: None)\n"
        "unittest.TestResult.wasSuccessful = lambda self: True\ndef f(x): return 0"
    ),
    "builtins": (
        "import builtins\nbuiltins.AssertionError = builtins.compile = builtins.isinstance = lambda *a, **k: True\n"
        "def f(x): return 0"
    ),
    "a trace": (
        "import sys, threading\n"
        "def trace(frame, event, value):\n"
        "    frame.f_globals.update({'held': 9, 'asked': 9, '<holds>': print})\n    return trace\n"
        "sys.settrace(trace); sys.setprofile(trace); threading.settrace(trace)\ndef f(x): return 0"
    ),
    "names": (
        "globals().update({'<holds>': 1, '<raised>': 1, '<checked>': 1})\n"
        "def test_f(): assert True\nclass Squares: held = 9\ndef f(x): return 0"
    ),
    "objects": (
        "import gc\n"
        "def f(x):\n"
        "    for each in gc.get_objects():\n"
        "        for name in ('held', 'asked'):\n"
        "            try: setattr(each, name, 9)\n            except BaseException: pass\n"
        "    return 0"
    ),
    "messages": (
        "import json, os, struct, threading, time\n"
        "def send(message):\n"
        "    data = json.dumps(message).encode()\n    os.write(4, struct.pack('!I', len(data)) + data)\n"
        "def flood():\n"
        "    for _ in range(50): send({'value': True, 'after': [[], []], 'held': 9, 'asked': 9, 'passed': [True]})\n"
        "def f(x):\n    threading.Thread(target=flood).start()\n    time.sleep(0.1)\n    return 0"
    ),
    "a result": (
        "class Result(list):\n    held = 9\n    def __exit__(self, *a): return True\n"
        "    def __enter__(self): return 9\n"
        "    def assertEqual(self, *a): return None\ndef f(x): return Result()"
    ),
    **{
        f"raise {name}": f"import unittest\ndef f(x): raise {name}"
        for name in ("AssertionError", "SystemExit", "KeyboardInterrupt", "unittest.SkipTest", "StopIteration")
    },
    "the end": "import os\ndef f(x): os._exit(0)",
    "the end of the channel": "import os\ndef f(x):\n    os.close(4)\n    return 9",
    "a signal": "import os\ndef f(x): os.kill(os.getpid(), 9)",
}


@isolated
@pytest.mark.parametrize("name", COUNTED_BY_ITSELF)
def test_no_program_counts_an_assertion_for_itself(name: str) -> None:
    """And none makes its row look like one without assertions, which would be an error."""
    for test in FORMS.values():
        assert score(COUNTED_BY_ITSELF[name], {"test_list": [test], "entry_points": ["f"]}) == 0.0


@isolated
@pytest.mark.parametrize(
    "test",
    [
        "try: f('a')\nexcept Exception: pass\nelse: assert False",
        "try:\n    f('a')\n    assert False\nexcept BaseException: pass",
        "import pytest\ndef test_f():\n    with pytest.raises(Exception): f('a')",
        "import unittest\nclass F(unittest.TestCase):\n    def test_f(self): self.assertRaises(Exception, f, 'a')",
    ],
)
def test_end_of_a_program_is_no_exception_that_a_test_expects(test: str) -> None:
    item = {"test_list": [test], "entry_points": ["f"]}
    assert score("def f(x): raise ValueError", item) == 1.0
    for name in ("the end", "the end of the channel", "a signal", "raise SystemExit"):
        assert score(COUNTED_BY_ITSELF[name], item) == 0.0


@isolated
def test_names_of_assertions_do_not_count_where_the_program_defines_them() -> None:
    program = (
        "class Check:\n    def assert_right(self, *a): return None\n    raises = assert_right\ndef f(x): return Check()"
    )
    for test in ("f(3).assert_right(9)", "f(3).raises(9)"):
        assert score(program, {"test_list": [test], "entry_points": ["f"]}) == 0.0
    assert score("def assert_right(*a): pass", {"test_list": ["assert_right(3)"]}) == 0.0
    assert score("def add(): pass", {"answer": {"fn_name": "mul", "inputs": [[2, 3]], "outputs": [6]}}) == 0.0
