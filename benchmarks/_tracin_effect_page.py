"""Figures, page and picture of `benchmarks/tracin_effect.py`."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from gradtrace.intervals import Interval, mean_interval, paired_difference, t_quantile

ARMS = {
    "vanilla": "all noisy (vanilla GRPO)",
    "random": "the same, as many dropped at random",
    "selection": "selected by trusted ones, which are not trained on",
    "trusted_only": "trusted ones only",
    "trusted_too": "noisy and trusted ones",
    "trusted_random": "the same, as many noisy ones dropped at random",
    "trusted_selection": "the same, noisy ones selected by trusted ones (`train_on_validation=true`)",
    "trusted_soft": "the same, soft weights",
    "trusted_averaged": "the same, scores averaged over four steps",
}
NOISES = {
    "0": "no errors",
    "0.2": "20 % flipped",
    "0.4": "40 % flipped",
    "systematic": "`-` judged the wrong way round",
}
ENOUGH = 5
"""Seeds that an arm needs to be reported."""
QUESTIONS = (
    ("trusted_too", "vanilla"),
    ("trusted_only", "trusted_too"),
    ("selection", "vanilla"),
    ("selection", "trusted_too"),
    ("trusted_selection", "selection"),
    ("trusted_selection", "trusted_too"),
    ("trusted_selection", "trusted_random"),
    ("trusted_selection", "trusted_only"),
    ("random", "vanilla"),
    ("trusted_soft", "trusted_selection"),
    ("trusted_averaged", "trusted_selection"),
)
"""Comparisons that were decided on before the runs: ours, theirs."""


def two_sided(difference: Interval) -> float:
    """p of Student's t-test that the mean of these paired differences is 0."""
    freedom = difference.count - 1
    if freedom < 1 or difference.half == 0:
        return math.nan
    t = abs(difference.mean) / (difference.half / t_quantile(freedom))
    low, high = 0.0, 1.0
    for _ in range(40):
        level = (low + high) / 2
        low, high = (level, high) if t_quantile(freedom, level) < t else (low, level)
    return 1 - low


def holm(values: list[float]) -> list[float]:
    """p corrected for as many comparisons as there are (Holm, 1979)."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    corrected, largest = [math.nan] * len(values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(values) - rank) * values[index]))
        corrected[index] = largest
    return corrected


def accuracies(runs: list[dict[str, Any]]) -> dict[tuple[str, str], dict[int, float]]:
    """(noise, arm) → accuracy after the last step, by seed."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for run in runs:
        found.setdefault((run["noise"], run["arm"]), {})[run["seed"]] = run["accuracy"]
    return found


