"""Mathematical answers are compared as mathematics, in processes that may hang and be killed without a trace."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradtrace.errors import GradtraceError
from gradtrace.tasks.answers import boxed_spans, code_of, marked_answer
from gradtrace.tasks.hedges import named, statement
from gradtrace.tasks.rewards import named_reward
from gradtrace.tasks.rewards.simple import JUDGE
from gradtrace.tasks.verification.pool import WorkerPool, shared_pool

GSM8K = Path(os.environ.get("GRADTRACE_DATA", "/work/shared/data")) / "gsm8k" / "train.jsonl"
WORKERS = 2
FORMATS = ("think_format", "answer_format", "boxed_format", "marker_format", "code_format")
OPTIONS = {"workers": WORKERS, "timeout": 20.0}
TOWER = r"\boxed{9^{9^{9^{9}}}}"
HOSTILE = [TOWER, "9**9**9**9", r"\boxed{(100000000!)!}", "{" * 50_000]


def score(pairs: list[tuple[str, str]], **options: object) -> list[float]:
    reward = named_reward("math", {**OPTIONS, **options})
    return reward([response for response, _ in pairs], [{"answer": answer} for _, answer in pairs])


def children(pid: int) -> list[int]:
    """Processes whose parent is `pid`."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("so it is\n#### 72", "48+24 = 72\n#### 72"),
        ("#### $1,234.00", "1234"),
        ("#### -3", "-3"),
        (r"\boxed{\frac12}", "0.5"),
        (r"no \boxed{3}, rather \boxed{\frac{1}{2}}", "1/2"),
        ("I think that it is 1/2.", r"\frac{1}{2}"),
        ("**Answer:** 34", "34"),
        ("The final answer is: $7$", "7"),
        (r"\boxed{2\sqrt{2}}", r"\sqrt{8}"),
        (r"\boxed{(x+1)^2}", "x^2+2x+1"),
        (r"\boxed{\left(3, \frac{\pi}{2}\right)}", r"\left( 3, \frac{\pi}{2} \right)"),
        (r"\boxed{\text{Evelyn}}", r"\text{Evelyn}"),
        (r"<think>\boxed{1}</think> \boxed{2}", "2"),
        ("#### 5 no, \\boxed{6}", "6"),
        (r"#### 16\sqrt{3}", r"16\sqrt{3}"),
        ("#### 72 apples", "72"),
        ("Answer: x = 5", "5"),
        ("#### 1+2i", "1 + 2i"),
        ("\\boxed{5} no, #### 6", "6"),
        (r"\boxed{9+9=18}", "18"),
        (r"\boxed{x=18}", "18"),
        ("#### 18%", "18"),
        (r"\boxed{18\%}", "18"),
        ("#### 18%", r"18\%"),
        ("#### 18", "18%"),
        ("#### 0.18", "18%"),
        ("#### 18%", "0.18"),
        ("#### 100%", "1"),
        (r"\boxed{x \ge 18}", r"x \geq 18"),
        (r"\boxed{\pm 3}", r"\pm 3"),
        ("#### 18 (not counting Tom)", "18"),
        ("Answer: The least possible value is 18", "18"),
    ],
)
def test_equal_answers_score_one(response: str, answer: str) -> None:
    assert score([(response, answer)]) == [1.0]


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("#### 71", "#### 72"),
        ("#### 720", "72"),
        ("#### -72", "72"),
        ("#### 7.2", "72"),
        (r"\boxed{\frac13}", "0.5"),
        (r"#### 16\sqrt{3}", "16"),
        ("Answer: 2k", "2"),
        (r"\boxed{2} no, \boxed{3}", "2"),
        (r"<think>\boxed{2}</think> \boxed{1}", "2"),
        ("", "72"),
        (r"\boxed{}", "72"),
        ("####", "72"),
        (r"\boxed{72", "71"),
        ("\ud800 \x00 {{{{ \\boxed{\\frac{}{}}", "72"),
        (r"\boxed{19=18}", "18"),
        (r"\boxed{18=19}", "18"),
        (r"\boxed{not 18}", "18"),
        ("#### not 18", "18"),
        ("so it is not 18", "18"),
        ("#### 17 to 18", "18"),
        ("it is 17 to 18", "18"),
        ("#### 17 or 18", "18"),
        ("#### 17–18", "18"),
        ("Answer: at least 18", "18"),
        (r"\boxed{\ge 18}", "18"),
        (r"\boxed{\neq 18}", "18"),
        (r"\boxed{>18}", "18"),
        ("#### 1800%", "18"),
        (r"\boxed{1800\%}", "18"),
        ("#### 1%", "1"),
    ],
)
def test_other_answers_score_zero(response: str, answer: str) -> None:
    assert score([(response, answer)]) == [0.0]


@pytest.mark.parametrize(
    ("require", "accepted"), [("boxed", r"\boxed{72}"), ("marker", "#### 72"), ("line", "Answer: 72")]
)
def test_required_form_alone_is_accepted(require: str, accepted: str) -> None:
    others = [text for text in (r"\boxed{72}", "#### 72", "Answer: 72", "72") if text != accepted]
    assert score([(accepted, "72")], require=require) == [1.0]
    assert score([(text, "72") for text in others], require=require) == [0.0] * len(others)


