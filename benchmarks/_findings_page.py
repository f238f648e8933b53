"""Writes the fault bench's table into docs/findings.md, between its marks."""

from __future__ import annotations

from typing import Any

from benchmarks._pages import between_marks
from benchmarks.common import REPOSITORY, wilson


def shown(found: int, runs: int) -> str:
    low, high = wilson(found, runs)
    return f"{found}/{runs} = {found / runs:.2f} [{low:.2f}, {high:.2f}]"


def rows_of(kinds: dict[str, Any]) -> list[str]:
    lines = [
        "| fault | found and rightly named | steps until found | culprit among the first three | by |",
        "|---|---|---|---|---|",
    ]
    for kind, row in kinds.items():
        delay = "–" if row["median_delay"] is None else f"{row['median_delay']:g}"
        culprit = "nobody did it" if row["culprit"] is None else f"{row['culprit']}/{row['runs']}"
        by = ", ".join(row["by"]) or "–"
        lines.append(f"| {kind} | {row['found']}/{row['runs']} | {delay} | {culprit} | {by} |")
    return lines


def false_alarms(found: dict[str, Any], where: str) -> str:
    alarms = ", ".join(f"{name} {count}" for name, count in found["alarms"].items()) or "none"
    low, high = wilson(sum(found["alarms"].values()), found["clean_steps"])
    return (
        f"- false alarms in {where}: "
        f"{found['alarms_per_100']:.2f} [{100 * low:.2f}, {100 * high:.2f}] per 100 steps "
        f"({alarms}; to reach: at most 1)"
    )


def table(found: dict[str, Any]) -> str:
    lines = [
        *rows_of(found["kinds"]),
        "",
        f"- recall {shown(found['found'], found['runs'])} (to reach: 0.9)",
        f"- culprit among the first three {shown(found['culprit'], found['culprit_runs'])} (to reach: 0.8)",
        false_alarms(found, f"{found['clean_runs']} clean runs of {found['clean_steps']} steps"),
    ]
    if found["auroc"]:
        lines += [
            f"- hacked against honest accepted responses, mean AUROC over {found['auroc_steps']} steps [95 % bootstrap "
            "over steps; to reach: 0.9 and above the best baseline]. Baselines choose their direction in every step:",
            "",
            "| score | AUROC |",
            "|---|---|",
        ]
        order = sorted(found["auroc"].items(), key=lambda item: -item[1][0])
        lines += [f"| {name} | {mean:.3f} [{low:.3f}, {high:.3f}] |" for name, (mean, low, high) in order]
    if own := found.get("smollm2"):
        lines += [
            "",
            "SmolLM2-135M on countdown:",
            "",
            *rows_of(own["kinds"]),
            "",
            false_alarms(own, f"the {own['clean_steps']} steps before the faults"),
        ]
    return "\n".join(lines)


def write_table(found: dict[str, Any]) -> None:
    between_marks(REPOSITORY / "docs" / "findings.md", "fault bench", f"\n{table(found)}")
