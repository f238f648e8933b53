"""How fast answers are verified, and what it costs that every verification can be killed.

Math: GSM8K's own solutions (GRADTRACE_DATA/gsm8k/train.jsonl; problems like them where the file is absent), judged by
math-verify. `overhead_math_killable`: one worker process with a deadline, over math-verify called in this process with
its own signal timeouts. `speedup_math_workers`: one worker over N workers, N the number of cores.
`speedup_math_over_process_per_answer`: a new process for each answer, the usual way to be able to kill one (forkserver
with math-verify preloaded), over one worker.

Code: a right answer to a small problem. `overhead_code_sandbox`: our jail with a separate examiner, one worker, over
`python -I -S file.py` with the asserts in the file, which isolates nothing and believes the candidate.
`speedup_code_workers`: one worker over N.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import alternate, emit, parse_arguments
from gradtrace.tasks.rewards import named_reward
from gradtrace.tasks.verification.pool import close_shared_pools

GSM8K = Path(os.environ.get("GRADTRACE_DATA", "/work/shared/data")) / "gsm8k" / "train.jsonl"
CODE = "def double(x):\n    return x + x\n"
TESTS = ["assert double(2) == 4", "assert double(5) == 10", "assert double('ab') == 'abab'"]
CORES = len(os.sched_getaffinity(0))
NUMBERS = itertools.count(100_003, 7)


def solutions(count: int) -> list[str]:
    if GSM8K.is_file():
        return [json.loads(line)["answer"] for line in GSM8K.read_text().splitlines()[:count]]
    rng = random.Random(0)
    return [f"In all there are {n}.\n#### {n}" for n in (rng.randrange(10_000) for _ in range(count))]


def renumbered(answers: list[str]) -> list[str]:
    """The same solutions with final answers that were never judged before: workers remember what they have parsed."""
    return [f"{answer.rpartition('####')[0]}#### {next(NUMBERS)}" for answer in answers]


def judge_here(answer: str) -> bool:
    """math-verify as its documentation calls it: extraction by itself, signal timeouts on."""
    from math_verify import parse, verify

    final = answer.rpartition("####")[2].strip()
    return bool(verify(parse(final), parse(final)))


def in_new_processes(answers: list[str], timeout: float = 10.0) -> None:
    # Each new process looks at this module twice, as __main__ and preloaded, and would say so every time.
    os.environ["PYTHONWARNINGS"] = "ignore::RuntimeWarning"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.verification", "math_verify"])
    for answer in answers:
        process = context.Process(target=judge_here, args=(answer,))
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
        process.join()


def math(answers: list[str], workers: int) -> None:
    answers = renumbered(answers)
    reward = named_reward("math", {"workers": workers})
    scores = reward(answers, [{"answer": answer} for answer in answers])
    assert sum(scores) == len(answers), f"{len(answers) - int(sum(scores))} answers were judged wrong"


def code(count: int, workers: int) -> None:
    scores = named_reward("code", {"workers": workers, "timeout": 60.0})([CODE] * count, [{"test_list": TESTS}] * count)
    assert sum(scores) == count, f"{count - int(sum(scores))} programs were judged wrong"


def plain_programs(count: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "program.py"
        file.write_text(CODE + "\n".join(TESTS))
        for _ in range(count):
            subprocess.run([sys.executable, "-I", "-S", file], check=True)


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(__doc__, arguments)
    rounds = 2 if args.quick else 6
    answers = solutions(400 if args.quick else 2000)
    few = answers[: 10 if args.quick else 40]
    programs = 10 if args.quick else 30

    here = alternate(lambda: math(answers, 1), lambda: [judge_here(answer) for answer in renumbered(answers)], rounds)
    many = alternate(lambda: math(answers, 1), lambda: math(answers, CORES), rounds)
    each = alternate(lambda: in_new_processes(few), lambda: math(few, 1), rounds)
    sandbox = alternate(lambda: code(programs, 1), lambda: plain_programs(programs), rounds)
    parallel = alternate(lambda: code(programs, 1), lambda: code(programs, CORES), rounds)
    close_shared_pools()

    detail: dict[str, Any] = {
        "cores": CORES,
        "answers": len(answers),
        "math_answers_per_s": {
            "in this process": round(len(answers) / here.ours_median, 1),
            "1 worker": round(len(answers) / many.theirs_median, 1),
            f"{CORES} workers": round(len(answers) / many.ours_median, 1),
            "a process per answer": round(len(few) / each.theirs_median, 1),
        },
        "code_programs_per_s": {
            "plain subprocess": round(programs / sandbox.ours_median, 1),
            "1 worker": round(programs / parallel.theirs_median, 1),
            f"{CORES} workers": round(programs / parallel.ours_median, 1),
        },
        "math_killable": here.detail(),
        "math_workers": many.detail(),
        "math_process_per_answer": each.detail(),
        "code_sandbox": sandbox.detail(),
        "code_workers": parallel.detail(),
    }
    ratios = {
        "overhead_math_killable": here,
        "speedup_math_workers": many,
        "speedup_math_over_process_per_answer": each,
        "overhead_code_sandbox": sandbox,
        "speedup_code_workers": parallel,
    }
    emit("verification", ratios, detail)


if __name__ == "__main__":
    main()
