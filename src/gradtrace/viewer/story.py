"""What a group, a step and a run say, in a sentence each, from the numbers that the files hold and no others.

The influence of a token is what training on it did for the objective, in nats. In a rejected response training lowers
the probability of its tokens: that a wrong token has a positive score therefore means that lowering it helped. Scores
from captured factors are estimates per unit of step; sentences about them name the credit that they are by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from gradtrace.instruments.counterfactual.columns import MeasuredGroup
from gradtrace.instruments.counterfactual.measure import Counterfactual, results
from gradtrace.instruments.influence.books import Nats, books_story
from gradtrace.viewer.scores import ScoredStep
from gradtrace.viewer.vocabulary import Vocabulary

CREDIT_WORDS = {"loss_term": "loss-term credit", "position": "position credit"}
INFLUENCE = "influence"
SURE = 2.0
"""Standard errors from zero that a difference needs before a sentence speaks of it."""
LEAST_VALUE = 0.05
"""A token that changes the expected reward by less than this is not called the place where a response fails."""
LONGEST_TOKEN = 24


@dataclass(frozen=True)
class KeyToken:
    """The token that a group's sentence is about."""

    response: int
    """Its index in the group: r0, r1 …"""
    position: int
    why: str
    """value: it lowers the expected reward most; wrong: the first wrong one; score: the largest score."""


@dataclass(frozen=True)
class Story:
    sentence: str
    at: KeyToken | None = None
    """The token that it is about."""

    def as_json(self) -> dict[str, Any]:
        at = None if self.at is None else [self.at.response, self.at.position]
        return {"sentence": self.sentence, "at": at}


def group_story(table: ScoredStep, g: int, vocabulary: Vocabulary, measured: MeasuredGroup | None = None) -> Story:
    """`measured`: its counterfactual values, where there are any."""
    members = table.members(g).tolist()
    if not members:
        return Story("The responses of this group were not stored, so there is nothing to tell.")
    rewards, accepted = table.rewards(g), table.accepted[members].tolist()
    if len(set(rewards)) == 1:
        return Story(_constant(table, members, rewards[0]))
    if all(accepted) or not any(accepted):
        which = "All" if all(accepted) else "None"
        return Story(f"{which} of the {len(members)} answers were accepted, so nothing here tells right from wrong.")
    values = results(measured.measurement) if measured is not None else None
    key = _key_token(table, g, accepted, values)
    if key is None:
        count = f"{sum(accepted)} of {len(members)} answers were accepted"
        return Story(f"{count}; nothing was stored that says which token decided.")
    parts = [_head(table, g, key, accepted, vocabulary)]
    if effect := _effect(table, g, key, accepted):
        parts.append(effect)
    if values is not None and (change := _value_change(values[key.response], key.position)):
        parts.append(change)
    return Story(f"{parts[0]}{': ' if parts[1:] else ''}{'; '.join(parts[1:])}.", key)


def _constant(table: ScoredStep, members: list[int], reward: float) -> str:
    if len(members) == 1:
        return f"One answer alone, with reward {reward:g}: there is nothing to compare it with."
    same = len(members) + 1 - len({tuple(table.ids(r).tolist()) for r in members})
    text = f"All {len(members)} answers got reward {reward:g}, so nothing here tells a better one from a worse one"
    if same == len(members):
        return f"{text}; they are the same text."
    return f"{text}."


def _key_token(
    table: ScoredStep, g: int, accepted: Sequence[bool], values: list[Counterfactual] | None
) -> KeyToken | None:
    rejected = [index for index, each in enumerate(accepted) if not each]
    lost = []
    for index, own in enumerate(values or []):
        least = np.maximum(SURE * np.nan_to_num(own.stderr), LEAST_VALUE)
        places = [] if accepted[index] else np.flatnonzero(own.delta_v < -least).tolist()
        lost += [(float(own.delta_v[t]), index, t) for t in places]
    if lost:
        return KeyToken(*min(lost)[1:], "value")
    score = next(iter(table.group_scores(g)), None)
    scores = np.zeros(table.n_tokens) if score is None else np.nan_to_num(np.abs(table.need(score)))
    sizes = [scores[table.tokens(r)] for r in table.members(g)]
    wrong = []
    for index in rejected:
        first = table.value("first_wrong", int(table.members(g)[index]))
        if first is not None and 0 <= first < len(sizes[index]):
            wrong.append((-float(sizes[index][first]), index, int(first)))
    if wrong:
        return KeyToken(*min(wrong)[1:], "wrong")
    largest = [(-float(own.max()), index, int(own.argmax())) for index, own in enumerate(sizes) if own.any()]
    return KeyToken(*min(largest)[1:], "score") if largest else None