def complete(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The runs of those arms that have as many seeds as the study asks for: a mean over fewer is no figure."""
    found = accuracies(runs)
    wanted = min(ENOUGH, max(map(len, found.values()), default=0))
    return [run for run in runs if len(found[run["noise"], run["arm"]]) >= wanted]


def shown(interval: Interval) -> dict[str, float]:
    return {"mean": interval.mean, "low": interval.low, "high": interval.high, "n": interval.count}


def summarise(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Accuracy by noise and arm, and every comparison with its p, corrected for all of them."""
    found = accuracies(runs)
    arms: dict[str, dict[str, Any]] = {}
    for (noise, arm), by_seed in found.items():
        own = [run for run in runs if (run["noise"], run["arm"]) == (noise, arm)]
        about: dict[str, Any] = shown(mean_interval(list(by_seed.values())))
        about["cpu_seconds"] = statistics.mean(run["cpu_seconds"] for run in own)
        for label in ("wrong", "right"):
            shares = [step[label] for run in own for step in run["shares"] if label in step]
            about[f"dropped_of_{label}"] = statistics.mean(shares) if shares and sum(shares) else None
        arms.setdefault(noise, {})[arm] = about
    compared: list[dict[str, Any]] = []
    for noise in NOISES:
        for ours, theirs in QUESTIONS:
            mine, other = found.get((noise, ours), {}), found.get((noise, theirs), {})
            seeds = sorted(set(mine) & set(other))
            if len(seeds) > 2:
                difference = paired_difference([mine[s] for s in seeds], [other[s] for s in seeds])
                compared.append({"noise": noise, "ours": ours, "theirs": theirs, **shown(difference)})
                compared[-1]["p"] = two_sided(difference)
    for row, p in zip(compared, holm([row["p"] for row in compared]), strict=True):
        row["p_holm"] = p
    return {"arms": {noise: arms[noise] for noise in NOISES if noise in arms}, "comparisons": compared}


PAGE = """# Does TracIn selection help?

You have a few prompts whose rewards you trust and many whose rewards err. What is the best use of the trusted ones?
Rewritten by

```
.venv/bin/python -m benchmarks.tracin_effect --write-docs
```

## In short
Points of accuracy with 95 % intervals; **bold** where they hold after correction for all comparisons. So few seeds and
so many comparisons leave {holding} of {count} of them: read the others as tendencies.

{short}

## How it was measured
The demo's task. **32 trusted prompts** are all there are, and 16 of them are sampled in a step, so that each is used
again and again. The rewards of the other training prompts err: flipped at random, or by rule (the verifier computes
every a − b as b − a, so that it rewards one of the wrong habits the policy starts with). **Every arm makes {updates}
optimizer steps on {steps} rollouts and samples {generated:,} responses in all**, so one number compares them at equal
steps and at equal generation: `vanilla` has 48 noisy prompts a step where others have 32 noisy and 16 trusted ones,
`trusted_only` samples 12 responses to each of its 32. Accuracy: 512 held-out prompts × 2 samples, neither trained on
nor trusted, after the last step.

{seeds} seeds in all that were used for nothing else ({ENOUGH} for every figure where nothing else is said; more were
added where noise is largest, after the first {ENOUGH} had been seen), {second} of them from a second warm start.
Settings are the defaults (`drop_lowest`, `drop_share=0.5`, Adam's preconditioner), chosen on other seeds (0 and 1) of
the first. Means with 95 % intervals over seeds (Student's t); {machine}.

## Held-out accuracy
{table}

![Accuracy of every arm under every error](images/tracin_effect.svg)

## Comparisons
Paired by seed, in points of accuracy; p by Student's t, corrected for all {count} comparisons (Holm). **Bold**: below
0.05 after that.

{compared}

## What selection drops
Of the noisy responses that have a gradient: how many of the wrongly judged ones and of the others, mean over steps and
seeds.

{dropped}

## What was left out
{left_out}
"""


def write_page(docs: Path, summary: dict[str, Any], runs: list[dict[str, Any]], where: str) -> None:
    (docs / "images" / "tracin_effect.svg").write_text(picture(summary), encoding="utf-8")
    page = PAGE.format(
        ENOUGH=ENOUGH,
        short="\n".join(f"- {line}" for line in verdict(summary)),
        updates=max(run["updates"] for run in runs),
        steps=runs[0]["steps"],
        generated=runs[0]["generated"],
        seeds=len({run["seed"] for run in runs}),
        second=len({run["seed"] for run in runs if run["seed"] % 2}),
        machine=where,
        table=table(summary),
        count=len(summary["comparisons"]),
        holding=sum(row["p_holm"] < 0.05 for row in summary["comparisons"]),
        compared=comparisons(summary),
        dropped=dropped(summary),
        left_out=left_out(summary),
    )
    (docs / "tracin_effect.md").write_text(page, encoding="utf-8")


def table(summary: dict[str, Any]) -> str:
    noises = list(summary["arms"])
    lines = [f"| trained on | {' | '.join(NOISES[n] for n in noises)} |", "|---" * (len(noises) + 1) + "|"]
    for arm, label in ARMS.items():
        cells = []
        for noise in noises:
            row = summary["arms"][noise].get(arm)
            seeds = "" if row is None or row["n"] == ENOUGH else f" ({row['n']} seeds)"
            cell = "–" if row is None else f"{row['mean']:.3f} [{row['low']:.2f}, {row['high']:.2f}]{seeds}"
            cells.append(cell)
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def comparisons(summary: dict[str, Any]) -> str:
    lines = ["| rewards | ours | against | points | p, corrected |", "|---|---|---|---|---|"]
    for row in summary["comparisons"]:
        points = f"{100 * row['mean']:+.1f} [{100 * row['low']:+.1f}, {100 * row['high']:+.1f}]"
        p = f"{row['p_holm']:.3f}" if row["p_holm"] >= 0.001 else "< 0.001"
        if row["p_holm"] < 0.05:
            points, p = f"**{points}**", f"**{p}**"
        lines.append(f"| {NOISES[row['noise']]} | `{row['ours']}` | `{row['theirs']}` | {points} | {p} |")
    return "\n".join(lines)


def dropped(summary: dict[str, Any]) -> str:
    lines = ["| rewards | arm | dropped of the wrongly judged | dropped of the others |", "|---|---|---|---|"]
    for noise, arms in summary["arms"].items():
        for arm, row in arms.items():
            if arm in ("selection", "random") and row["dropped_of_right"] is not None:
                wrong = "–" if row["dropped_of_wrong"] is None else f"{row['dropped_of_wrong']:.0%}"
                lines.append(f"| {NOISES[noise]} | `{arm}` | {wrong} | {row['dropped_of_right']:.0%} |")
    return "\n".join(lines)


def verdict(summary: dict[str, Any]) -> list[str]:
    """What the corrected comparisons say, whichever way they came out."""
    sentences = {
        ("trusted_too", "vanilla"): "Training on the trusted ones too, against noisy ones alone",
        ("trusted_only", "trusted_too"): "The trusted ones alone, against trusted and noisy ones",
        (
            "trusted_selection",
            "trusted_too",
        ): "Selecting among the noisy ones as well, against training on all",
        ("trusted_selection", "trusted_random"): "The same, against dropping as many noisy ones at random",
        ("selection", "vanilla"): "Only selecting by trusted ones, against noisy ones alone",
        (
            "trusted_selection",
            "selection",
        ): "Training on those that select (the default), against only selecting",
    }
    lines = []
    for (ours, theirs), sentence in sentences.items():
        parts = []
        for row in summary["comparisons"]:
            if (row["ours"], row["theirs"]) == (ours, theirs):
                points = f"{100 * row['mean']:+.1f} [{100 * row['low']:+.1f}, {100 * row['high']:+.1f}]"
                points = f"**{points}**" if row["p_holm"] < 0.05 else points
                parts.append(f"{points} with {NOISES[row['noise']]}")
        if parts:
            lines.append(f"{sentence}: {'; '.join(parts)}.")
    return lines


def left_out(summary: dict[str, Any]) -> str:
    missing: dict[str, list[str]] = {}
    for arm in ARMS:
        without = [NOISES[noise] for noise in NOISES if arm not in summary["arms"].get(noise, {})]
        if without:
            missing.setdefault(", ".join(without), []).append(f"`{arm}`")
    lines = ["Not run on every seed, to fit the study into an hour of cores that others used as well:", ""]
    lines += [f"- {', '.join(arms)} ({noises})" for noises, arms in missing.items()]
    lines += [
        "",
        "Nor a regime with fresh trusted prompts in every step: an earlier study had 64 of them, where training on "
        "them won by more; its arms differed in the number of optimizer steps, so its figures are not repeated here. "
        "Twelve rollouts are few; in a longer run 32 prompts that are used again and again would be learnt by heart.",
    ]
    return "\n".join(lines)


def picture(summary: dict[str, Any]) -> str:
    """An SVG: one panel for each kind of error, a bar with an interval for each arm."""
    line, top, left, width = 20, 44, 150, 940
    panel = (width - left) // max(1, len(summary["arms"]))
    largest = max(row["high"] for arms in summary["arms"].values() for row in arms.values())
    height = top + line * len(ARMS) + 12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif"',
        ' font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        '<text x="10" y="16" font-weight="bold">Held-out accuracy, equal steps and equal responses generated</text>',
    ]
    for place, (noise, arms) in enumerate(summary["arms"].items()):
        x0, scale = left + place * panel, (panel - 50) / max(largest, 1e-9)
        parts.append(f'<text x="{x0}" y="36" fill="#555">{NOISES[noise].replace("`", "")}</text>')
        for number, arm in enumerate(ARMS):
            y, row = top + number * line, arms.get(arm)
            if place == 0:
                parts.append(f'<text x="{left - 8}" y="{y + 11}" text-anchor="end">{arm}</text>')
            if row is None:
                continue
            colour = "#1f6fb2" if "selection" in arm else "#999"
            low, high = (x0 + max(0.0, row[key]) * scale for key in ("low", "high"))
            parts += [
                f'<rect x="{x0}" y="{y}" width="{row["mean"] * scale:.1f}" height="14" fill="{colour}"/>',
                f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{y + 7}" y2="{y + 7}" stroke="#000"/>',
                f'<text x="{high + 4:.1f}" y="{y + 11}" fill="#333">{row["mean"]:.2f}</text>',
            ]
    return "\n".join([*parts, "</svg>"]) + "\n"
