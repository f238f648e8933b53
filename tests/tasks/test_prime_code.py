"""Rows with `fn_name`, held against verl's own judge of them, `prime_code`, in a process of its own: it takes functions
of `os` and `subprocess` away from the process that calls it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest

from gradtrace.tasks.rewards import named_reward
from tests.tasks.test_sandbox import PATIENT, WORKERS, isolated, score

VERL = importlib.util.find_spec("verl")
needs_verl = pytest.mark.skipif(VERL is None, reason="verl is not installed")

ADD = {"fn_name": "add", "inputs": ["1\n2", "3\n-5"], "outputs": ["3", "-2"]}
LISTS = {"fn_name": "f", "inputs": ["[3, 1, 2]", "[5]"], "outputs": ["[1, 2, 3]", "[5]"]}
NESTED = {"fn_name": "f", "inputs": ["2", "0"], "outputs": ["[[1, 2], [3, 4]]", "[]"]}
BOXED = {"fn_name": "f", "inputs": ["3", "4"], "outputs": ["[9]", "[16]"]}
FLOATS = {"fn_name": "f", "inputs": ["0.1\n0.2", "1\n2"], "outputs": ["0.3", "3.0"]}
EXACT = {"fn_name": "f", "inputs": ["1\n2"], "outputs": ["3"]}
TEXTS = {"fn_name": "f", "inputs": ['"a\\nb"', '""'], "outputs": ['"A\\nB"', '""']}
KEYS = {"fn_name": "f", "inputs": ['{"1": 2, "3": 4}'], "outputs": ['{"2": 1, "4": 3}']}
NOTHING = {"fn_name": "f", "inputs": ["[1]", "[]"], "outputs": ["1", "null"]}
TRUTH = {"fn_name": "f", "inputs": ["2", "3"], "outputs": ["true", "false"]}
SWAP = "return {value: key for key, value in x.items()}"

# (row, program, what prime_code says, what we say)
CASES: dict[str, tuple[dict[str, Any], str, float, float]] = {
    "function": (ADD, "def add(a, b): return a + b", 1, 1),
    "wrong function": (ADD, "def add(a, b): return a - b", 0, 0),
    "right for the first input": (ADD, "def add(a, b): return 3", 0, 0),
    "method": (ADD, "class Solution:\n    def add(self, a, b): return a + b", 1, 1),
    "wrong method": (ADD, "class Solution:\n    def add(self, a, b): return a * b", 0, 0),
    "state of a solution": (
        ADD,
        "class Solution:\n    def __init__(self): self.sign = 1\n    def add(self, a, b): return self.sign * (a + b)",
        1, 1,
    ),
    "names that nobody imports": (
        {"fn_name": "f", "inputs": ["[2, 1, 2]"], "outputs": ["2"]},
        "class Solution:\n    def f(self, x: List[int]) -> Optional[int]:\n"
        "        return Counter(x).most_common(1)[0][0] if math.gcd(4, 6) == 2 and gcd(4, 6) == 2 else None",
        1, 1,
    ),
    "tuple for a list": (LISTS, "def f(x): return tuple(sorted(x))", 1, 1),
    "list that is changed": (LISTS, "def f(x):\n    x.sort()\n    return x", 1, 1),
    "wrong order": (LISTS, "def f(x): return x", 0, 0),
    "emptied arguments": (LISTS, "def f(x):\n    x.clear()\n    return x", 0, 0),
    "text for a list": (LISTS, "def f(x): return str(sorted(x))", 0, 0),
    "set for a list": (LISTS, "def f(x): return set(x)", 0, 0),
    "nested lists": (NESTED, "def f(n): return [[1, 2], [3, 4]][:n]", 1, 1),
    "right value in a list": (BOXED, "def f(x): return [x * x]", 1, 1),
    "right value out of its list": (BOXED, "def f(x): return x * x", 1, 1),
    "wrong value": (BOXED, "def f(x): return x", 0, 0),
    "text": (TEXTS, "def f(x): return x.upper()", 1, 1),
    "whole keys": (KEYS, f"def f(x):\n    assert all(isinstance(key, int) for key in x)\n    {SWAP}", 1, 1),
    "null": (NOTHING, "def f(x):\n    if x: return x[0]", 1, 1),
    "truth": (TRUTH, "def f(x): return x % 2 == 0", 1, 1),
    "one for true": (TRUTH, "def f(x): return int(x % 2 == 0)", 1, 1),
    "whole number as a float": (EXACT, "def f(a, b): return float(a + b)", 1, 1),
    "no such function": (LISTS, "def g(x): return sorted(x)", 0, 0),
    "an exception": (ADD, "def add(a, b): raise ValueError", 0, 0),
    "no Python": (ADD, "def add(a, b) return a + b", 0, 0),
    "always equal": (ADD, "class Yes(int):\n    def __ne__(self, o): return False\ndef add(a, b): return Yes(7)", 0, 0),
    "almost a whole number": (EXACT, "def f(a, b): return a + b + 1e-7", 0, 0),
    # Where we are more exact than prime_code, or less:
    "rounding": (FLOATS, "def f(a, b): return a + b", 0, 1),
    "far from a float": (FLOATS, "def f(a, b): return a + b + 1e-3", 0, 0),
    "nested tuples": (NESTED, "def f(n): return [(1, 2), (3, 4)][:n]", 0, 1),
    "first element of a longer list": (
        {"fn_name": "f", "inputs": ["3"], "outputs": ["[1, 2, 3]"]}, "def f(x): return 1", 1, 0,
    ),
    "a name that operator happens to have": (ADD, "pass", 1, 0),
    "another argument beside keys": (
        {"fn_name": "f", "inputs": ['{"1": 2}\n3'], "outputs": ["5"]}, "def f(x, y): return x[1] + y", 0, 1,
    ),
    "keys as JSON has them": (KEYS, "def f(x): return {str(value): key for key, value in x.items()}", 0, 1),
    "an empty line at the end": (
        {"fn_name": "f", "inputs": ["3\n"], "outputs": ["9"]}, "def f(x): return x * x", 0, 1,
    ),
}  # fmt: skip

JUDGE = """
import json, sys
sys.path.insert(0, sys.argv[1])  # the folder alone: importing verl takes seconds
from prime_code import compute_score
out, sys.stdout = sys.stdout, sys.stderr
for row, program in json.load(sys.stdin):
    score, _ = compute_score("```python\\n" + program + "\\n```", json.dumps(row), continuous=True)
    print(float(score == 1), file=out)
