"""The page and the picture of `benchmarks/first_wrong_token.py`."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

BAR_HEIGHT, LABEL_WIDTH, BAR_WIDTH = 22, 410, 260
COLOURS = {"influence": "#2f78c4", "entropy": "#2b8a7a", "−log-prob": "#2b8a7a", "random": "#8a9099"}

TEXT = """# Does influence find the first wrong token?

On the demo's task the one correct response follows from the prompt, so the first wrong token of every rejected
response is known by rule. This page ranks the tokens of each rejected response by several scores and asks where that
token comes out. It is rewritten by

```
.venv/bin/python -m benchmarks.first_wrong_token --write-docs
```

{responses} rejected responses, {single} of them with a single local error; seeds {seeds}, training steps {steps},
scored at the weights that sampled them; {machine}. *Percentile* is the share of the other tokens that rank below it
(0.5 is chance), *hit@k* the share of responses in which it is among the first k. ± is the standard deviation
over seeds. All influence scores are exact (no projection), contrast `mean`. With the objective `log_prob` a
score says what making
the token likelier does, and the most negative ranks first; with `training_loss` it says what the training step
on the token does, which in a rejected response makes it less likely, and the most positive ranks first. Entropy and
−log-prob rank from the largest.

![hit@1 by score](images/first_wrong_token.svg)

| score | percentile | hit@1 | hit@3 | hit@1, single error |
|---|---|---|---|---|
{rows}

## How to read it
{verdict}

Where influence differs from surprisal: surprisal says where the policy was *unsure*, whether or not that token mattered
for the reward; influence says what a token's gradient does to the accepted answers against the rejected ones. On
this task the two nearly coincide, because the only uncertain tokens are the results of the steps. It is one small
model on one synthetic task: it shows that the scores carry the right sign and find real errors, not that they
beat cheaper signals elsewhere.
"""


def write_page(docs: Path, detail: dict[str, Any]) -> None:
    scores = detail["scores"]
    rows = []
    for name, found in scores.items():
        every, single = found["all"], found["single_error"]
        cells = [f"{every[key]:.2f} ± {every[key + '_sd']:.2f}" for key in ("percentile", "hit1", "hit3")]
        rows.append(f"| {name} | {' | '.join(cells)} | {single['hit1']:.2f} ± {single['hit1_sd']:.2f} |")
    page = TEXT.format(
        responses=f"{detail['responses']:,}",
        single=f"{detail['single_error_responses']:,}",
        seeds=", ".join(map(str, detail["seeds"])),
        steps=", ".join(map(str, detail["steps"])),
        machine=detail["machine"],
        rows="\n".join(rows),
        verdict=verdict(scores),
    )
    (docs / "images").mkdir(parents=True, exist_ok=True)
    (docs / "first_wrong_token.md").write_text(page)
    (docs / "images" / "first_wrong_token.svg").write_text(picture(scores))


def verdict(scores: dict[str, Any]) -> str:
    """Said from the numbers, whichever way they come out."""

    def best(prefixes: tuple[str, ...], key: str) -> tuple[str, float]:
        names = [name for name in scores if name.startswith(prefixes)]
        name = max(names, key=lambda n: scores[n]["all"][key])
        return name, scores[name]["all"][key]

    lines = []
    for key, label in (("hit1", "hit@1"), ("percentile", "mean percentile")):
        ours, our_value = best(("influence",), key)
        theirs, their_value = best(("entropy", "−log-prob"), key)
        better = "better than" if our_value > their_value else "worse than"
        lines.append(
            f"- By {label}, the best influence score ({ours}, {our_value:.2f}) is {better} the best baseline ({theirs},"
            f" {their_value:.2f}); chance is {scores['random']['all'][key]:.2f}."
        )
    return "\n".join(lines)


def picture(scores: dict[str, Any]) -> str:
    """Bars of hit@1, as an SVG that follows the reader's light or dark theme."""
    width, height = LABEL_WIDTH + BAR_WIDTH + 70, BAR_HEIGHT * len(scores) + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img"'
        ' aria-label="hit@1 of each score" font-family="system-ui, sans-serif" font-size="12">',
        "<style>text{fill:#16181d}.axis{stroke:#c9c9c3}"
        "@media(prefers-color-scheme:dark){text{fill:#e9eaec}.axis{stroke:#444a52}}</style>",
    ]
    for index, (name, found) in enumerate(scores.items()):
        value, spread = found["all"]["hit1"], found["all"]["hit1_sd"]
        y = index * BAR_HEIGHT + 4
        colour = COLOURS[next(prefix for prefix in COLOURS if name.startswith(prefix))]
        end = LABEL_WIDTH + value * BAR_WIDTH
        parts += [
            f'<text x="{LABEL_WIDTH - 8}" y="{y + 13}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="{LABEL_WIDTH}" y="{y}" width="{value * BAR_WIDTH:.1f}" height="{BAR_HEIGHT - 6}"'
            f' fill="{colour}"/>',
            f'<line x1="{end - spread * BAR_WIDTH:.1f}" x2="{end + spread * BAR_WIDTH:.1f}" y1="{y + 8}" y2="{y + 8}"'
            ' class="axis" stroke-width="2"/>',
            f'<text x="{end + spread * BAR_WIDTH + 6:.1f}" y="{y + 13}">{value:.2f}</text>',
        ]
    bottom = len(scores) * BAR_HEIGHT + 20
    for tick in (0.0, 0.5, 1.0):
        x = LABEL_WIDTH + tick * BAR_WIDTH
        parts.append(f'<text x="{x}" y="{bottom}" text-anchor="middle">{tick:g}</text>')
    return "\n".join([*parts, "</svg>", ""])
