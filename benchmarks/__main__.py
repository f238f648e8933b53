"""Run every benchmark, one after the other, and rewrite the table in docs/benchmarks.md.

python -m benchmarks                  all of them
python -m benchmarks --quick rollout  only these, small sizes; the table is left alone
"""

from __future__ import annotations

import argparse
import json
import pkgutil
import subprocess
import sys
import time
from typing import Any

import benchmarks
from benchmarks.common import REPOSITORY, machine

DOCUMENT = REPOSITORY / "docs" / "benchmarks.md"
BEGIN, END = "<!-- benchmarks:begin -->", "<!-- benchmarks:end -->"
NOT_BENCHMARKS = {"__main__", "common"}
NEW_DOCUMENT = f"""# Benchmarks

Every figure is a ratio of two measurements taken in turns in one run on one machine. `speedup_*` is theirs
over ours (bigger is better for us), `overhead_*` is with over without (closer to 1 is better).
`make bench` runs all of them and rewrites the table below; `python -m benchmarks.NAME` runs one and prints
its details as JSON.

{BEGIN}
{END}
"""


def benchmark_names() -> list[str]:
    """Modules of this folder, helpers excluded; a name that starts with an underscore is a helper."""
    names = [module.name for module in pkgutil.iter_modules(benchmarks.__path__)]
    return sorted(name for name in names if name not in NOT_BENCHMARKS and not name.startswith("_"))


def run(name: str, quick: bool) -> dict[str, Any] | None:
    """The JSON object of one benchmark, or None when it failed; its own output is passed on."""
    command = [sys.executable, "-m", f"benchmarks.{name}", *(["--quick"] if quick else [])]
    last_line = ""
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(f"  {line}", end="", flush=True)
            last_line = line.strip() or last_line
    if process.returncode != 0:
        return None
    return json.loads(last_line)


def table(results: list[dict[str, Any]], failed: list[str]) -> str:
    versions: dict[str, str] = {}
    for result in results:
        versions.update(result["versions"])
    lines = [
        f"Measured on {time.strftime('%Y-%m-%d')}: {machine()}; "
        + ", ".join(f"{package} {version}" for package, version in versions.items())
        + ".",
        "",
        "| benchmark | ratio | value |",
        "|---|---|---:|",
    ]
    for result in results:
        for label, ratio in result["ratios"].items():
            lines.append(f"| {result['name']} | `{label}` | {ratio:.2f} |")
    lines += [f"| {name} | did not finish | – |" for name in failed]
    return "\n".join(lines)


def rewrite(text: str) -> None:
    document = DOCUMENT.read_text() if DOCUMENT.exists() else NEW_DOCUMENT
    if BEGIN not in document or END not in document:
        sys.exit(f"benchmarks: {DOCUMENT} has no lines `{BEGIN}` and `{END}`, between which the table goes")
    before, rest = document.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    DOCUMENT.parent.mkdir(exist_ok=True)
    DOCUMENT.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these benchmarks (default: all)")
    parser.add_argument("--quick", action="store_true", help="small sizes; does not rewrite the table")
    args = parser.parse_args()

    known = benchmark_names()
    unknown = sorted(set(args.names) - set(known))
    if unknown:
        sys.exit(f"benchmarks: no benchmark {', '.join(unknown)}; there are: {', '.join(known)}")
    results, failed = [], []
    for name in args.names or known:
        print(f"{name}:", flush=True)
        result = run(name, args.quick)
        if result is None:
            failed.append(name)
        else:
            results.append(result)

    if not args.quick and not args.names:
        rewrite(table(results, failed))
        print(f"table rewritten in {DOCUMENT}")
    if failed:
        sys.exit(f"benchmarks: {', '.join(failed)} did not finish; see the messages above")


if __name__ == "__main__":
    main()
