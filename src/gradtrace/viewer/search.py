"""Find across the steps of a run: a text, a token, the most harmful tokens, those on which sampler and trainer
disagree most, and what became of prompts.

A run can be larger than memory, so an answer covers as many steps as fit into its time and says where to go on: the
page asks again until it has enough. No step stays in memory.
"""

from __future__ import annotations

import bisect
import hashlib
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradtrace.trace.reader import StepUnreadableError
from gradtrace.viewer.catalog import ServedRun
from gradtrace.viewer.counterfactual import answer_of
from gradtrace.viewer.scores import ScoredStep, load_step, page_kinds
from gradtrace.viewer.vocabulary import Vocabulary

SECONDS = 0.5
"""An answer ends after the step at which this time is over."""
MOST_A_STEP = 25
"""Hits of one step; `more` counts the others."""
AROUND = 40
"""Characters before and after a hit."""
PREVIEW = 160
AGREE = 1e-3
"""Nats: sampler and trainer agree on a token whose log-probs differ by less."""
MOST_ANSWERS = 4

Hit = dict[str, Any]


@dataclass(frozen=True)
class Query:
    what: str
    text: str = ""
    prompt: str = ""
    """The key of the prompt to follow."""


def search(served: ServedRun, query: Query, start: int, seconds: float = SECONDS) -> dict[str, Any]:
    """Hits in the steps from `start` on. `next`: the step to go on with, None once all were looked at."""
    steps = sorted({step for kind in page_kinds() for step in served.entries(kind)})
    answer: dict[str, Any] = {"hits": [], "more": 0, "unreadable": [], "steps": len(steps), "searched": 0, "next": None}
    look, ends = LOOKS[query.what], time.monotonic() + seconds
    for step in (step for step in steps if step >= start):
        if time.monotonic() >= ends and answer["searched"]:
            answer["next"] = step
            break
        answer["searched"] += 1
        try:
            table = load_step(served.run, step)
        except StepUnreadableError:
            answer["unreadable"].append(step)
            continue
        if table is not None:
            hits, more = look(table, query, served.vocabulary)
            answer["hits"] += [{"step": step, **hit} for hit in hits]
            answer["more"] += more
    answer["searched"] += sum(step < start for step in steps)
    return answer


def prompt_key(table: ScoredStep, g: int) -> str:
    """The same for the same prompt in every step."""
    ids = np.ascontiguousarray(table.prompt(g), dtype="<i8")
    return hashlib.blake2b(ids.tobytes(), digest_size=8).hexdigest()


def _texts(table: ScoredStep, query: Query, vocabulary: Vocabulary) -> tuple[list[Hit], int]:
    """The first place in each prompt and each response where the text stands, whatever its case."""
    wanted, found = re.compile(re.escape(query.text), re.IGNORECASE), []
    for g in range(table.n_groups):
        text = vocabulary.text(table.prompt(g).tolist())
        if hit := wanted.search(text):
            found.append({"group": g, "response": None, **_around(hit)})
    for g, index, r in table.everyone():
        ids = table.ids(r).tolist()
        if hit := wanted.search(vocabulary.text(ids)):
            position = _token_at(vocabulary, ids, hit.start())
            found.append({**_place(table, g, index, r, position), **_around(hit)})
    return found[:MOST_A_STEP], max(0, len(found) - MOST_A_STEP)


def _around(hit: re.Match[str]) -> dict[str, str]:
    (start, end), text = hit.span(), hit.string
    return {"before": text[max(0, start - AROUND) : start], "match": hit[0], "after": text[end : end + AROUND]}


def _token_at(vocabulary: Vocabulary, ids: list[int], at: int) -> int:
    """The token that holds the character: the first whose text, with all before it, reaches beyond it."""
    reaches = range(len(ids) - 1)
    return bisect.bisect_right(reaches, at, key=lambda place: len(vocabulary.text(ids[: place + 1])))


def _place(table: ScoredStep, g: int, index: int, r: int, position: int) -> Hit:
    return {"group": g, "response": index, "position": position, "accepted": bool(table.accepted[r])}


def _score_hits(table: ScoredStep, rows: np.ndarray, vocabulary: Vocabulary) -> list[Hit]:
    """Tokens by their place in the step, with the score that all scored groups of the step have."""
    hits = _token_hits(table, rows, vocabulary, table.main_scores)
    return [{**hit, "by": table.score} for hit in hits]


