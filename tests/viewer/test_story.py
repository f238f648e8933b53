"""The sentences that pages begin with say what the numbers of known groups say, and nothing where there is nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradtrace import open_run
from gradtrace.instruments.counterfactual.columns import MeasuredGroup
from gradtrace.instruments.counterfactual.tree import Measurement, PrefixTree, Sample
from gradtrace.instruments.entropy_trace import ENTROPY_TRACE
from gradtrace.instruments.influence import INFLUENCE_TRACE
from gradtrace.trace.columns import GroupStatus, Selection, ragged
from gradtrace.trace.token_text import Rules, TokenBytes
from gradtrace.trace.writer import TraceWriter
from gradtrace.viewer.scores import ScoredStep, load_step
from gradtrace.viewer.story import group_books, group_story, run_story, step_story
from gradtrace.viewer.vocabulary import Vocabulary

WORDS = Vocabulary(TokenBytes([str(digit).encode() for digit in range(10)], [0] * 10, Rules()))
RIGHT, WRONG = [1, 2, 3], [1, 7, 3]
FACTORS = {"output_function": "training_loss", "target": "log_prob", "pairwise_credit": "position"}
"""What files of scores from captured factors say about them."""
ALIKE = "so nothing here tells a better one from a worse one"


def written(
    path: Path,
    answers: list[list[int]],
    rewards: list[float],
    *,
    first_wrong: dict[int, int] | None = None,
    scores: dict[str, list[list[float]]] | None = None,
    effects: list[np.ndarray] | None = None,
    step: int = 1,
    gaps: list[float] | None = None,
    **meta: Any,
) -> ScoredStep:
    """A step of one group, as the trainer would have written it; `gaps`: trainer's log-probs minus sampler's."""
    n, best = len(answers), max(rewards)
    accepted = np.array([reward == best for reward in rewards]) & (len(set(rewards)) > 1)
    mean = np.array(rewards) - np.mean(rewards)
    token_id, token_offsets = ragged(answers)
    size = len(token_id)
    wrong = first_wrong or {}
    shared = {
        "group_id": np.array([0]), "prompt_ids": np.array([4]), "prompt_offsets": np.array([0, 1]),
        "expected_ids": np.array(RIGHT), "expected_offsets": np.array([0, 3]),
        "group": np.zeros(n, int), "row": np.arange(n), "reward": np.array(rewards), "finished": np.ones(n, bool),
        "length": np.array([len(answer) for answer in answers]),
        "first_wrong": np.array([wrong.get(r, -1) for r in range(n)]),
        "advantage": mean, "accepted": accepted, "token_id": token_id, "token_offsets": token_offsets,
        "entropy": np.zeros(size), "log_prob": np.zeros(size),
    }  # fmt: skip
    if gaps is not None:
        shared["ratio"] = np.exp(gaps)
    about = {"task": "any", "temperature": 1.0}
    with TraceWriter(path, ENTROPY_TRACE, on_error="raise") as writer:
        writer.write(step, shared, about)
    if scores is not None:
        columns = {name: np.concatenate(values) for name, values in scores.items()}
        if effects is not None:
            members, member_offsets = ragged([list(range(n))] * n)
            pairwise, pairwise_offsets = ragged([block.reshape(-1).tolist() for block in effects])
            columns |= {
                "pairwise": pairwise, "pairwise_offsets": pairwise_offsets,
                "pairwise_member": members, "pairwise_member_offsets": member_offsets,
            }  # fmt: skip
        more = {
            "group_status": np.array([int(GroupStatus.SCORED)]), "captured": np.ones(size, bool),
            "selection": np.full(n, int(Selection.SELECTED)), "optimizer_step": np.zeros(n, int),
        }  # fmt: skip
        standard = FACTORS if "influence" not in scores else {"unit": "nats"}
        with TraceWriter(path, INFLUENCE_TRACE, on_error="raise") as writer:
            writer.write(step, {**shared, **more, **columns}, about | standard | meta)
    view = load_step(open_run(path), step)
    assert view is not None
    return view


def effects_of(answers: list[list[int]], wanted: list[float]) -> list[np.ndarray]:
    """The same effects on each response for every token."""
    return [np.tile(np.array(wanted), (len(answer), 1)) for answer in answers]


ANSWERS = [WRONG, RIGHT, RIGHT, WRONG]
REWARDS = [0.0, 1.0, 1.0, 0.0]
LOSS_TERM = [[0.1, 5.0, 0.2], [0.1, 1.0, 0.1], [0.1, 1.0, 0.1], [0.1, 4.0, 0.2]]


def test_a_wrong_token_that_training_lowers_helps(tmp_path: Path) -> None:
    scores = {"influence": [[0.01 * x for x in values] for values in LOSS_TERM]}
    view = written(tmp_path, ANSWERS, REWARDS, first_wrong={0: 1, 3: 1}, scores=scores)
    story = group_story(view, 0, WORDS)
    assert story.sentence == (
        "r0 (×2) goes wrong at token 1, “7”, where “2” is right: training lowers it, which raised the objective by "
        "0.0500 nats."
    )
    assert story.as_json()["at"] == [0, 1]
    assert step_story(view, WORDS, [{"sentence": "The gradient jumped."}]) == (
        "1 of 1 prompts have answers of different reward. Most influence is in group 0: "
        f"{story.sentence} The gradient jumped."
    )


def test_with_an_empty_adam_state_the_sentence_is_about_the_step_and_not_about_training(tmp_path: Path) -> None:
    scores = {"influence": [[-0.01 * x for x in values] for values in LOSS_TERM]}
    early = [{"optimizer_step": 0, "second_moment": "batch_gradient", "learning_rate": 1e-4}]
    view = written(tmp_path, ANSWERS, REWARDS, first_wrong={0: 1}, scores=scores, updates=early)
    sentence = "the step lowered its own term of the objective by 0.0500 nats."
    assert group_story(view, 0, WORDS).sentence.endswith(sentence)


def test_books_name_the_token_that_makes_more_than_half_and_accepted_answers_that_lost(tmp_path: Path) -> None:
    own = [[0.0, 0.07, 0.0], [0.01, 0.0, 0.0], [0.0, 0.0, 0.01], [0.0, 0.01, 0.02]]
    before = [[-0.5] * 3] * 4
    after = [[-0.4] * 3, [-0.6, -0.5, -0.5], [-0.1] * 3, [-0.9] * 3]
    books = {"objective_change": 0.208, "change_by_batch": 0.18, "change_by_own": 0.12, "change_by_momentum": 0.028}
    scores = {"influence": LOSS_TERM, "influence_own": own, "log_prob_before": before, "log_prob_after": after}
    columns = scores | {name: [[value]] for name, value in books.items()}
    told = group_books(written(tmp_path, ANSWERS, REWARDS, scores=columns), 0, WORDS)
    assert told is not None and told.as_json() == {
        "sentence": "This step raised the group's objective by 0.208 nats: 0.120 by its own tokens, 0.060 by other "
        "prompts of the batch, 0.028 by momentum. More than half of the first is token 1 of r0, “7”. It made 1 of 2 "
        "accepted answers less likely.",
        "at": [0, 1],
    }


def test_a_group_that_was_not_measured_shows_the_sum_of_its_parts_and_says_so(tmp_path: Path) -> None:
    view = written(tmp_path, ANSWERS, REWARDS, scores={"influence": [[-0.01] * 3] * 4})
    told = group_books(view, 0, WORDS)
    assert told is not None and told.sentence.startswith(
        "By the influence of its tokens, this batch's gradient lowered the group's objective by 0.120 nats. This group "
        "was not measured"
    )


def test_harm_and_single_effects_are_told_with_their_sign_and_their_own_credit(tmp_path: Path) -> None:
    scores = [[-x for x in values] for values in LOSS_TERM]
    effects = effects_of(ANSWERS, [-1.0, 1.0, -1.0, -1.0])
    view = written(
        tmp_path, ANSWERS, REWARDS, first_wrong={0: 1}, scores={"influence_loss_term": scores}, effects=effects
    )
    assert group_story(view, 0, WORDS).sentence.endswith(
        "training lowers it, which hurts the accepted answers against the rejected ones and makes 1 of 2 likelier "
        "(loss-term credit, single answers by position credit)."
    )


def test_without_a_known_wrong_token_the_largest_score_is_named_not_called_a_mistake(tmp_path: Path) -> None:
    scores = [[0.1, 0.2, 0.1], [0.1, 0.1, 9.0], [0.1, 0.1, 0.1], [0.0, 0.0, 0.0]]
    view = written(tmp_path, ANSWERS, REWARDS, scores={"influence_position": scores}, target="output_function")
    assert group_story(view, 0, WORDS).sentence == (
        "Token 2 of r1 (×2) (accepted), “3”, has the largest score here: training raises it, which helps the accepted "
        "answers against the rejected ones (position credit)."
    )


def test_a_step_that_makes_tokens_likelier_is_not_called_training(tmp_path: Path) -> None:
    view = written(tmp_path, ANSWERS, REWARDS, scores={"influence_loss_term": LOSS_TERM}, output_function="log_prob")
    assert "making it likelier helps the accepted answers" in group_story(view, 0, WORDS).sentence


def test_a_clipped_token_takes_no_step(tmp_path: Path) -> None:
    view = written(tmp_path, ANSWERS, REWARDS, first_wrong={0: 1}, scores={"influence_loss_term": LOSS_TERM})
    view._columns["no_step", ""] = np.ones(view.n_tokens, np.float32)
    assert "training takes no step on it, because it was clipped" in group_story(view, 0, WORDS).sentence


@pytest.mark.parametrize(
    ("answers", "rewards", "sentence"),
    [
        ([RIGHT, RIGHT], [1.0, 1.0], f"All 2 answers got reward 1, {ALIKE}; they are the same text."),
        ([WRONG, RIGHT], [0.0, 0.0], f"All 2 answers got reward 0, {ALIKE}."),
        ([RIGHT], [1.0], "One answer alone, with reward 1: there is nothing to compare it with."),
        ([WRONG, RIGHT], [0.0, 1.0], "1 of 2 answers were accepted; nothing was stored that says which token decided."),
    ],
    ids=["all accepted", "all rejected", "one answer", "no scores"],
)  # fmt: skip
def test_where_there_is_nothing_to_tell_the_sentence_says_so(
    tmp_path: Path, answers: list[list[int]], rewards: list[float], sentence: str
) -> None:
    view = written(tmp_path, answers, rewards)
    assert group_story(view, 0, WORDS).sentence == sentence
    assert group_story(view, 0, WORDS).at is None


def test_no_mixed_group_makes_a_step_without_influence(tmp_path: Path) -> None:
    view = written(tmp_path, [RIGHT, RIGHT], [1.0, 1.0])
    assert step_story(view, WORDS) == (
        "0 of 1 prompts have answers of different reward (1 are always rewarded, 0 never)."
    )


def test_a_measured_loss_of_expected_reward_is_told_with_its_error(tmp_path: Path) -> None:
    """Eight continuations leave the start, all of them right: what r0 wrote after it costs everything."""
    answers, rewards = [WRONG, RIGHT], [0.0, 1.0]
    view = written(tmp_path, answers, rewards, first_wrong={0: 1}, scores={"influence_loss_term": LOSS_TERM[:2]})
    log_probs = [np.log(np.array(row)) for row in ([1.0, 0.1, 1.0], [1.0, 0.9, 1.0])]
    tree = PrefixTree(answers)
    measurement = Measurement(
        prompt=[4], responses=answers, rewards=np.array(rewards), ended=np.ones(2, bool), log_probs=log_probs,
        measured=np.ones(len(tree), bool), samples=[Sample(0, [1, 2, 3], 1.0, True) for _ in range(8)],
    )  # fmt: skip
    story = group_story(view, 0, WORDS, MeasuredGroup(0, measurement, {}, {}))
    assert story.as_json()["at"] == [0, 1]
    assert story.sentence.startswith("r0 goes wrong at token 1, “7”, where “2” is right: training lowers it")
    assert "; by sampled continuations the expected reward is 0.90 before it and 0.00 after it (± " in story.sentence


def test_a_run_tells_changes_that_stand_out_and_the_last_finding() -> None:
    rng = np.random.default_rng(0)
    rows = [
        {"critic/rewards/mean": 0.02 * step + 0.01 * rng.normal(), "actor/entropy": 1.0 + 0.2 * rng.normal()}
        for step in range(30)
    ]
    told = run_story(rows, [{"sentence": "Entropy fell.", "step": 7}])
    assert told.startswith("Over 30 steps reward rose from 0.0")
    assert "entropy stayed near" in told
    assert told.endswith("1 finding; the last, at step 7: Entropy fell.")
    assert run_story(rows[:2]).startswith("Over 2 steps reward went from")
    assert run_story([]) == "No step has been logged yet."
