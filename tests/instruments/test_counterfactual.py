"""ΔV against V by enumeration, on a model that is small enough for it, and the rules that any estimate follows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import gradtrace
from gradtrace.errors import GradtraceError
from gradtrace.instruments.counterfactual import COUNTERFACTUAL
from gradtrace.instruments.counterfactual.columns import MeasuredGroup, from_step, to_columns, write_groups
from gradtrace.instruments.counterfactual.measure import Clues, choose, first_difference
from gradtrace.instruments.counterfactual.sampling import Continuations, missing
from gradtrace.instruments.counterfactual.tree import Measurement, PrefixTree
from gradtrace.rollout import Sampler, SamplingParams
from gradtrace.tasks.arithmetic import STOP, build_tokenizer
from gradtrace.trace.writer import TraceWriter
from tests.instruments.exact_values import ExactValues
from tests.training import small

LIMIT = 3
PROMPT = [5, 6, 7]
MODEL = small.model(torch.float32, initializer_range=1.0)
TOKENIZER = build_tokenizer()
PARAMS = SamplingParams(n=5, max_new_tokens=LIMIT, stop_token_ids=(STOP,))


def reward(text: str) -> float:
    """Several texts are right: where they part from each other tells nothing."""
    return float("1" in text) + 0.5 * (len(text) == 2)


def judge(texts: list[str]) -> list[float]:
    return [reward(text) for text in texts]


@pytest.fixture(scope="module")
def exact() -> ExactValues:
    return ExactValues(MODEL, TOKENIZER, PROMPT, reward, LIMIT, STOP)


def sampled(seed: int, n: int = 5) -> list[list[int]]:
    params = SamplingParams(n=n, max_new_tokens=LIMIT, stop_token_ids=(STOP,))
    batch = Sampler(MODEL).generate([PROMPT], params, torch.Generator().manual_seed(seed))
    return [list(response) for response in batch.response_ids]


def measured(seed: int, tokens: str = "all", k: int = 16) -> Measurement:
    continuations = Continuations(Sampler(MODEL), TOKENIZER, PARAMS, judge, seed)
    group = continuations.begin(PROMPT, sampled(seed))
    group.measure(choose(tokens, group, Clues()))
    assert continuations.run(group, k)
    return group


@pytest.mark.parametrize("tokens", ["all", "1"])
def test_delta_v_is_right_within_its_standard_error(exact: ExactValues, tokens: str) -> None:
    errors, within = [], []
    for seed in range(25):
        group = measured(seed, tokens)
        values = group.values()
        for path, response in zip(group.tree.paths, group.responses, strict=True):
            for t, node in enumerate(path):
                if np.isfinite(values.delta[node]):
                    truth = exact(tuple(response[: t + 1])) - exact(tuple(response[:t]))
                    error = values.delta[node] - truth
                    within.append(abs(error) <= 3 * values.delta_stderr[node] + 1e-6)
                    if values.delta_stderr[node] > 1e-6:
                        errors.append(error / values.delta_stderr[node])
    assert len(within) > 90 and np.mean(within) >= 0.95
    assert abs(np.mean(errors)) < 4 / len(errors) ** 0.5, "biased"
    assert 0.3 < np.std(errors) < 1.2, "standard errors that are too small, or so large that they say nothing"


def test_values_add_up_along_a_response() -> None:
    group = measured(3)
    for result in gradtrace.counterfactual(MODEL, TOKENIZER, PROMPT, group.responses, reward, max_new_tokens=LIMIT):
        np.testing.assert_allclose(result.value[0] + np.cumsum(result.delta_v), result.value[1:], atol=1e-12)
        assert result.value[-1] == result.reward


def test_what_the_policy_does_for_certain_changes_nothing() -> None:
    group = measured(0)
    for log_probs in group.log_probs:
        log_probs[:] = 0.0
    certain = Measurement(PROMPT, group.responses[:1], group.rewards[:1], group.ended[:1], group.log_probs[:1],
                          np.ones(len(group.responses[0]) + 1, bool), [])  # fmt: skip
    values = certain.values()
    assert (values.delta[1:] == 0).all() and (values.delta_stderr[1:] == 0).all()
    assert missing(certain, 16) == 0


def test_samples_stay_valid_when_more_tokens_are_measured(exact: ExactValues) -> None:
    errors = []
    for seed in range(25):
        group = measured(seed, "1", k=32)
        count = len(group.samples)
        group.measure(np.ones(len(group.tree), bool))
        values = group.values()
        assert len(group.samples) == count
        nodes = [(path[0], response[0]) for path, response in zip(group.tree.paths, group.responses, strict=True)]
        for node, token in nodes:
            if values.delta_stderr[node] > 1e-6:
                truth = exact((token,)) - exact(())
                errors.append((values.delta[node] - truth) / values.delta_stderr[node])
    assert abs(np.mean(errors)) < 0.3 and np.mean(np.abs(errors) <= 3) >= 0.95


def test_more_samples_go_where_the_interval_is_wide() -> None:
    group = measured(1, k=4)
    stretches = group.stretches()
    plan = stretches.plan(200, at_least=4)
    assert plan.sum() == 200
    contribution = stretches.leaving * np.sqrt(stretches.spread)
    quiet, wide = np.argsort(contribution[group.measured])[[0, -1]]
    assert plan[group.measured][wide] > 3 * plan[group.measured][quiet]


def test_every_sample_leaves_the_responses_at_its_node() -> None:
    group = measured(2)
    assert all(sample.ids[0] not in group.tree.children[sample.node] for sample in group.samples)
    assert all(group.tree.depth[s.node] + len(s.ids) <= LIMIT for s in group.samples)
    texts = [group.responses[group.tree.owner[s.node]][: group.tree.depth[s.node]] + s.ids for s in group.samples]
    rewards = judge(TOKENIZER.batch_decode(texts, skip_special_tokens=True))
    assert rewards == [sample.reward for sample in group.samples]


def test_siblings_share_their_beginnings() -> None:
    tree = PrefixTree([[4, 5, 6], [4, 5, 7], [8], [4, 5, 6]])
    assert len(tree) == 6 and tree.paths[0] == tree.paths[3] and tree.paths[0][:2] == tree.paths[1][:2]
    assert tree.leaves_at(tree.node(2, 0), [4, 9, 9]) == (tree.node(0, 1), 1)


def test_a_file_holds_enough_to_go_on(tmp_path: Path) -> None:
    groups = [measured(seed, tokens) for seed, tokens in ((4, "all"), (5, "0-1"))]
    stored = [MeasuredGroup(g, group, {"max_new_tokens": LIMIT}) for g, group in enumerate(groups)]
    for group in stored:
        rows = len(group.measurement.responses)
        finished = np.array([response[-1] == STOP for response in group.measurement.responses])
        group.columns = {"row": np.arange(rows), "finished": finished}
    with TraceWriter(tmp_path, COUNTERFACTUAL, on_error="raise") as writer:
        write_groups(writer, 7, stored, {"task": "arithmetic"})
    read = from_step(gradtrace.open_run(tmp_path).step(COUNTERFACTUAL, 7))
    for before, after in zip(groups, read, strict=True):
        assert after.measurement.samples == before.samples
        np.testing.assert_array_equal(after.measurement.measured, before.measured)
        np.testing.assert_allclose(after.measurement.values().delta, before.values().delta, atol=1e-5)


def test_the_function_has_the_results_of_the_command() -> None:
    group = measured(6)
    options = {"max_new_tokens": LIMIT, "seed": 6}
    several = gradtrace.counterfactual(MODEL, TOKENIZER, PROMPT, group.responses, reward, **options)
    values = group.values()
    for path, result in zip(group.tree.paths, several, strict=True):
        np.testing.assert_array_equal(result.delta_v, values.delta[path])
        np.testing.assert_array_equal(result.stderr, values.delta_stderr[path])
    one = gradtrace.counterfactual(MODEL, TOKENIZER, PROMPT, group.responses[0], reward, **options)
    assert one.delta_v.shape == (len(group.responses[0]),) and one.reward == group.rewards[0]


def test_choosing_tokens() -> None:
    responses = [[4, 5, 6, STOP], [4, 5, 7, STOP], [9, STOP]]
    scores = np.log(np.full(4, 0.5))
    group = Measurement(
        prompt=PROMPT,
        responses=responses,
        rewards=np.array([1.0, 0.0, 0.0]),
        ended=np.ones(3, bool),
        log_probs=[scores, scores, scores[:2]],
        measured=np.zeros(8, bool),
        samples=[],
    )
    assert [first_difference(group, r) for r in range(3)] == [[2], [2], [0]]
    entropy = [np.array([0.1, 0.9, 0.2, 0.0]), np.array([0.1, 0.2, 0.3, 0.0]), np.array([0.5, 0.0])]
    clues = Clues(entropy=entropy)
    tree = group.tree

    def tokens(words: str, only: list[int] | None = None) -> set[tuple[int, int]]:
        group.measured = choose(words, group, clues, only)
        is_token = group.stretches().is_token
        return {(r, t) for r, path in enumerate(tree.paths) for t, node in enumerate(path) if is_token[node]}

    assert tokens("all") == {(r, t) for r, path in enumerate(tree.paths) for t in range(len(path))}
    assert (2, 0) not in tokens("1", only=[0]) and (0, 1) in tokens("1", only=[0])
    assert {(0, 1), (1, 2), (2, 0)} <= tokens("entropy:1")
    assert (0, 2) in tokens("difference") and (0, 1) not in tokens("difference", only=[0])
    assert {(0, 1), (0, 2)} <= tokens("interesting:2", only=[0])
    for words in ("surprise", "entropy:0", "3-", "entropy:x"):
        with pytest.raises(GradtraceError, match="interesting"):
            tokens(words)
    with pytest.raises(GradtraceError, match="no influence"):
        tokens("influence")


def test_a_file_from_elsewhere_cannot_mislead(tmp_path: Path) -> None:
    """Samples that do not fit their response are left out, and notes of the wrong kind are none."""
    group = measured(4)
    rows = len(group.responses)
    finished = np.array([response[-1] == STOP for response in group.responses])
    columns = to_columns([MeasuredGroup(0, group, {}, {"row": np.arange(rows), "finished": finished})])
    starts = columns["continuation_start"]
    starts[:3] = [-1, 10**6, len(group.responses[int(columns["continuation_response"][2])])]
    with TraceWriter(tmp_path, COUNTERFACTUAL, on_error="raise") as writer:
        writer.write(1, columns, {"measured": [7, {"group_id": [1]}, {"group_id": 0, "max_new_tokens": "x"}]})
        columns["continuation_response"][0] = rows
        with pytest.raises(GradtraceError, match="continuation_response"):
            writer.write(2, columns)
    (read,) = from_step(gradtrace.open_run(tmp_path).step(COUNTERFACTUAL, 1))
    assert len(group.samples) - 3 <= len(read.measurement.samples) < len(group.samples)
    read.measurement.values()