"""


@needs_verl
@isolated
def test_functions_are_judged_as_prime_code_judges_them() -> None:
    cases = [(row, program) for row, program, _, _ in CASES.values()]
    assert VERL is not None and VERL.submodule_search_locations
    command = [sys.executable, "-c", JUDGE, f"{VERL.submodule_search_locations[0]}/utils/reward_score"]
    done = subprocess.run(command, input=json.dumps(cases), capture_output=True, text=True, check=True)
    theirs = dict(zip(CASES, map(float, done.stdout.split()), strict=True))
    reward = named_reward("code", {"workers": WORKERS, "timeout": PATIENT})
    ours = reward([program for _, program in cases], [{"prompt": "p", "answer": json.dumps(row)} for row, _ in cases])
    assert theirs == {name: case[2] for name, case in CASES.items()}
    assert dict(zip(CASES, ours, strict=True)) == {name: case[3] for name, case in CASES.items()}


@isolated
@pytest.mark.parametrize(
    ("row", "program"),
    [
        ({"fn_name": "f", "inputs": [[[3, 1, 2]]], "outputs": [[[1, 2, 3]]]}, "def f(x): return sorted(x)"),
        ({"fn_name": "f", "inputs": [[1, 2]], "outputs": [[3]]}, "def f(a, b): return a + b"),
        ({"fn_name": "f", "inputs": [["a b"]], "outputs": ["b a"]}, "def f(x): return ' '.join(x.split()[::-1])"),
        ({"fn_name": "f", "inputs": [[1]], "outputs": [float("nan")]}, "def f(x): return float('nan')"),
        ({"fn_name": "f", "inputs": [[{"1": 2}]], "outputs": [{"1": [2]}]}, "def f(x): return {1: (x[1],)}"),
    ],
    ids=["boxed list", "boxed number", "text", "nan", "keys"],
)  # fmt: skip
def test_rows_as_apps_has_them(row: dict[str, Any], program: str) -> None:
    assert score(program, {"input_output": json.dumps(row)}) == 1.0
    assert score("def f(*x): return 0", {"input_output": json.dumps(row)}) == 0.0


@isolated
def test_functions_of_livecodebench_are_methods_of_solution() -> None:
    test = {"input": "[1, 2]\n3", "output": "[4, 5]", "testtype": "functional", "metadata": {"func_name": "shift"}}
    program = "class Solution:\n    def shift(self, x: List[int], by: int):\n        return tuple(v + by for v in x)"
    assert score(program, {"answer": json.dumps([test])}) == 1.0
    assert score(program.replace("v + by", "v"), {"answer": json.dumps([test])}) == 0.0
    assert score(program, {"answer": json.dumps([{**test, "output": "[[4, 5]]"}])}) == 0.0
