"""Figures, page and pictures of `benchmarks/tracin_effect.py`."""

from __future__ import annotations

import itertools
import math
import statistics
from pathlib import Path
from typing import Any

from gradtrace.compare.picture import Curve, line_picture

LABELS = {
    "vanilla": "vanilla GRPO",
    "selection": "TracIn selection (defaults)",
    "random": "as many dropped at random",
    "val_too": "validation rollouts trained on too",
}
TRIED = {
    "no_preconditioner": "without Adam's preconditioner",
    "drop_all_negative": "all negative ones dropped (`drop_share=1`)",
    "positive": "`selection=positive`",
    "soft": "`selection=soft`, temperature 0.5",
    "refresh_4": "validation rollouts used for 4 steps (`val_refresh_every=4`)",
    "prompts_32": "32 validation prompts, all negative ones dropped",
}
TRIED_SEEDS = (0, 1)
AXES = {"step": "steps", "trained": "trained", "generated": "generated"}
T95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}
"""Student's t for a 95 % interval, by degrees of freedom."""


def at(points: list[dict[str, float]], axis: str, value: float) -> float:
    """Accuracy where `axis` reaches `value`, between two measurements by a straight line; the last one beyond."""
    for left, right in itertools.pairwise(points):
        if right[axis] >= value:
            part = (value - left[axis]) / max(right[axis] - left[axis], 1e-9)
            return left["accuracy"] + max(0.0, part) * (right["accuracy"] - left["accuracy"])
    return points[-1]["accuracy"]


def interval(values: list[float]) -> dict[str, float]:
    """Mean, standard deviation, and half the width of the 95 % interval of the mean."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    half = T95.get(len(values) - 1, 2.0) * deviation / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return {"mean": statistics.mean(values), "sd": deviation, "half": half, "n": len(values)}


def measured(runs: list[dict[str, Any]], axis: str, value: float) -> dict[str, Any]:
    by_seed = {run["seed"]: at(run["points"], axis, value) for run in runs}
    return interval(list(by_seed.values())) | {"at": value, "by_seed": by_seed}


def summarise(runs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By flip probability and method: accuracy at equal steps (the last), at equal trained and generated responses
    (where the method of the flip that reaches least ends), the mean over steps, and what was dropped."""
    summary: dict[str, dict[str, Any]] = {}
    for flip in sorted({run["flip"] for run in runs}):
        mine = [run for run in runs if run["flip"] == flip]
        budget = {axis: min(run["points"][-1][axis] for run in mine) for axis in AXES}
        by_method = {}
        for name in dict.fromkeys(run["method"] for run in mine):
            own = [run for run in mine if run["method"] == name]
            found: dict[str, Any] = {label: measured(own, axis, budget[axis]) for axis, label in AXES.items()}
            found["half_way"] = measured(own, "step", budget["step"] / 2)
            found["mean_over_steps"] = interval(
                [statistics.mean(point["accuracy"] for point in run["points"][1:]) for run in own]
            )
            for label in ("dropped_of_flipped", "dropped_of_unflipped"):
                shares = [statistics.mean(run[label]) for run in own if run[label]]
                found[label] = statistics.mean(shares) if shares else None
            by_method[name] = found
        summary[str(flip)] = by_method
    return summary


PAGE = """# Does TracIn selection help?

On the demo's task, with part of the *training* rewards flipped at random (0 ↔ 1), as a verifier that errs would;
validation rewards are true. Rewritten by

```
.venv/bin/python -m benchmarks.tracin_effect --write-docs
```

{seeds} seeds, {steps} training steps of 32 prompts × 8 responses, one warm start for all; {machine}.
*Accuracy* is the share of right responses, 512 prompts × 2 samples, on prompts that are neither trained on nor seen by
selection. Values are means over seeds, ± half the 95 % interval of the mean (Student's t). *Trained*: when as many
responses have been trained on as the thriftiest method trains on in all. *Generated*: when as many responses have been
sampled, validation rollouts counted, as the thriftiest method samples in all.

{tables}

{pictures}

## What selection drops
Of the responses that have a gradient: how many of the flipped ones and how many of the others were dropped, mean over
the run. Random dropping treats both alike.

{dropped}

## What it says
{verdict}

## Other settings
Tried on seeds 0 and 1 only, to find the defaults: two seeds tell large differences from none, not small ones.

{tried}
"""


def write_page(
    docs: Path,
    summary: dict[str, dict[str, Any]],
    runs: list[dict[str, Any]],
    tried: dict[str, dict[str, Any]],
    where: str,
    settings: str,
) -> None:
    tables, pictures = [], []
    for flip, by_method in summary.items():
        percent = f"{float(flip):.0%}".replace("%", " %")
        tables.append(f"### {percent} of the rewards flipped\n\n" + table(by_method))
        for axis, label in AXES.items():
            name = f"tracin_effect_{float(flip) * 100:.0f}_{label}.svg"
            (docs / "images").mkdir(parents=True, exist_ok=True)
            (docs / "images" / name).write_text(picture(runs, float(flip), axis), encoding="utf-8")
            pictures.append(f"![{percent} flipped, accuracy against {label}](images/{name})")
    seeds = max(found["steps"]["n"] for by_method in summary.values() for found in by_method.values())
    page = PAGE.format(
        seeds=seeds,
        steps=runs[0]["steps"],
        machine=where,
        tables="\n\n".join(tables),
        pictures="\n".join(pictures),
        dropped=dropped_table(summary),
        tried=tried_table(tried),
        verdict="\n".join(f"- {line}" for line in verdict(summary, settings)),
    )
    (docs / "tracin_effect.md").write_text(page, encoding="utf-8")