def _token_hits(table: ScoredStep, rows: np.ndarray, vocabulary: Vocabulary, scores: np.ndarray | None) -> list[Hit]:
    """Tokens by their place in the step, with their text, what stands around it, and their number in `scores`."""
    index_of = {r: (g, index) for g, index, r in table.everyone()}
    hits = []
    for row in rows.tolist():
        r = int(np.searchsorted(table.offsets, row, side="right")) - 1
        g, index = index_of[r]
        position = row - int(table.offsets[r])
        ids = table.ids(r).tolist()
        score = float(scores[row]) if scores is not None else float("nan")
        words = {
            "before": vocabulary.text(ids[max(0, position - 12) : position])[-AROUND:],
            "match": vocabulary.text([ids[position]]),
            "after": vocabulary.text(ids[position + 1 : position + 13])[:AROUND],
        }
        hits.append({**_place(table, g, index, r, position), **words, "score": score})
    return hits


def _tokens(table: ScoredStep, query: Query, vocabulary: Vocabulary) -> tuple[list[Hit], int]:
    """Every token with this text, or #id; those with the largest score first."""
    ids = table.token_id
    if query.text.startswith("#") and query.text[1:].isdigit():
        rows = np.flatnonzero(ids == int(query.text[1:]))
    else:
        same = [int(i) for i in np.unique(ids) if vocabulary.text([int(i)]).strip() == query.text.strip()]
        rows = np.flatnonzero(np.isin(ids, same))
    scores = table.main_scores
    if scores is not None:
        rows = rows[np.argsort(-np.abs(np.nan_to_num(scores[rows])), kind="stable")]
    return _score_hits(table, rows[:MOST_A_STEP], vocabulary), max(0, len(rows) - MOST_A_STEP)


def _harmful(table: ScoredStep, query: Query, vocabulary: Vocabulary) -> tuple[list[Hit], int]:
    """The tokens on which training's step hurts the accepted answers most: the lowest scores."""
    scores = table.main_scores
    if scores is None:
        return [], 0
    negative = np.flatnonzero(scores < 0)
    rows = negative[np.argsort(scores[negative], kind="stable")][:MOST_A_STEP]
    return _score_hits(table, rows, vocabulary), len(negative) - len(rows)


def _mismatched(table: ScoredStep, query: Query, vocabulary: Vocabulary) -> tuple[list[Hit], int]:
    """The tokens whose log-probs under sampler and trainer lie furthest apart."""
    gaps = table.column("mismatch")
    if gaps is None:
        return [], 0
    apart = np.flatnonzero(np.abs(np.nan_to_num(gaps)) >= AGREE)
    rows = apart[np.argsort(-np.abs(gaps[apart]), kind="stable")][:MOST_A_STEP]
    return _token_hits(table, rows, vocabulary, gaps), len(apart) - len(rows)


def _prompt_row(table: ScoredStep, g: int) -> Hit:
    members = table.members(g)
    return {
        "group": g, "key": prompt_key(table, g), "passed": len(table.passed(g)), "responses": len(members),
        "reward": float(np.mean(table.rewards(g))), "length": float(table.lengths[members].mean()),
    }  # fmt: skip


def _prompts(table: ScoredStep, query: Query, vocabulary: Vocabulary) -> tuple[list[Hit], int]:
    """Every prompt with how many of its answers passed; the page puts the steps together."""
    rows = [_prompt_row(table, g) for g in range(table.n_groups) if len(table.members(g))]
    for row in rows:
        row["prompt"] = vocabulary.words(table.prompt(row["group"]).tolist())[:PREVIEW]
    return rows, 0


def _one_prompt(table: ScoredStep, query: Query, vocabulary: Vocabulary) -> tuple[list[Hit], int]:
    """The groups of one prompt, with the answers that were given and how often. The same answer counts twice where
    some who gave it passed and others did not: a reward can ask for more than the answer."""
    rows = []
    for g in range(table.n_groups):
        if not len(table.members(g)) or prompt_key(table, g) != query.prompt:
            continue
        passed = set(table.passed(g))
        given = Counter(
            (answer_of(vocabulary.words(table.ids(r).tolist())), r in passed) for r in table.members(g).tolist()
        ).most_common()
        answers = [{"text": text, "times": times, "accepted": yes} for (text, yes), times in given[:MOST_ANSWERS]]
        rows.append({**_prompt_row(table, g), "answers": answers, "others": len(given[MOST_ANSWERS:])})
    return rows, 0


LOOKS: dict[str, Callable[[ScoredStep, Query, Vocabulary], tuple[list[Hit], int]]] = {
    "text": _texts,
    "token": _tokens,
    "harm": _harmful,
    "mismatch": _mismatched,
    "prompts": _prompts,
    "prompt": _one_prompt,
}
