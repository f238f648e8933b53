"""Run benchmarks and rewrite the table in docs/benchmarks.md.

What is timed runs first, alone on the machine, one after the other; then what is not: studies, which ask whether
something is true, and what counts operations or bytes. These run side by side, one on each core, those that took
longest the last time first. Studies also rewrite their parts of other pages.

python -m benchmarks                  all of them, about an hour and a half
python -m benchmarks --go-on          those that have no result of this code on this machine yet
python -m benchmarks rollout solvers  only these; the others keep their last results in the table
python -m benchmarks --quick rollout  small sizes; results and table are left alone
python -m benchmarks --check solvers  as above, and fail if a ratio misses its target (benchmarks/targets.json)
python -m benchmarks --table          only make the table again, from the results of the last runs
"""

from __future__ import annotations

import argparse
import json
import os
import pkgutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import benchmarks
from benchmarks import peers
from benchmarks._table import describe, is_reached, table
from benchmarks.common import REPOSITORY, code, machine

DOCUMENT = REPOSITORY / "docs" / "benchmarks.md"
RESULTS = REPOSITORY / "benchmarks" / "results"
"""The last full result of each benchmark, NAME.json, with the machine, the day, the code and the minutes it took."""
TARGETS = REPOSITORY / "benchmarks" / "targets.json"
"""{ratio: {"min": …} or {"max": …}}: what a ratio must reach."""
BEGIN, END = "<!-- benchmarks:begin -->", "<!-- benchmarks:end -->"
NOT_BENCHMARKS = {"__main__", "common"}
STUDIES = {
    *("tracin_effect", "findings", "validity", "deletion", "probe_accuracy", "token_value", "verify_precision"),
    *("token_selection", "early_steps", "growth", "peers.prime_rl_export"),
}
"""What does not time anything: another program beside it changes nothing but the minutes."""
WRITE_PAGES = ("deletion", "findings", "growth", "token_selection", "token_value", "tracin_effect", "validity")
"""These have `--write-docs`."""
NEW_DOCUMENT = f"""# Benchmarks

Every figure is a ratio of two measurements taken in turns in one run on one machine. `speedup_*` is theirs
over ours (bigger is better for us), `overhead_*` is with over without (closer to 1 is better); *interval* is that of
the median over rounds, or of a study's mean, 95 %. `make bench` runs all of them and rewrites the tables below;
`python -m benchmarks.NAME` runs one and prints its details as JSON.

{BEGIN}
{END}
"""


def benchmark_names() -> list[str]:
    """Modules of this folder, helpers excluded; a name that starts with an underscore is a helper."""
    names = [module.name for module in pkgutil.iter_modules(benchmarks.__path__) if not module.ispkg]
    names += [f"peers.{m.name}" for m in pkgutil.iter_modules(peers.__path__) if not m.name.startswith("_")]
    return sorted(name for name in names if name not in NOT_BENCHMARKS and not name.startswith("_"))


def run(name: str, quick: bool) -> dict[str, Any] | None:
    """Run one benchmark, pass on what it prints, and save its result. None when it failed."""
    command = [sys.executable, "-m", f"benchmarks.{name}"]
    command += ["--quick"] if quick else ["--write-docs"] if name in WRITE_PAGES else []
    threads = {"OMP_NUM_THREADS": "1"} if name in STUDIES else {}
    begin, last_line = time.monotonic(), ""
    with subprocess.Popen(
        command, cwd=REPOSITORY, env={**os.environ, **threads}, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(f"  {name}: {line}", end="", flush=True)
            last_line = line.strip() or last_line
    if process.returncode != 0:
        return None
    result: dict[str, Any] = json.loads(last_line)
    if not quick:
        save(result, (time.monotonic() - begin) / 60)
    return result


def run_all(names: list[str], quick: bool) -> dict[str, dict[str, Any] | None]:
    """Benchmark → its result: first what is timed, one after the other, then the studies side by side, the longest
    first, so that all cores end at about the same time."""
    found: dict[str, dict[str, Any] | None] = {}
    timed = [name for name in names if name not in STUDIES]
    for place, name in enumerate(timed, 1):
        print(f"{name} ({place} of {len(timed)}):", flush=True)
        found[name] = run(name, quick)
    studies = sorted((name for name in names if name in STUDIES), key=last_minutes, reverse=True)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        found |= dict(zip(studies, pool.map(lambda name: run(name, quick), studies), strict=True))
    return found


def last_minutes(name: str) -> float:
    """What a benchmark took the last time; one that was never timed counts as long, so that it does not come last."""
    path = RESULTS / f"{name}.json"
    stored = json.loads(path.read_text()) if path.exists() else {}
    return float(stored.get("minutes", float("inf")))


def missed_targets(ratios: dict[str, float]) -> list[str]:
    """One sentence for each ratio that is worse than its target."""
    missed = []
    for label, target in json.loads(TARGETS.read_text()).items():
        if label not in ratios:
            continue
        if not is_reached(ratios[label], target):
            missed.append(f"{label} is {ratios[label]:.3g}, to reach: {describe(target)}")
    return missed


def is_measured(name: str) -> bool:
    """Whether its result is of this code on this machine."""
    path = RESULTS / f"{name}.json"
    stored = json.loads(path.read_text()) if path.exists() else {}
    return stored.get("code") == code() and stored["machine"] == machine()


def save(result: dict[str, Any], minutes: float) -> None:
    RESULTS.mkdir(exist_ok=True)
    about = {"machine": machine(), "day": time.strftime("%Y-%m-%d"), "code": code(), "minutes": round(minutes, 1)}
    result = result | about
    (RESULTS / f"{result['name']}.json").write_text(as_lines(result))


def as_lines(result: dict[str, Any]) -> str:
    """JSON with one line for each key, so that a change of results is a few lines of a diff."""
    return "{\n" + ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in result.items()) + "\n}\n"


def rewrite(text: str) -> None:
    document = DOCUMENT.read_text() if DOCUMENT.exists() else NEW_DOCUMENT
    if BEGIN not in document or END not in document:
        sys.exit(f"benchmarks: {DOCUMENT} has no lines `{BEGIN}` and `{END}`, between which the table goes")
    before, rest = document.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    DOCUMENT.parent.mkdir(exist_ok=True)
    DOCUMENT.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these benchmarks (default: all)")
    parser.add_argument("--quick", action="store_true", help="small sizes; does not rewrite the table")
    parser.add_argument("--check", action="store_true", help="fail if a ratio misses its target")
    parser.add_argument("--go-on", action="store_true", help="leave out what was measured with this code already")
    parser.add_argument("--table", action="store_true", help="run nothing, make the table again")
    args = parser.parse_args()

    known = benchmark_names()
    unknown = sorted(set(args.names) - set(known))
    if unknown:
        sys.exit(f"benchmarks: no benchmark {', '.join(unknown)}; there are: {', '.join(known)}")
    problems = []
    names = [] if args.table else args.names or known
    if args.go_on:
        names = [name for name in names if not is_measured(name)]
    for name, result in run_all(names, args.quick).items():
        if result is None:
            problems.append(f"{name} did not finish; see its messages above")
        elif args.check:
            problems += missed_targets(result["ratios"])

    if not args.quick:
        results = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
        rewrite(table(results, json.loads(TARGETS.read_text())))
        print(f"table rewritten in {DOCUMENT}")
    if problems:
        sys.exit("benchmarks: " + "\n            ".join(problems))


if __name__ == "__main__":
    main()