def table(by_method: dict[str, Any]) -> str:
    first = next(iter(by_method.values()))
    head = [
        "method",
        "seeds",
        f"step {first['half_way']['at']:.0f}",
        f"step {first['steps']['at']:.0f}",
        f"at {first['trained']['at']:,.0f} trained",
        f"at {first['generated']['at']:,.0f} generated",
    ]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, found in by_method.items():
        cells = [shown(found[key]) for key in ("half_way", "steps", "trained", "generated")]
        lines.append(f"| {LABELS.get(name, name)} | {found['steps']['n']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def shown(value: dict[str, float]) -> str:
    return f"{value['mean']:.3f} ± {value['half']:.3f}"


def dropped_table(summary: dict[str, dict[str, Any]]) -> str:
    lines = ["| flipped | method | dropped of the flipped | dropped of the others |", "|---|---|---|---|"]
    for flip, by_method in summary.items():
        for name, found in by_method.items():
            if found["dropped_of_unflipped"] is not None:
                flipped = found["dropped_of_flipped"]
                lines.append(
                    f"| {float(flip):.0%} | {LABELS.get(name, name)} | "
                    f"{'–' if flipped is None else f'{flipped:.0%}'} | {found['dropped_of_unflipped']:.0%} |"
                )
    return "\n".join(lines)


def tried_table(tried: dict[str, dict[str, Any]]) -> str:
    head = "| flipped | settings | accuracy at the last step | at equal generated responses |"
    lines = [head, "|---|---|---|---|"]
    for flip, by_method in tried.items():
        for name, found in by_method.items():
            cells = [f"{found[axis]['mean']:.3f}" for axis in ("steps", "generated")]
            label = LABELS.get(name) or TRIED[name]
            lines.append(f"| {float(flip):.0%} | {label} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def verdict(summary: dict[str, dict[str, Any]], settings: str) -> list[str]:
    """Said from the numbers, whichever way they come out. Differences are paired by seed."""
    lines = [
        f"Selection at its defaults: {settings}. Differences are means over seeds, paired by seed. "
        f"Seeds {' and '.join(map(str, TRIED_SEEDS))} also served to choose these settings; the others did not."
    ]
    for flip, by_method in summary.items():
        percent = f"{float(flip):.0%}".replace("%", " %")
        for other in ("vanilla", "random", "val_too"):
            if other not in by_method or "selection" not in by_method:
                continue
            parts = []
            for axis in ("steps", "generated"):
                gain = paired(by_method["selection"][axis], by_method[other][axis])
                sure = "" if abs(gain["mean"]) > gain["half"] else ", not told from zero"
                what = "steps" if axis == "steps" else "generated responses"
                parts.append(
                    f"{gain['mean'] * 100:+.1f} ± {gain['half'] * 100:.1f} points at equal {what}{sure}"
                )
            lines.append(f"{percent} flipped, against {LABELS[other]}: {'; '.join(parts)}.")
            if other == "vanilla":
                pair = (by_method[name]["steps"]["by_seed"] for name in ("selection", other))
                ours, theirs = ({s: a for s, a in found.items() if s not in TRIED_SEEDS} for found in pair)
                shared = sorted(set(ours) & set(theirs))
                if shared:
                    fresh = statistics.mean(ours[seed] - theirs[seed] for seed in shared)
                    lines[-1] += (
                        f" On seeds {', '.join(map(str, shared))} alone: {fresh * 100:+.1f} at equal steps."
                    )
    return lines


def paired(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, float]:
    """Interval of the mean difference over seeds."""
    shared = sorted(set(ours["by_seed"]) & set(theirs["by_seed"]))
    return interval([ours["by_seed"][seed] - theirs["by_seed"][seed] for seed in shared])


def picture(runs: list[dict[str, Any]], flip: float, axis: str) -> str:
    mine = [run for run in runs if run["flip"] == flip]
    curves = []
    for name in dict.fromkeys(run["method"] for run in mine):
        own = [run["points"] for run in mine if run["method"] == name]
        end = min(points[-1][axis] for points in own)
        xs = [end * k / 12 for k in range(13)]
        found = [interval([at(points, axis, x) for points in own]) for x in xs]
        curves.append(
            Curve(
                LABELS.get(name, name),
                xs,
                [f["mean"] for f in found],
                [f["mean"] - f["half"] for f in found],
                [f["mean"] + f["half"] for f in found],
            )
        )
    words = {"step": "training steps", "trained": "responses trained on", "generated": "responses generated"}
    return line_picture(
        curves,
        title=f"Held-out accuracy, {flip:.0%} of the training rewards flipped",
        x_label=words[axis],
        y_label=f"share right; band: 95 % interval over {len(own)} seeds",
    )
