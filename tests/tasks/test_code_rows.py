"""Rows of code data: which tests decide something, whose a name is, and what is an error of the row."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from gradtrace.errors import GradtraceError
from gradtrace.tasks.datasets import DatasetTask
from gradtrace.tasks.prepare.prepare import Request, prepare
from gradtrace.tasks.rewards import add_rewards, named_reward
from gradtrace.tasks.rewards.code import unit_tests
from gradtrace.tasks.settings import DataConfig
from tests.tasks.byte_model import byte_tokenizer
from tests.tasks.test_sandbox import isolated, score

RIGHT = "def f(x):\n    if not isinstance(x, int): raise TypeError('a number')\n    return x * x\n"
WRONG = "def f(x): return 0"
CASE = "import unittest\nclass Squares(unittest.TestCase):\n"
RUN = {
    "a function of pytest": "def test():\n    assert f(3) == 9",
    "two functions": "def test_a():\n    assert f(0) == 0\ndef test_b():\n    assert f(3) == 9",
    "functions that are named and not called": (
        "def test_a():\n    assert f(0) == 0\ndef test_b():\n    assert f(3) == 9\nall_tests = [test_b]\nf(1)"
    ),
    "functions that a loop calls": (
        "def test_a(g):\n    assert g(3) == 9\nfor test in [test_a]:\n    test(f)"
    ),
    "a function that a script would call": (
        "def test_a():\n    assert f(3) == 9\ndef main(): test_a()\nif __name__ == '__main__':\n    main()"
    ),
    "a class of pytest": (
        "class TestF:\n    def setup_method(self): self.x = 3\n    def test_f(self): assert f(self.x) == 9"
    ),
    "parameters": (
        "import pytest\n@pytest.mark.parametrize('given, right', [(0, 0), pytest.param(3, 9)])\n"
        "@pytest.mark.parametrize('sign', [1, -1])\n"
        "def test_f(given, right, sign):\n    assert f(sign * given) == right"
    ),
    "parameters of a class": (
        "import pytest\n@pytest.mark.parametrize('x', [0, 3])\nclass TestF:\n"
        "    def test_f(self, x): assert f(x) == x * x"
    ),
    "an exception that pytest expects": (
        "import pytest\ndef test_f():\n    with pytest.raises(TypeError, match='number'):\n        f('a')"
    ),
    "a TestCase": f"{CASE}    def test_f(self):\n        self.assertEqual(f(3), 9)",
    "a TestCase that runs itself": f"{CASE}    def test_f(self):\n        self.assertEqual(f(3), 9)\nunittest.main()",
    "a TestCase run by a runner that keeps failures": (
        f"{CASE}    def test_a(self): self.assertEqual(f(0), 0)\n    def test_b(self): self.assertEqual(f(3), 9)\n"
        "suite = unittest.defaultTestLoader.loadTestsFromTestCase(Squares)\nunittest.TestResult and suite.run("
        "unittest.TestResult())"
    ),
    "a TestCase with fixtures": (
        f"{CASE}    def setUp(self): self.x = 3\n    def test_f(self):\n"
        "        for x in (self.x, 4):\n            with self.subTest(x=x): self.assertAlmostEqual(f(x), x ** 2)"
    ),
    "a TestCase with an exception": f"{CASE}    def test_f(self):\n        self.assertRaises(TypeError, f, 'a')",
    "another name": f"{CASE}    def test_f(self):\n        equal = self.assertEqual\n        equal(f(3), 9)",
    "an assertion of numpy": "import numpy as np\nnp.testing.assert_allclose(f(3), 9)",
    "a raise": "if f(3) != 9: raise AssertionError('wrong')",
    "an exception": "try:\n    f('a')\n    assert False\nexcept TypeError:\n    pass",
    "any exception, and a failure among them": "try:\n    f('a')\n    assert False\nexcept:\n    pass",
    "a check in a function that is called": "def check(g):\n    assert g(3) == 9\ncheck(f)",
    "a failure that is caught": "try:\n    assert f(3) == 9\nexcept AssertionError:\n    pass",
    "an assertion that is not always reached": "for value in [f(3)] * (f(3) != 0):\n    assert value == 9",
}  # fmt: skip


@isolated
@pytest.mark.parametrize("name", RUN)
def test_assertions_wherever_they_are_are_executed(name: str) -> None:
    item = {"test_list": [RUN[name]], "entry_points": ["f"]}
    assert score(RIGHT, item) == 1.0
    assert score(WRONG, item) == 0.0


DECIDE_NOTHING = {
    "main": "if __name__ == '__main__':\n    assert f(3) == 9",
    "main of a TestCase without tests": f"{CASE}    pass\nif __name__ == '__main__':\n    unittest.main()",
    "a check that nobody calls": "def check(g):\n    assert g(3) == 9",
    "a check that only returns": "def check(g):\n    return g(3) == 9\ncheck(f)",
    "an assertion's name that only returns": "def assert_nine(x):\n    return x == 9\nassert_nine(f(3))",
    "pass": "pass",
    "docstring": "'''f(3) == 9'''",
    "comparison": "f(3) == 9",
    "tuple": "assert (f(3) == 9, 'wrong')",
    "constants": "f(3)\nassert True\nassert 1 == 1",
    "never": "if False:\n    assert f(3) == 9",
    "TestCase without assertions": f"{CASE}    def test_f(self): f(3)",
    "a function without assertions": "def test_f():\n    return f(3) == 9",
}


@pytest.mark.parametrize("name", DECIDE_NOTHING)
def test_tests_without_an_assertion_are_an_error_of_the_row(name: str) -> None:
    for item in ({"test_list": ["assert f(1) == 1", DECIDE_NOTHING[name]]}, {"answer": [DECIDE_NOTHING[name]]}):
        with pytest.raises(GradtraceError, match=r"a\.jsonl, row 3 has a test that tests nothing"):
            unit_tests({"row": "a.jsonl, row 3", "prompt": "p", **item})


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ({"test_list": ["def test_f(x):\n    assert f(x) == 9"]}, r"test_f with arguments \(x\)"),
        ({"test_list": ["from solution import f\nassert f(3) == 9"]}, "import solution, which is not installed"),
        ({"test_list": ["x = 1\nassert x == 1"]}, "a test that asks nothing of the program"),
        ({"test_list": [["assert f(1) == 1"]]}, r"\['assert f\(1\) == 1'\] in `test_list\[0\]`, which must be a text"),
        ({"test_list": "assert f(1) == 1"}, "in `test_list`, which must be a list"),
        ({"test_list": ["assert f(1) == 1"], "test_imports": [1]}, r"1 in `test_imports\[0\]`"),
        ({"test_list": ["assert f(1) == 1"], "reward_model": "rule"}, "'rule' in `reward_model`; it must be an object"),
        ({"answer": {"inputs": ["1", "2"], "outputs": ["1"]}}, "2 `inputs` and 1 `outputs`"),
        ({"answer": {"inputs": [[1]], "outputs": [1, 2], "fn_name": "f"}}, "1 `inputs` and 2 `outputs`"),
        ({"answer": {"inputs": "1", "outputs": ["1"]}}, "'1' in `inputs`, which must be a list"),
        ({"answer": {"inputs": [[1]], "outputs": [1], "fn_name": ["f"]}}, r"\['f'\] in `fn_name`"),
        ({"answer": {"inputs": [5], "outputs": [25], "fn_name": "f"}}, r"5 in `inputs\[0\]`.*one JSON value"),
        ({"answer": {"inputs": ["1", "x y"], "outputs": ["1", "2"], "fn_name": "f"}}, r"'x y' in `inputs\[1\]`"),
        ({"answer": {"inputs": ["1"], "outputs": ["nothing"], "fn_name": "f"}}, r"'nothing' in `outputs\[0\]`"),
        (
            {"answer": [{"input": "1", "output": "1", "testtype": "functional", "metadata": '{"func_name": "f"}'}]},
            "in `metadata` of test 0, which must be an object with func_name",
        ),
        ({"answer": [{"input": "1", "output": "1", "testtype": "functional"}]}, "None in `metadata` of test 0"),
    ],
)  # fmt: skip
def test_malformed_rows_are_errors_that_name_row_and_column(item: dict[str, Any], words: str) -> None:
    with pytest.raises(GradtraceError, match=rf"b\.parquet, row 7 has .*{words}"):
        unit_tests({"prompt": "p", "row": "b.parquet, row 7", **item})


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_rows_are_checked_when_they_are_prepared_and_when_they_are_loaded(tmp_path: Path) -> None:
    good = {"prompt": "Write f.", "answer": None, "code": RIGHT, "test_list": ["assert f(3) == 9"]}
    source = write(tmp_path / "rows.jsonl", good, {**good, "prompt": "Write it.", "test_list": ["f(3) == 9"]})
    with pytest.raises(GradtraceError, match=r"rows\.jsonl, row 1 has a test that tests nothing"):
        prepare(Request("mbpp", tmp_path / "out", source))
    items = DatasetTask(DataConfig(train=[source], validation_fraction=0.0), byte_tokenizer()).known_items()
    reward = named_reward("code", {"partial": True})
    for each in (reward, add_rewards(reward, {"code_format": 0.1}), add_rewards(named_reward("math"), {"code": 1.0})):
        each.check(items[:1])
        with pytest.raises(GradtraceError, match=r"rows\.jsonl, row 1 has a test that tests nothing"):
            each.check(items)


@isolated
def test_what_cannot_be_seen_in_the_text_is_told_when_it_runs(caplog: pytest.LogCaptureFixture) -> None:
    item = {"row": "a.jsonl, row 3", "test_list": ["assert callable(f)"]}
    with pytest.raises(GradtraceError, match=r"a\.jsonl, row 3 has a test that asks nothing of the program"):
        score(WRONG, item)
    with caplog.at_level(logging.WARNING):
        assert score("def f(x): return []", {**item, "test_list": ["for x in f(3): assert x == 9"]}) == 0.0
    assert "without one assertion that held" in caplog.text and "a.jsonl, row 3" in caplog.text


CLOSE = "import math\nNEAR = 1e-6\ndef close(a, b):\n    return math.fabs(a - b) < NEAR\n"
ROOT = "def root(x):\n    return x ** 0.5\n"
FORGED = "def root(x): return 0\ndef close(a, b): return True"


@isolated
@pytest.mark.parametrize(
    "item",
    [
        {"code": CLOSE + ROOT, "entry_points": ["root"]},
        {"code": CLOSE + ROOT, "prompt": "Write a function root."},
        {"code": CLOSE, "prompt": "def root(x: float) -> float:\n    ...\n"},
        {"prompt": f"Mend root:\n{CLOSE}\ndef root(x):\n    return x\n", "entry_points": ["root"]},
        {"test_setup_code": CLOSE},
        {
            "code": ROOT + CLOSE.replace("return ", "assert "),
            "test_list": ["close(root(9.0), 3.0)"],
            "entry_points": ["root"],
        },
        {"code": CLOSE + ROOT, "test": "def check(g):\n    assert close(g(9.0), 3.0)", "entry_point": "root"},
    ],
    ids=["declared", "named by the prompt", "stub", "to be mended", "setup", "asserts itself", "HumanEval"],
)
def test_helpers_of_the_row_are_not_the_programs_to_define(item: dict[str, Any]) -> None:
    item = (
        {"prompt": "p", **item}
        if "test" in item
        else {"prompt": "p", "test_list": ["assert close(root(9.0), 3.0)"], **item}
    )
    assert score(ROOT, item) == 1.0
    assert score(FORGED, item) == 0.0


@pytest.mark.parametrize(
    ("test", "code"),
    [
        ("assert close(root(9.0), 3.0)", CLOSE + ROOT),
        ("assert root(9.0) == right(9.0)", f"{ROOT}def right(x): return x ** 0.5"),
        ("assert close(Stack().top(), 3)", f"{CLOSE}class Stack: pass"),
        ("c = Close()\nassert c.same(root(9.0), 3)", f"{ROOT}class Close: pass"),
    ],
)
def test_helpers_that_may_be_the_programs_are_refused(test: str, code: str) -> None:
    with pytest.raises(GradtraceError, match=r"row 3 use .* which they do not define.*entry_points"):
        unit_tests({"row": "row 3", "prompt": "p", "test_list": [test], "code": code})


@isolated
def test_arguments_of_our_calls_are_copies() -> None:
    """Where the test's own text calls, a program can change what the test compares with: see docs/security.md."""
    emptied = "def f(x):\n    x.clear()\n    return x"
    row = {"fn_name": "f", "inputs": [[[3, 1, 2]], "[3, 1, 2]"], "outputs": [[1, 2, 3], "[1, 2, 3]"]}
    assert score(emptied, {"answer": row}) == 0.0
    assert score("def f(x):\n    x.sort()\n    return x", {"answer": row}) == 1.0
    assert score(emptied, {"test_list": ["assert f([3, 1, 2]) == sorted([3, 1, 2])"]}) == 0.0
