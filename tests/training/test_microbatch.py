"""Micro-batches: the same log-probs and gradients however a batch is cut and laid out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradtrace.algorithms import Denominator
from gradtrace.batch import RolloutBatch
from gradtrace.config import ActorConfig, AlgorithmConfig, OptimConfig
from gradtrace.training.microbatch import MicroBatch, Sequences, split_rows
from gradtrace.training.observer import OptimizerStep, StepObserver
from gradtrace.training.optimizer import Optimizer
from gradtrace.training.policy import Policy
from gradtrace.training.update import MicroBatches, PolicyUpdate
from tests.training.small import model, policy, random_batch


def one_by_one(batch: RolloutBatch, actor: Policy) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [R, T] the plain way: each response alone, all logits, no micro-batches."""
    log_probs, entropies = (torch.zeros(batch.response_mask.shape, dtype=torch.float64) for _ in range(2))
    for row, length in enumerate(batch.response_lengths.tolist()):
        prompt = batch.prompts[int(batch.group[row])]
        ids = torch.tensor([prompt + batch.responses[row, :length].tolist()])
        logits = actor.model(ids).logits[0, len(prompt) - 1 : -1] / actor.temperature
        logp = logits.log_softmax(-1)
        log_probs[row, :length] = logp.gather(-1, batch.responses[row, :length, None]).squeeze(-1)
        entropies[row, :length] = -(logp.exp() * logp).sum(-1)
    return log_probs, entropies


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("budget", [1, 30, 10**6])
def test_statistics_equal_those_of_each_response_alone(packed: bool, budget: int) -> None:
    batch, actor = random_batch(), policy(temperature=0.7)
    expected_log_probs, expected_entropies = one_by_one(batch, actor)
    seen = torch.zeros(len(batch), dtype=torch.long)
    for micro in MicroBatches(batch, budget, packed)(torch.arange(len(batch))):
        log_probs, entropies = (micro.unflatten(values) for values in actor.statistics(micro))
        length = micro.mask.shape[1]
        torch.testing.assert_close(log_probs, expected_log_probs[micro.rows, :length])
        torch.testing.assert_close(entropies, expected_entropies[micro.rows, :length])
        seen[micro.rows] += 1
    assert (seen == 1).all()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_responses_do_not_see_one_another(attention: str) -> None:
    batch, actor = random_batch(), policy(attn_implementation=attention)
    micro = Sequences.of(batch).packed(torch.arange(len(batch)))
    alone = one_by_one(batch, actor)[0]
    # eager attention takes its softmax in float32
    torch.testing.assert_close(micro.unflatten(actor.statistics(micro)[0]), alone, rtol=1e-5, atol=1e-5)


def gradients(
    batch: RolloutBatch, budget: int, packed: bool, algorithm: AlgorithmConfig
) -> dict[str, Tensor]:
    """Gradients of one mini-batch with all rows, as the update makes them before its optimizer step."""
    actor = Policy(model(), torch.device("cpu"), 1.0)
    optimizer = Optimizer(actor.trainable(), OptimConfig(lr=0.0, grad_clip=0.0), 1)
    found: dict[str, Tensor] = {}

    class Catch(StepObserver):
        def around_optimizer_step(self, update: OptimizerStep):  # type: ignore[no-untyped-def]
            found.update(
                {name: p.grad.clone() for name, p in actor.trainable().items() if p.grad is not None}
            )
            return super().around_optimizer_step(update)

    update = PolicyUpdate(actor, optimizer, ActorConfig(), algorithm, max_response_length=10)
    # number=1: not the first update, so that the given old log-probs, away from the current ones, hold
    steps = [OptimizerStep(step=1, epoch=0, mini_batch=0, number=1, rows=torch.arange(len(batch)))]
    batch = batch.replace(old_log_probs=batch.sampler_log_probs)
    update.run(batch, MicroBatches(batch, budget, packed), steps, Catch())
    return found


ALGORITHMS = [
    AlgorithmConfig(),
    AlgorithmConfig(aggregation="sequence_mean", entropy_coef=0.1),
    AlgorithmConfig(aggregation="fixed_length", kl_coef=0.2),
    AlgorithmConfig(policy_loss="gspo"),
    AlgorithmConfig(policy_loss="archer", entropy_coef=0.1),
]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: f"{a.policy_loss}-{a.aggregation}")
@pytest.mark.parametrize(("budget", "packed"), [(1, False), (25, False), (40, True), (10**6, True)])
def test_cutting_and_packing_do_not_change_gradients(
    algorithm: AlgorithmConfig, budget: int, packed: bool
) -> None:
    batch = random_batch()
    whole = gradients(batch, 10**6, False, algorithm)
    assert sum(float(g.abs().sum()) for g in whole.values()) > 1e-3
    parts = gradients(batch, budget, packed, algorithm)
    for name, expected in whole.items():
        torch.testing.assert_close(parts[name], expected, rtol=1e-9, atol=1e-11)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 200), st.booleans(), st.integers(0, 100))
def test_split_covers_every_row_once_within_the_budget(
    groups: int, n: int, budget: int, packed: bool, seed: int
) -> None:
    sequences = Sequences.of(random_batch(groups, n, seed=seed))
    rows = torch.arange(groups * n)
    parts = split_rows(sequences, rows, budget, packed)
    assert sorted(torch.cat(parts).tolist()) == rows.tolist()
    for part in parts:
        lengths = sequences.lengths[part]
        cost = int(lengths.sum()) if packed else len(part) * int(lengths.max())
        assert cost <= budget or len(part) == 1


def test_a_group_that_fits_is_not_torn() -> None:
    batch = random_batch(groups=6, n=4)
    sequences = Sequences.of(batch)
    largest = max(4 * int(sequences.lengths[batch.group == group].max()) for group in range(6))
    for part in split_rows(sequences, torch.arange(24), largest):
        assert all(int((batch.group[part] == group).sum()) in (0, 4) for group in range(6))


@pytest.mark.parametrize("packed", [False, True])
def test_layout_describes_the_input(packed: bool) -> None:
    """What instruments rely on: whose position, which tokens, where lm_head ran."""
    batch = random_batch()
    sequences = Sequences.of(batch)
    rows = torch.tensor([4, 1, 7])
    micro: MicroBatch = sequences.packed(rows) if packed else sequences.padded(rows)
    response = micro.response if packed else micro.response[:, None].expand(micro.input_ids.shape)
    assert torch.equal(micro.input_ids[micro.tokens], micro.targets)
    assert torch.equal(micro.input_ids.flatten()[micro.logit_positions + 1], micro.targets)
    assert torch.equal(
        response.flatten()[micro.logit_positions], response.flatten()[micro.logit_positions + 1]
    )
    for row in rows.tolist():
        length = int(batch.response_lengths[row])
        here = micro.tokens & (response == row)
        assert micro.input_ids[here].tolist() == batch.responses[row, :length].tolist()


def test_head_runs_on_response_positions_only() -> None:
    batch, actor = random_batch(), policy()
    shapes = []
    actor.model.lm_head.register_forward_hook(lambda module, inputs, output: shapes.append(inputs[0].shape))
    micro = Sequences.of(batch).padded(torch.arange(len(batch)))
    actor.statistics(micro)
    assert shapes == [(1, int(batch.response_mask.sum()), 16)]
    assert Denominator.of(batch.response_mask).tokens == len(micro.targets)
    actor.model(micro.input_ids)  # and outside of it, everywhere again
    assert shapes[-1] == (*micro.input_ids.shape, 16)