def _head(table: ScoredStep, g: int, at: KeyToken, accepted: Sequence[bool], vocabulary: Vocabulary) -> str:
    members = table.members(g).tolist()
    ids = table.ids(members[at.response])
    same = sum(np.array_equal(ids, table.ids(r)) for r in members) - 1
    who = f"r{at.response}" + (f" (×{same + 1})" if same else "")
    token = quoted(vocabulary, int(ids[at.position]))
    if at.why == "score":
        side = "accepted" if accepted[at.response] else "rejected"
        return f"Token {at.position} of {who} ({side}), {token}, has the largest score here"
    is_first_wrong = table.value("first_wrong", members[at.response]) == at.position
    if not is_first_wrong:
        return f"{who} loses most at token {at.position}, {token}"
    right = table.expected(g).tolist()
    instead = f", where {quoted(vocabulary, right[at.position])} is right" if at.position < len(right) else ""
    return f"{who} goes wrong at token {at.position}, {token}{instead}"


def _effect(table: ScoredStep, g: int, at: KeyToken, accepted: Sequence[bool]) -> str:
    """What training's step on the token does, by its stored score; empty where it has none."""
    name, r = next(iter(table.group_scores(g)), None), int(table.members(g)[at.response])
    if name is None:
        return "no influence was stored for it"
    values, clipped = table.need(name), table.column("no_step")
    if clipped is not None and clipped[table.tokens(r)][at.position]:
        return "training takes no step on it, because it was clipped"
    score = float(values[table.tokens(r)][at.position])
    if not np.isfinite(score):
        return "its influence was not captured"
    if name == INFLUENCE:
        return _change(table, g, r, score)
    does = "hurts" if score < 0 else "helps"
    text = f"{_step_words(table, r)} {does} the accepted answers against the rejected ones"
    credit, by = name.removeprefix("influence_"), str(table.meta.get("pairwise_credit"))
    counted, named = _counted(table, g, at, accepted), CREDIT_WORDS[credit]
    if counted and by != credit:
        named = f"{named}, single answers by {CREDIT_WORDS.get(by, by)}"
    return f"{text}{counted} ({named})"


def _change(table: ScoredStep, g: int, r: int, score: float) -> str:
    """An influence in nats, in words. With an empty Adam state it says what the step did to the token."""
    nats = Nats([score])
    does = "raised" if score >= 0 else "lowered"
    amount = f"by {nats.plain(abs(score))} {nats.unit}"
    if score == 0 or table.remarks(g):
        return f"the step {does} its own term of the objective {amount}" if score else "the step did not change it"
    return f"{_step_words(table, r)} {does} the objective {amount}"


def _step_words(table: ScoredStep, r: int) -> str:
    """The step that the score is about, as the beginning of a clause."""
    function, advantage = table.meta.get("output_function"), table.value("advantage", r)
    if function == "log_prob":
        return "making it likelier"
    if function in (None, "training_loss", "log_prob_advantage") and advantage:
        return f"training {'lowers' if advantage < 0 else 'raises'} it, which"
    return "a step along its gradient"


def _counted(table: ScoredStep, g: int, at: KeyToken, accepted: Sequence[bool]) -> str:
    """How many accepted answers the step makes likelier, where effects on single answers to log-probs are stored."""
    if table.meta.get("target") != "log_prob":
        return ""
    members = table.members(g).tolist()
    block = table.pairwise(members[at.response])
    own = {r for r, yes in zip(members, accepted, strict=True) if yes}
    if block is None:
        return ""
    effects = [block.scores[at.position, column] for column, s in enumerate(block.members.tolist()) if s in own]
    raised = sum(bool(effect > 0) for effect in effects)
    if not effects:
        return ""
    if len(effects) == 1:
        return f" and makes the accepted one {'likelier' if raised else 'less likely'}"
    if raised in (0, len(effects)):
        every = "both of them" if len(effects) == 2 else f"all {len(effects)}"
        return f" and makes {every} {'likelier' if raised else 'less likely'}"
    return f" and makes {raised} of {len(effects)} likelier"


def _value_change(values: Counterfactual, position: int) -> str:
    """V before and after the token; empty where it was not measured, or where the samples cannot tell them apart."""
    before, after = values.value[position], values.value[position + 1]
    error = float(values.stderr[position])
    if not (np.isfinite(before) and np.isfinite(after)) or abs(after - before) <= SURE * error:
        return ""
    change = f"is {before:.2f} before it and {after:.2f} after it (± {max(error, 0.01):.2f})"
    return f"by sampled continuations the expected reward {change}"


