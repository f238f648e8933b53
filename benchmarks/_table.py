"""The tables of docs/benchmarks.md: what has a target, by question; everything else as details; where it ran."""

from __future__ import annotations

from typing import Any

QUESTIONS = {
    "What does tracing cost?": (
        "trace_overhead",
        "capture",
        "verl_overhead",
        "growth",
        "probe_cost",
        "tracin",
    ),
    "Is it faster than what else there is?": ("trainer", "rollout", "counterfactual", "peers.", "viewer"),
    "How near is it to what the machine can do?": ("roofline",),
    "Are short ways shorter?": ("solvers", "verification"),
    "Does it say something true?": (
        "validity",
        "early_steps",
        "token_value",
        "probe_accuracy",
        "deletion",
        "findings",
        "verify_precision",
    ),
    "Does it help training?": ("tracin_effect", "token_selection"),
}
"""Benchmarks by what they answer; a name that ends in a dot stands for all that begin with it."""


def question_of(name: str) -> str:
    """The question that a benchmark answers."""
    for question, names in QUESTIONS.items():
        if any(name == own or (own.endswith(".") and name.startswith(own)) for own in names):
            return question
    raise ValueError(f"benchmarks._table.QUESTIONS does not say what {name} answers")


def describe(target: dict[str, float]) -> str:
    return " and ".join(f"{sign} {target[end]:g}" for end, sign in (("min", "≥"), ("max", "≤")) if end in target)


def is_reached(ratio: float, target: dict[str, float]) -> bool:
    return target.get("min", float("-inf")) <= ratio <= target.get("max", float("inf"))


def table(results: list[dict[str, Any]], targets: dict[str, dict[str, float]]) -> str:
    """Markdown of all results, in the order of the questions."""
    lines = []
    for question in QUESTIONS:
        own = [result for result in results if question_of(result["name"]) == question]
        rows = [
            f"| `{label}` | {ratio:.2f} | {_range(result, label)} | {describe(targets[label])} "
            f"| {'yes' if is_reached(ratio, targets[label]) else '**no**'} | {result['name']} |"
            for result in own
            for label, ratio in result["ratios"].items()
            if label in targets
        ]
        if rows:
            head = ["| | value | interval | to reach | reached | benchmark |", "|---|---:|---|---|---|---|"]
            lines += [f"## {question}", "", *head, *rows, ""]
    return "\n".join([*lines, *_details(results, targets), *_places(results)])


def _range(result: dict[str, Any], label: str) -> str:
    """The 95 % interval of the median over rounds, or of the mean over seeds, groups or steps, where there is one."""
    low, high = result.get("ranges", {}).get(label, (None, None))
    return "" if low is None else f"{low:.2f} … {high:.2f}"


def _details(results: list[dict[str, Any]], targets: dict[str, dict[str, float]]) -> list[str]:
    rows = [
        f"| `{label}` | {ratio:.2f} | {_range(result, label)} | {result['name']} |"
        for result in results
        for label, ratio in result["ratios"].items()
        if label not in targets
    ]
    if not rows:
        return []
    return [
        "## Details, without a target",
        "",
        '<details markdown="1">',
        f"<summary>{len(rows)} more figures</summary>",
        "",
        "| | value | interval | benchmark |",
        "|---|---:|---|---|",
        *rows,
        "",
        "</details>",
        "",
    ]


def _places(results: list[dict[str, Any]]) -> list[str]:
    """Day, machine, versions and code, each once."""
    places: dict[str, list[str]] = {}
    for result in results:
        versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
        place = f"{result['day']}, {result['machine']}; {versions}; code {result.get('code', 'unknown')}"
        places.setdefault(place, []).append(result["name"])
    lines = [f"- {place}: {'everything' if len(places) == 1 else ', '.join(n)}" for place, n in places.items()]
    return ["## Where and when", "", *lines]
