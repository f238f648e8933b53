"""`gradtrace trace show`: one group in the terminal, its tokens coloured by their scores.

Where there is no colour (a file, a pipe) a token has a line of its own. Long answers are read in sentences, lines and
turns, so numbers are shown for these as well.
"""

from __future__ import annotations

import enum
import re
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from gradtrace.instruments.influence.books import Nats, books_story, remarks, updates_of
from gradtrace.trace.columns import COLUMNS, INFLUENCE_SCORES
from gradtrace.trace.step import Response, Step
from gradtrace.trace.token_text import TokenBytes, pieces

UNITS = ("token", "sentence", "line", "turn")
_ENDS = {
    "sentence": re.compile(r"""[.!?…。！？]+["'”’)\]]*(?=\s|$)|\n+"""),
    "line": re.compile(r"\n+"),
}


def units_of(texts: list[str], by: str) -> np.ndarray:
    """int[T]: the number of the sentence or line that each token is in. A sentence ends with its mark, before a space
    (as in viewer/static/js/group/units.js); a line with its break."""
    if by == "token":
        return np.arange(len(texts))
    ends = [match.end() for match in _ENDS[by].finditer("".join(texts))]
    starts = np.cumsum([0, *map(len, texts)])[:-1]
    return np.searchsorted(ends, starts, side="right")


def aggregate(column: str, values: np.ndarray, units: np.ndarray) -> np.ndarray:
    """float64[units]: sum or mean of each unit's finite values; NaN where it has none."""
    size = int(units.max()) + 1 if len(units) else 0
    known = np.isfinite(values)
    count = np.bincount(units[known], minlength=size)
    total = np.bincount(units[known], weights=values[known], minlength=size)
    return np.where(count > 0, total / (1 if COLUMNS[column].adds_up else np.maximum(count, 1)), np.nan)


def score_columns(step: Step) -> list[str]:
    """Token columns that can colour a text, the most telling first: those with a sign, then the others."""
    columns = [column for name, column in COLUMNS.items() if name in step]
    scores = [column for column in columns if column.level == "token" and column.dtype == "float32"]
    return [column.name for column in sorted(scores, key=lambda column: not column.is_signed)]


def best_column(step: Step) -> str:
    """The most telling column: influence where there is any."""
    return next((name for name in INFLUENCE_SCORES if name in step), score_columns(step)[0])


def show_group(
    console: Console,
    step: Step,
    group_index: int,
    column: str | None,
    token_bytes: TokenBytes | None,
    colour: bool,
    unit: str = "token",
) -> None:
    """`column`: None where tokens have no scores, as in a TracIn trace; then a response's line has its own. `unit`:
    token, sentence, line or turn, that a number is shown for."""
    group = step.group(group_index)
    status = f" · {group.status.name.lower()}" if group.status is not None else ""
    console.print(Text(f"step {step.step} · group {group_index} (id {group.group_id}){status}", style="bold"))
    console.print(Text("prompt    ") + Text("".join(pieces(group.prompt_ids, token_bytes)), style="dim"))
    if group.expected_ids is not None and len(group.expected_ids):
        expected = "".join(pieces(group.expected_ids, token_bytes, continues=True))
        console.print(Text(f"expected  {expected}"))
    if not group.responses:
        console.print("no response of this group is in the file", style="dim")
        return
    for sentence in _about(step, group_index, token_bytes):
        console.print(Text(sentence))
    if column is not None:
        console.print(Text(f"{column}: {COLUMNS[column].meaning}", style="dim"))
    totals = _totals(step, group.responses, column)
    shown_tokens = {r: _by_unit(step, r, column, token_bytes, unit) for r in group.responses}
    scale = _scale([tokens for _, tokens in shown_tokens.values()], column) if column else 1.0
    for r, (shown, tokens) in shown_tokens.items():
        console.print(Text(_headline(step.response(r)) + totals.get(r, ""), style="bold"), soft_wrap=True)
        if column is None:
            console.print(Text("".join(shown)))
        elif colour:
            console.print(_coloured(shown, tokens, column, scale))
        else:
            _print_lines(console, shown, tokens, column, scale)


def _about(step: Step, g: int, token_bytes: TokenBytes | None) -> list[str]:
    """What the optimizer step did to a group, and what a reader of its scores must know."""
    if "influence" not in step:
        return []
    told = books_story(step, g, lambda r: f"response {r}", lambda i: repr("".join(pieces(np.array([i]), token_bytes))))
    return [*([] if told is None else [told.sentence]), *remarks(updates_of(step, g))]


def _is_change(column: str) -> bool:
    """Whether it holds small changes in nats, which are written in the unit that fits them."""
    return COLUMNS[column].unit == "nats" and COLUMNS[column].adds_up


