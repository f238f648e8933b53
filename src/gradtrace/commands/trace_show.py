"""`gradtrace trace show`: one group in the terminal, its tokens coloured by their scores.

Where there is no colour (a file, a pipe) a token has a line of its own. Long answers are read in sentences, lines and
turns, so numbers are shown for these as well.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from gradtrace.instruments.influence.books import Nats, books_story, remarks, updates_of
from gradtrace.trace.columns import COLUMNS, INFLUENCE_SCORES, GroupStatus
from gradtrace.trace.step import Response
from gradtrace.trace.table import StepTable
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


def score_columns(table: StepTable) -> list[str]:
    """Token columns that can colour a text, the most telling first: influence, those with a sign, others, derived."""
    numbers = [column for column in COLUMNS.values() if column.level == "token" and column.dtype == "float32"]
    scores = [column for column in numbers if table.column(column.name) is not None]
    scores.sort(key=lambda column: (column.name not in INFLUENCE_SCORES, bool(column.derived), not column.is_signed))
    return [column.name for column in scores]


def first_scored(table: StepTable, columns: Iterable[str]) -> int:
    """The first group with a token that has all of these numbers; without one, that has the last; without one, the
    first with a response."""
    owner = np.repeat(table.group, table.lengths)
    known = [np.isfinite(table.need(name)) for name in columns]
    candidates = [owner[np.all(known, axis=0)], owner[known[-1]]] if known else []
    return int(next((groups.min() for groups in (*candidates, table.group) if len(groups)), 0))


def show_group(
    console: Console,
    table: StepTable,
    g: int,
    column: str | None,
    token_bytes: TokenBytes | None,
    colour: bool,
    unit: str = "token",
) -> None:
    """`column`: None where tokens have no scores, as in a TracIn trace; then a response's line has its own. `unit`:
    token, sentence, line or turn, that a number is shown for."""
    statuses, members = table.column("group_status"), table.members(g).tolist()
    status = "" if statuses is None or statuses[g] < 0 else f" · {GroupStatus(statuses[g]).name.lower()}"
    console.print(Text(f"step {table.step} · group {g} (id {table.need('group_id')[g]}){status}", style="bold"))
    console.print(Text("prompt    ") + Text("".join(pieces(table.prompt(g), token_bytes)), style="dim"))
    if len(expected := table.expected(g)):
        console.print(Text(f"expected  {''.join(pieces(expected, token_bytes, continues=True))}"))
    if not members:
        console.print("no response of this group was stored", style="dim")
        return
    for sentence in _about(table, g, token_bytes):
        console.print(Text(sentence))
    if column is not None:
        console.print(Text(f"{column}: {COLUMNS[column].meaning}", style="dim"))
    totals = _totals(table, members, column)
    shown_tokens = {r: _by_unit(table, r, column, token_bytes, unit) for r in members}
    scale = _scale([tokens for _, tokens in shown_tokens.values()], column) if column else 1.0
    for r, (shown, tokens) in shown_tokens.items():
        console.print(Text(_headline(table, r) + totals.get(r, ""), style="bold"), soft_wrap=True)
        if column is None:
            console.print(Text("".join(shown)))
        elif colour:
            console.print(_coloured(shown, tokens, column, scale))
        else:
            _print_lines(console, shown, tokens, column, scale)


def _about(table: StepTable, g: int, token_bytes: TokenBytes | None) -> list[str]:
    """What the optimizer step did to a group, and what a reader of its scores must know."""
    told = books_story(table, g, lambda r: f"response {r}", lambda i: repr("".join(pieces(np.array([i]), token_bytes))))
    return [] if told is None else [told.sentence, *remarks(updates_of(table, g))]


def _is_change(column: str) -> bool:
    """Whether it holds small changes in nats, which are written in the unit that fits them."""
    return COLUMNS[column].unit == "nats" and COLUMNS[column].adds_up


def _totals(table: StepTable, responses: list[int], column: str | None) -> dict[int, str]:
    """What each response adds up to, in the same unit; nothing for columns that do not add up."""
    if column is None or not _is_change(column):
        return {}
    parts = {r: table.need(column)[table.tokens(r)] for r in responses}
    sums = {r: float(np.nansum(values)) for r, values in parts.items() if np.isfinite(values).any()}
    nats = Nats(sums.values())
    return {r: f" · Σ {nats.signed(total)} {nats.unit}" for r, total in sums.items()}


def _headline(table: StepTable, r: int) -> str:
    columns = [COLUMNS[name] for name in table.columns if COLUMNS[name].level == "response" and table.has(name, r)]
    values = {column.name: table.value(column.name, r) for column in columns if not column.is_offsets}
    parts = [f"response {r}", f"reward {values['reward']:g}"]
    if "accepted" in values:
        parts.append("accepted" if values["accepted"] else "rejected")
    shown = {"advantage": "advantage {:+.3f}", "prompt_influence": "prompt {:+.3g}"}
    parts += [text.format(values[name]) for name, text in shown.items() if name in values]
    if values.get("first_wrong", -1) >= 0:
        parts.append(f"first wrong token {values['first_wrong']}")
    for name, value in values.items():
        named = COLUMNS[name].values
        if name not in Response.__dataclass_fields__:  # of one instrument alone, such as a TracIn score
            parts.append(f"{name} {_short(named(value) if named else value)}")
    return " · ".join(parts)


def _short(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return value.name.lower().replace("_", " ")
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _by_unit(
    table: StepTable, r: int, column: str | None, token_bytes: TokenBytes | None, unit: str
) -> tuple[list[str], dict[str, np.ndarray]]:
    """The pieces of a response and their numbers: its tokens, or its sentences, lines or turns with sums or means."""
    names = [name for name in ("captured", "entropy", "log_prob") if table.has(name, r)]
    names += [] if column is None else [column]
    tokens = {name: table.need(name)[table.tokens(r)] for name in names}
    shown = pieces(table.ids(r), token_bytes, continues=True)
    if unit == "token" or column is None or token_bytes is None:
        return shown, tokens
    if unit == "turn":
        segments = table.first.segments(int(table.place[r]))  # what the policy wrote in a turn, or was told
        starts = [part.start for part in segments]
        units = np.searchsorted(starts, np.arange(len(shown)), side="right") - 1
    else:
        texts = [token.text for token in token_bytes.texts(table.ids(r), continues=True)]
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
    for i, piece in enumerate(shown):
        value = float(tokens[column][i])
        if not np.isfinite(value):
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