def test_nested_brackets_are_no_answer_and_cost_nothing() -> None:
    """Twenty of them keep math-verify busy for minutes; a warning would tell of a deadline."""
    deep = [r"\boxed{" + "{" * k + "18" + "}" * k + "}" for k in (20, 400)]
    deep += [
        "( " * 900,
        r"\boxed{" + "( " * 900 + "}",
    ]
    requests = [{"response": text, "answer": "18", "require": "any", "timeout": 60.0} for text in deep]
    assert shared_pool(JUDGE, WORKERS).map(requests) == [{"score": 0.0}] * len(deep)


def test_unknown_form_is_refused() -> None:
    with pytest.raises(GradtraceError, match="require=box"):
        score([("72", "72")], require="box")


def test_right_answer_that_cannot_be_read_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    assert score([("72", ""), ("72", "72")]) == [0.0, 1.0]
    assert "cannot read the right answer" in caplog.text


def test_hostile_answers_score_zero_in_order_and_leave_the_pool_whole() -> None:
    """One in three never ends. The deadline is for the hostile ones; the others take milliseconds."""
    pairs = [(HOSTILE[i // 3 % 4], "5") if i % 3 == 0 else (f"#### {i}", str(i - i % 2)) for i in range(12)]
    expected = [0.0 if i % 3 == 0 else float(i % 2 == 0) for i in range(12)]
    score([("1", "1")] * WORKERS, timeout=1.0)
    pool = shared_pool(JUDGE, WORKERS)
    keepers = {keeper.process.pid for keeper in pool._keepers}
    assert score(pairs, timeout=2.0) == expected
    assert score([("#### 7", "7")] * 4, timeout=20.0) == [1.0] * 4
    assert pool.size == WORKERS and pool.replaced == 0
    assert {keeper.process.pid for keeper in pool._keepers} == keepers
    assert [len(children(pid)) for pid in keepers] == [1] * WORKERS


@pytest.mark.slow
def test_two_hundred_at_once_with_hostile_ones_among_them() -> None:
    """One in ten never ends: none is lost, none wrong, and no process is left behind."""
    pairs = [(HOSTILE[i // 10 % 4], "5") if i % 10 == 3 else (rf"\boxed{{{i}}}", str(i - i % 2)) for i in range(200)]
    expected = [0.0 if i % 10 == 3 else float(i % 2 == 0) for i in range(200)]
    requests = [{"response": r, "answer": a, "require": "any", "timeout": 3.0} for r, a in pairs]
    with WorkerPool(JUDGE, 4) as pool:
        answers = pool.map(requests)
        keepers = [keeper.process.pid for keeper in pool._keepers]
        assert pool.size == 4 and pool.replaced == 0
    assert [answer.get("score", 0.0) for answer in answers] == expected
    assert {"failed": "deadline"} in answers and {"failed": "lost"} not in answers
    assert not [pid for pid in keepers if Path(f"/proc/{pid}").exists() or children(pid)]


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(JUDGE, WORKERS) as pool:
        yield pool


def request(number: int, timeout: float = 20.0) -> dict[str, object]:
    return {"response": f"#### {number}", "answer": str(number), "require": "any", "timeout": timeout}


def test_killed_keepers_and_judges_are_replaced_and_no_answer_is_lost(pool: WorkerPool) -> None:
    pool.map([request(i) for i in range(4)])
    os.kill(pool._keepers[0].process.pid, signal.SIGKILL)
    os.kill(children(pool._keepers[1].process.pid)[0], signal.SIGKILL)
    answers = pool.map([request(i) for i in range(20)])
    # The judge that was killed from outside takes one request with it; that is said and not hidden.
    assert sum(answer == {"score": 1.0} for answer in answers) >= 19
    assert all(answer in ({"score": 1.0}, {"failed": "crashed"}) for answer in answers)
    assert pool.map([request(i) for i in range(8)]) == [{"score": 1.0}] * 8
    assert pool.size == WORKERS and pool.replaced == 1


def test_closed_pool_leaves_no_process_and_starts_again(pool: WorkerPool) -> None:
    pool.map([request(1), request(2)])
    keepers = [keeper.process.pid for keeper in pool._keepers]
    everyone = keepers + [child for pid in keepers for child in children(pid)]
    assert len(everyone) == 2 * WORKERS
    pool.close()
    assert not [pid for pid in everyone if Path(f"/proc/{pid}").exists()]
    assert pool.map([request(3)]) == [{"score": 1.0}]


def test_workers_end_when_the_trainer_is_killed() -> None:
    """SIGKILL in the middle of a verification that would take for ever."""
    script = (
        "from gradtrace.tasks.verification.pool import WorkerPool\n"
        f"pool = WorkerPool({JUDGE!r}, 1)\n"
        "ask = lambda text: pool.map([dict(response=text, answer='5', require='any', timeout=1e6)])\n"
        f"ask('5'); print('ready', flush=True); ask({TOWER!r})\n"
    )
    trainer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None and trainer.stdout.readline() == "ready\n"
    keepers = children(trainer.pid)
    everyone = keepers + [child for pid in keepers for child in children(pid)]
    assert len(everyone) == 2
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    while any(Path(f"/proc/{pid}").exists() for pid in everyone):  # pytest's own timeout ends a test that fails
        time.sleep(0.05)


def test_worker_that_cannot_start_says_why() -> None:
    with (
        pytest.raises(GradtraceError, match="no_such_module"),
        WorkerPool("no_such_module:create", 1) as pool,
    ):
        pool.map([request(1)])


def near_misses(answer: str, rng: random.Random) -> list[str]:
    """Wrong answers that look like the right one: off by one, sign, a digit more, a digit changed."""
    number = answer.replace(",", "")
    digit = rng.randrange(len(number.lstrip("-")))
    at = len(number) - len(number.lstrip("-")) + digit
    changed = number[:at] + str((int(number[at]) + 1) % 10) + number[at + 1 :] if number[at].isdigit() else ""
    value = float(number)
    wrong = [
        str(value + 1),
        str(value - 1),
        f"-{number}" if value else "1",
        f"{number}1",
        changed,
        str(value + 0.5),
    ]
    return [text for text in wrong if text and float(text.replace("--", "")) != value]


def check_gsm8k(rows: list[dict[str, str]]) -> None:
    rng = random.Random(0)
    answers = [row["answer"] for row in rows]
    finals = [answer.rpartition("####")[2].strip() for answer in answers]
    assert score([(answer, answer) for answer in answers]) == [1.0] * len(rows)
    assert score([(rf"So \boxed{{{final}}}.", final) for final in finals]) == [1.0] * len(rows)
    wrong = [(rng.choice(near_misses(final, rng)), answer) for final, answer in zip(finals, answers, strict=True)]
    judged = score([(f"#### {text}", answer) for text, answer in wrong])
    assert [pair for pair, value in zip(wrong, judged, strict=True) if value] == []


def test_solutions_verify_against_themselves_and_near_misses_do_not() -> None:
    rng = random.Random(1)
    finals = [str(rng.randrange(-50, 10_000)) for _ in range(60)] + ["1,234", "0", "2.5", "-7", "1,000,000"]
    check_gsm8k([{"answer": f"It is {final} in all.\n#### {final}"} for final in finals])


@pytest.mark.slow
@pytest.mark.skipif(not GSM8K.is_file(), reason=f"no GSM8K at {GSM8K}; set GRADTRACE_DATA to the folder of data sets")
def test_every_gsm8k_answer_verifies_against_itself_and_near_misses_do_not() -> None:
    rows = [json.loads(line) for line in GSM8K.read_text().splitlines()]
    assert len(rows) == 7473
    check_gsm8k(rows)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{\{1,2\}}", ("boxed", r"\{1,2\}")),
        (r"\boxed{a \boxed{b}}", ("boxed", "b")),
        (r"\boxed{never closed", ("plain", r"\boxed{never closed")),
        ("#### 72 \nand more", ("marker", "72")),
        ("Answer: 1\nanswer: 2", ("line", "2")),
        ("nothing", ("plain", "nothing")),
    ],
)
def test_marked_answer(text: str, expected: tuple[str, str]) -> None:
    assert marked_answer(text) == expected


HUGE = 200_000


@pytest.mark.parametrize(
    "text",
    ["```" * HUGE, "```x " * HUGE, "```\n" * HUGE + "`", "<answer>" * HUGE, "( " * HUGE, "(" * HUGE, "1 +" * HUGE,
     "####" * HUGE, "answer:" * HUGE, "answer: \n" * HUGE, "$ " * HUGE + "x", "1," * HUGE + "x", "<think>" * HUGE,
     r"\boxed{" * HUGE, "not " * HUGE, "at least" * HUGE, "1 to " * HUGE, "#### " + " " * HUGE + "x", "\\" * HUGE,
     r"\boxed{1}" * HUGE, "1,111" * HUGE, "1" * HUGE, "$1 or " * HUGE, r"$\a" * HUGE, r"\[" * HUGE, "1 " * HUGE,
     "final answer: " * HUGE, "the answer is 1. " * HUGE, "1. Or " * HUGE, "<answer></answer>" * HUGE],
)  # fmt: skip
def test_no_response_makes_a_reward_slow(text: str) -> None:
    """A search that began again at every place would take hours on any of these, and pytest's own limit end it."""
    item = {"answer": {"numbers": [1, 2], "target": 3}}
    for name in ("countdown", "countdown_plain"):
        named_reward(name)([text], [item])
    for name in ("gsm8k", "last_number", *FORMATS):
        named_reward(name)([text], [{"answer": "18"}])
    code_of(text)
    marked_answer(text)
    named(text)
    statement(text)


def test_boxes_are_found_in_linear_time() -> None:
    """A quadratic search would take an hour here."""
    assert boxed_spans(r"\boxed{" * 500_000) == []