def _totals(step: Step, responses: list[int], column: str | None) -> dict[int, str]:
    """What each response adds up to, in the same unit; nothing for columns that do not add up."""
    if column is None or not _is_change(column):
        return {}
    sums = {r: float(np.nansum(v)) for r in responses if np.isfinite(v := step.ragged(column, r)).any()}
    nats = Nats(sums.values())
    return {r: f" · Σ {nats.signed(total)} {nats.unit}" for r, total in sums.items()}


def _headline(response: Response) -> str:
    parts = [f"response {response.index}", f"reward {response.reward:g}"]
    if response.accepted is not None:
        parts.append("accepted" if response.accepted else "rejected")
    if response.advantage is not None:
        parts.append(f"advantage {response.advantage:+.3f}")
    if response.prompt_influence is not None:
        parts.append(f"prompt {response.prompt_influence:+.3g}")
    if response.first_wrong is not None and response.first_wrong >= 0:
        parts.append(f"first wrong token {response.first_wrong}")
    for name, value in response.more.items():
        parts.append(f"{name} {_short(value)}")
    return " · ".join(parts)


def _short(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return value.name.lower().replace("_", " ")
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _by_unit(
    step: Step, r: int, column: str | None, token_bytes: TokenBytes | None, unit: str
) -> tuple[list[str], dict[str, np.ndarray]]:
    """The pieces of a response and their numbers: its tokens, or its sentences, lines or turns with sums or means."""
    tokens = step.tokens(r)
    shown = pieces(tokens["token_id"], token_bytes, continues=True)
    if unit == "token" or column is None or token_bytes is None:
        return shown, tokens
    if unit == "turn":
        starts = [part.start for part in step.segments(r)]  # of what the policy wrote in a turn, or was told
        units = np.searchsorted(starts, np.arange(len(shown)), side="right") - 1
    else:
        texts = [token.text for token in token_bytes.texts(tokens["token_id"], continues=True)]
        units = units_of(texts, unit)
    names = [name for name in (column, "entropy", "log_prob") if name in tokens]
    joined = ["".join(np.array(shown, object)[units == each]) for each in range(int(units.max(initial=-1)) + 1)]
    return joined, {name: aggregate(name, tokens[name], units) for name in names}


def _scale(responses: list[dict[str, np.ndarray]], column: str) -> float:
    """The largest finite score of the group, so that its responses can be compared by eye."""
    values = np.abs(np.concatenate([tokens[column] for tokens in responses]))
    values = values[np.isfinite(values)]
    return float(values.max()) if values.size and values.max() > 0 else 1.0


def _coloured(shown: list[str], tokens: dict[str, Any], column: str, scale: float) -> Text:
    line = Text()
    captured = tokens.get("captured")
    for i, piece in enumerate(shown):
        value = float(tokens[column][i])
        if (captured is not None and not captured[i]) or not np.isfinite(value):
            line.append(piece, style="dim strike")
            continue
        background = _background(value / scale, signed=COLUMNS[column].is_signed)
        line.append(piece, style=f"black on {background}")
    return line


def _background(value: float, signed: bool) -> str:
    """Blue for positive, orange for negative, teal for a quantity without sign, as in the viewer; paler where small."""
    strength = min(1.0, abs(value))
    pale = int(245 - 150 * strength)
    if not signed:
        return f"rgb({pale},{int(250 - 50 * strength)},{int(240 - 70 * strength)})"
    middle = int(245 - 75 * strength)
    return f"rgb({pale},{middle},250)" if value >= 0 else f"rgb(255,{middle},{pale})"


def _print_lines(console: Console, shown: list[str], tokens: dict[str, Any], column: str, scale: float) -> None:
    """A line per piece; `scale`: the largest score of the group."""
    names = [column] + [name for name in ("entropy", "log_prob") if name in tokens and name != column]
    captured = tokens.get("captured")
    heads = {name: (COLUMNS[name].heading or name)[-12:] for name in names}
    nats = Nats([scale]) if _is_change(column) else None
    if nats is not None:
        heads[column] = f"{COLUMNS[column].heading or column}, {nats.unit}"
    widths = {name: max(12, len(head)) for name, head in heads.items()}
    headings = "  ".join(f"{head:>{widths[name]}}" for name, head in heads.items())
    console.print(Text(f"  {'':4}  {headings}  token", style="dim"), soft_wrap=True)
    for i, piece in enumerate(shown):
        texts = {name: f"{tokens[name][i]:+.5g}" for name in names}
        if nats is not None:
            texts[column] = nats.signed(tokens[column][i]) if np.isfinite(tokens[column][i]) else "–"
        values = "  ".join(f"{text:>{widths[name]}}" for name, text in texts.items())
        mark = "" if captured is None or captured[i] else "  (not captured)"
        console.print(Text(f"  {i:4d}  {values}  {piece!r}{mark}"), soft_wrap=True)