def quoted(vocabulary: Vocabulary, token_id: int) -> str:
    """A token between quotation marks, on one line."""
    text = vocabulary.text([token_id]).replace("\n", "↵").replace("\t", "⇥")
    return f"“{text[:LONGEST_TOKEN]}{'…' if len(text) > LONGEST_TOKEN else ''}”"


def group_books(table: ScoredStep, g: int, vocabulary: Vocabulary) -> Story | None:
    """What the step did to the group's objective and by whom; None where no scores are in nats."""
    members = table.members(g).tolist()
    told = books_story(table, g, lambda r: f"r{members.index(r)}", partial(quoted, vocabulary))
    if told is None:
        return None
    at = None if told.at is None else KeyToken(members.index(told.at[0]), told.at[1], "score")
    return Story(told.sentence, at)


def step_story(table: ScoredStep, vocabulary: Vocabulary, found: Sequence[dict[str, Any]] = ()) -> str:
    """`found`: the findings of this step."""
    stored = [(g, each) for g in range(table.n_groups) if (each := table.rewards(g))]
    if not stored:
        return "No response of this step was stored."
    mixed = [g for g, each in stored if len(set(each)) > 1]
    constant = [max(each) for _, each in stored if len(set(each)) == 1]
    rewarded = sum(best > 0 for best in constant)
    text = f"{len(mixed)} of {len(stored)} prompts have answers of different reward"
    if constant:
        text += f" ({rewarded} are always rewarded, {len(constant) - rewarded} never)"
    parts = [f"{text}."]
    if (strongest := _strongest(table, mixed)) is not None:
        parts.append(f"Most influence is in group {strongest}: {group_story(table, strongest, vocabulary).sentence}")
    parts += [str(each["sentence"]) for each in found if isinstance(each.get("sentence"), str)][:1]
    return " ".join(parts)


def _strongest(table: ScoredStep, groups: Sequence[int]) -> int | None:
    """The group with most influence, by the score that all scored groups have."""
    values = table.main_scores
    if values is None:
        return None
    sizes = {g: sum(float(np.nansum(np.abs(values[table.tokens(r)]))) for r in table.members(g)) for g in groups}
    largest = max(sizes, key=lambda g: sizes[g], default=None)
    return largest if largest is not None and sizes[largest] > 0 else None


FEW_STEPS = 6
"""With fewer, noise cannot be told from a trend, and no sentence says that something rose or fell."""
CURVES = {"critic/rewards/mean": "reward", "actor/entropy": "entropy", "response_length/mean": "length"}


def run_story(rows: Sequence[dict[str, Any]], found: Sequence[dict[str, Any]] = ()) -> str:
    """How the curves went, told only where the change stands out from their noise, and the last finding."""
    if not rows:
        return "No step has been logged yet."
    told = [words for name, label in CURVES.items() if (words := _trend(rows, name, label))]
    steps = sum(any(name in row for name in CURVES) for row in rows)
    text = f"Over {steps} step{'s' if steps != 1 else ''} {', '.join(told)}." if told else ""
    sentences = [each for each in found if isinstance(each.get("sentence"), str)]
    if sentences:
        last = sentences[-1]
        count = f"{len(sentences)} finding{'s' if len(sentences) != 1 else ''}"
        text += f" {count}; the last, at step {last.get('step')}: {last['sentence']}"
    return text.strip()


def _trend(rows: Sequence[dict[str, Any]], name: str, label: str) -> str:
    values = np.array([row[name] for row in rows if isinstance(row.get(name), int | float)], dtype=float)
    values = values[np.isfinite(values)]
    if len(values) < 2:
        return ""
    window = max(1, len(values) // 5)
    first, last = values[:window], values[-window:]
    start, end = float(first.mean()), float(last.mean())
    if len(values) < FEW_STEPS:
        return f"{label} went from {start:.3g} to {end:.3g}"
    # Neighbouring steps tell how noisy a step is, whatever the trend.
    noise = float(np.diff(values).std() / np.sqrt(2.0)) * np.sqrt(2.0 / window)
    if abs(end - start) <= max(SURE * noise, 0.01 * abs(start)):
        return f"{label} stayed near {float(values.mean()):.3g}"
    return f"{label} {'rose' if end > start else 'fell'} from {start:.3g} to {end:.3g}"
