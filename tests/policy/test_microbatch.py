"""Micro-batches: the same log-probs and gradients however a batch is cut and laid out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from gradtrace.algorithms import Denominator
from gradtrace.algorithms.settings import AlgorithmConfig
from gradtrace.attribution import directional_derivative
from gradtrace.attribution.collectives import Ranks
from gradtrace.batch import RolloutBatch
from gradtrace.errors import GradtraceError
from gradtrace.instruments.contract import Observer, OptimizerStep
from gradtrace.instruments.observers import Observers
from gradtrace.policy.attention import can_attend
from gradtrace.policy.loss import PolicyLoss
from gradtrace.policy.microbatch import MicroBatch, MicroBatches, Sequences, split_rows
from gradtrace.policy.optimizer import Optimizer
from gradtrace.policy.policy import Policy
from gradtrace.policy.settings import OptimConfig
from gradtrace.training.host import EmbeddedHost, loss_traits
from gradtrace.training.update import PolicyUpdate
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


LAYOUTS = ["padded", "packed", "shared"]
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "grouped_queries": {"num_key_value_heads": 1},
    "untied": {"tie_word_embeddings": False},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("budget", [1, 30, 10**6])
@pytest.mark.parametrize("family", FAMILIES)
def test_statistics_equal_those_of_each_response_alone(layout: str, budget: int, family: str) -> None:
    batch, actor = random_batch(), policy(temperature=0.7, **FAMILIES[family])
    expected_log_probs, expected_entropies = one_by_one(batch, actor)
    seen = torch.zeros(len(batch), dtype=torch.long)
    for micro in MicroBatches(batch, budget, layout)(torch.arange(len(batch))):
        log_probs, entropies = (micro.unflatten(values) for values in actor.statistics(micro))
        length = micro.mask.shape[1]
        torch.testing.assert_close(log_probs, expected_log_probs[micro.rows, :length])
        torch.testing.assert_close(entropies, expected_entropies[micro.rows, :length])
        seen[micro.rows] += 1
    assert (seen == 1).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3", "granite"])
def test_layouts_work_with_other_architectures(layout: str, name: str) -> None:
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    settings = {
        "llama": {**size, "intermediate_size": 32},
        "qwen3": {**size, "intermediate_size": 32, "head_dim": 8},
        "granite": {
            **size,
            "intermediate_size": 32,
            "logits_scaling": 3.0,
        },  # divides its logits after lm_head
        "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64},
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, vocab_size=18, **settings[name])
    other = AutoModelForCausalLM.from_config(config).double().eval()
    batch, actor = random_batch(), Policy(other, torch.device("cpu"), 1.0)
    micro = next(MicroBatches(batch, 10**6, layout)(torch.arange(len(batch))))
    torch.testing.assert_close(micro.unflatten(actor.statistics(micro)[0]), one_by_one(batch, actor)[0][micro.rows])


@pytest.mark.parametrize("layout", ["packed", "shared"])
def test_forward_mode_derivatives_do_not_depend_on_the_layout(layout: str) -> None:
    """Loss-term credit and the entropy probe differentiate forwards, through whatever layout the update has."""
    batch, actor = random_batch(), policy()
    torch.manual_seed(1)
    direction = {name: torch.randn_like(p) for name, p in actor.model.named_parameters()}
    rows = torch.arange(len(batch))

    def derivative(micro: MicroBatch) -> Tensor:
        tangent = directional_derivative(actor.model, lambda: actor.statistics(micro)[0], direction)
        return micro.unflatten(tangent)

    expected = derivative(Sequences.of(batch).padded(rows))
    assert float(expected.abs().sum()) > 1
    micro = getattr(Sequences.of(batch), layout)(rows)
    torch.testing.assert_close(derivative(micro), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("longest", [1, 2])
def test_very_short_responses(layout: str, longest: int) -> None:
    batch, actor = random_batch(longest=longest), policy()
    for micro in MicroBatches(batch, 10**6, layout)(torch.arange(len(batch))):
        expected = one_by_one(batch, actor)[0][micro.rows]
        torch.testing.assert_close(micro.unflatten(actor.statistics(micro)[0]), expected)


def test_sliding_windows_are_refused_when_packed() -> None:
    torch.manual_seed(0)
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = AutoConfig.for_model("mistral", vocab_size=18, num_key_value_heads=2, sliding_window=3, **size)
    actor = Policy(AutoModelForCausalLM.from_config(config).eval(), torch.device("cpu"), 1.0)
    micro = next(MicroBatches(random_batch(), 10**6, "packed")(torch.arange(9)))
    with pytest.raises(GradtraceError, match=r"sliding_window.*actor\.packing=never"):
        actor.statistics(micro)


@pytest.mark.parametrize(
    ("family", "options", "longest", "expected"),
    [
        ("qwen2", {}, 100, True),
        ("mistral", {"sliding_window": 3}, 3, True),
        ("mistral", {"sliding_window": 3}, 4, False),
        ("gemma2", {"head_dim": 8}, 4, False),  # soft caps
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, 4, False),
    ],
)
def test_a_model_is_asked_whether_packed_rows_are_what_rows_are(
    family: str, options: dict, longest: int, expected: bool
) -> None:
    torch.manual_seed(0)
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = AutoConfig.for_model(family, vocab_size=18, num_key_value_heads=2, **size, **options)
    model = AutoModelForCausalLM.from_config(config).eval()
    assert can_attend(model, longest) == expected
    assert not model.training and model.config._attn_implementation != "gradtrace_packed"


def test_a_layer_that_mixes_positions_without_attention_is_noticed() -> None:
    """Even one that nothing in the model's structure tells of."""
    model = policy().model

    def mix(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        return output + output.roll(1, 1)

    assert can_attend(model, 10)
    model.model.layers[0].mlp.register_forward_hook(mix)
    assert not can_attend(model, 10)


def test_model_attends_as_before_outside_of_packed_passes() -> None:
    batch, actor = random_batch(), policy()
    ids = torch.tensor([[5, 6, 7]])
    before = actor.model(ids).logits
    actor.statistics(next(MicroBatches(batch, 10**6, "packed")(torch.arange(9))))
    assert actor.model.config._attn_implementation == "sdpa"
    assert torch.equal(actor.model(ids).logits, before)


def gradients(batch: RolloutBatch, budget: int, layout: str, algorithm: AlgorithmConfig) -> dict[str, Tensor]:
    """Gradients of one mini-batch with all rows, as the update makes them before its optimizer step."""
    actor = Policy(model(), torch.device("cpu"), 1.0)
    optimizer = Optimizer(actor.trainable(), OptimConfig(lr=0.0, grad_clip=0.0), 1)
    found: dict[str, Tensor] = {}

    class Catch(Observer):
        def before_step(self, update: OptimizerStep) -> None:
            found.update({name: p.grad.clone() for name, p in actor.trainable().items() if p.grad is not None})

    update = PolicyUpdate(PolicyLoss(actor, algorithm, max_response_length=10), optimizer)
    # number=1: not the first update, so that the given old log-probs, away from the current ones, hold
    steps = [OptimizerStep(step=1, epoch=0, mini_batch=0, number=1, rows=torch.arange(len(batch)))]
    batch = batch.replace(old_log_probs=batch.sampler_log_probs)
    observers = Observers(Ranks(), {"catch": Catch()}, raising=["catch"])
    observers.begin({"catch": True})
    host = EmbeddedHost(actor, optimizer, loss_traits(algorithm))
    update.run(batch, MicroBatches(batch, budget, layout), steps, observers, host)
    return found


ALGORITHMS = [
    AlgorithmConfig(),
    AlgorithmConfig(aggregation="sequence_mean", entropy_coef=0.1),
    AlgorithmConfig(aggregation="fixed_length", kl_coef=0.2),
    AlgorithmConfig(policy_loss="gspo"),
    AlgorithmConfig(policy_loss="archer", entropy_coef=0.1),
]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: f"{a.policy_loss}-{a.aggregation}")
@pytest.mark.parametrize(
    ("budget", "layout"),
    [
        (1, "padded"),
        (25, "padded"),
        (40, "packed"),
        (10**6, "packed"),
        (1, "shared"),
        (40, "shared"),
        (10**6, "shared"),
    ],
)
def test_cutting_and_packing_do_not_change_gradients(algorithm: AlgorithmConfig, budget: int, layout: str) -> None:
    batch = random_batch()
    whole = gradients(batch, 10**6, "padded", algorithm)
    assert sum(float(g.abs().sum()) for g in whole.values()) > 1e-3
    parts = gradients(batch, budget, layout, algorithm)
    # Gradients of a shared prompt are added up before the model's norms round them to float32.
    atol = 1e-6 if layout == "shared" else 1e-11
    for name, expected in whole.items():
        torch.testing.assert_close(parts[name], expected, rtol=1e-9, atol=atol)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 200), st.sampled_from(LAYOUTS), st.integers(0, 100))
def test_split_covers_every_row_once_within_the_budget(
    groups: int, n: int, budget: int, layout: str, seed: int
) -> None:
    sequences = Sequences.of(random_batch(groups, n, seed=seed))
    rows = torch.arange(groups * n)
    parts = split_rows(sequences, rows, budget, layout)
    assert sorted(torch.cat(parts).tolist()) == rows.tolist()
    for part in parts:
        micro = getattr(sequences, layout)(part)
        assert micro.input_ids.numel() <= budget or len(part) == 1


def test_a_group_that_fits_is_not_torn() -> None:
    batch = random_batch(groups=6, n=4)
    sequences = Sequences.of(batch)
    largest = max(4 * int(sequences.lengths[batch.group == group].max()) for group in range(6))
    for part in split_rows(sequences, torch.arange(24), largest, "padded"):
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
    assert torch.equal(response.flatten()[micro.logit_positions], response.flatten()[micro.logit_positions + 1])
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
