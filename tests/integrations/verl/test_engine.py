"""The influence trace inside verl's FSDP2 engine: exact gradients in every layout, and on one rank or two the scores
of the embedded loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gradtrace.algorithms.settings import AlgorithmConfig
from gradtrace.attribution.collectives import Ranks
from gradtrace.batch import RolloutBatch
from gradtrace.instruments.columns import response_columns
from gradtrace.instruments.contract import OptimizerStep, Table
from gradtrace.instruments.influence import INFLUENCE_TRACE, InfluenceTraceConfig
from gradtrace.instruments.influence.columns import BOOKS, parts_columns
from gradtrace.instruments.influence.factor_columns import influence_columns
from gradtrace.instruments.influence.observer import influence_observer
from gradtrace.instruments.observers import Observers
from gradtrace.policy.load import load_policy
from gradtrace.policy.loss import PolicyLoss, fill_statistics
from gradtrace.policy.microbatch import MicroBatches
from gradtrace.policy.optimizer import Optimizer
from gradtrace.policy.settings import OptimConfig
from gradtrace.training.host import EmbeddedHost, loss_traits
from gradtrace.training.update import PolicyUpdate
from tests.integrations.verl import blame_ranks, cases, harness, probe_reference, tracin_ranks
from tests.integrations.verl.blame_checks import (  # noqa: F401  (tests of blame, on the same ranks)
    test_blame_takes_two_passes,
    test_half_precision_with_an_attention_that_has_no_other_gives_nearly_the_shares_of_float32,
    test_shares_norms_and_products_of_ranks_equal_brute_force,
    test_shares_of_every_optimizer_step_add_up_to_one,
    test_the_mismatchs_share_of_the_update_on_ranks_equals_brute_force,
    test_training_does_not_notice_blame,
)
from tests.integrations.verl.tracin_checks import (  # noqa: F401  (tests of TracIn selection, on the same ranks)
    test_scores_add_up_to_the_product_of_the_gradients,
    test_scores_of_responses_are_those_of_the_embedded_loop,
    test_scoring_changes_no_bit_of_the_training,
    test_training_in_bf16_gives_nearly_the_scores_of_float32,
    test_what_fills_a_mini_batch_up_does_not_count_in_a_mean_over_responses,
)

pytestmark = [pytest.mark.slow, harness.needs_verl]


def on_ranks(*kinds: dict[str, cases.Case]) -> list[tuple[int, str]]:
    return [(world, name) for world in (1, 2) for name in cases.names(world, *kinds)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a batch with the model's log-probs, what probes need, and every case run on one rank and on two."""
    folder = tmp_path_factory.mktemp("engine")
    # Responses hold the padding token: autograd leaves its embedding out, and the probe must as well.
    harness.model_folder(folder / "model", tie_word_embeddings=False, pad_token_id=probe_reference.PAD)
    batch = probe_reference.with_padding_token(harness.rollout())
    policy = load_policy(folder / "model", small_model_config(), 1.0)
    rows = torch.arange(len(batch))
    batch = fill_statistics(policy, batch, MicroBatches(batch, 4096), rows)
    torch.save(batch, folder / "batch.pt")
    probe_reference.prepare(folder, policy.model)
    tracin_ranks.prepare(folder)
    work = {
        world: [*cases.names(world, cases.CASES), *cases.probes(world), *blame_ranks.names(world)]
        for world in (2, 1)  # the second opens the first one's checkpoint
    }
    harness.run_worlds("tests.integrations.verl.engine_worker", folder, work)
    return folder


def small_model_config() -> Any:
    from gradtrace.policy.settings import ModelConfig

    return ModelConfig(device="cpu")


def batch_of(folder: Path, name: str) -> RolloutBatch:
    batch: RolloutBatch = torch.load(folder / "batch.pt", weights_only=False)
    if cases.CASES[name].layout.get("corrected"):
        # Twice the weight is, at ratio 1, twice the advantage: the embedded loop, which has no correction, is told so.
        batch = batch.replace(advantages=batch.advantages * harness.correction(batch))  # type: ignore[operator]
    return harness.in_turns(batch) if cases.CASES[name].turns else batch


def embedded(folder: Path, name: str) -> dict[str, np.ndarray]:
    """The columns of the embedded loop's trace of the same two mini-batches."""
    batch = batch_of(folder, name)
    policy = load_policy(folder / "model", small_model_config(), 1.0)
    case, knobs = cases.CASES[name], InfluenceTraceConfig(**cases.knobs_of(name))
    mode = case.actor.get("loss_agg_mode", "token-mean")
    algorithm = AlgorithmConfig(
        policy_loss_options={"clip_low": 0.2, "clip_high": 0.2},
        aggregation={"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean"}[mode],
    )
    settings = OptimConfig(lr=harness.LEARNING_RATE, betas=[0.9, 0.999], grad_clip=0.0)
    optimizer = Optimizer(policy.trainable(), settings, 10)
    optimizer.begin_step(1)
    update = PolicyUpdate(PolicyLoss(policy, algorithm, 16), optimizer)
    host = EmbeddedHost(policy, optimizer, loss_traits(algorithm))
    observers = Observers(Ranks(), {INFLUENCE_TRACE: influence_observer(host, knobs)}, raising=[INFLUENCE_TRACE])
    observers.begin({INFLUENCE_TRACE: cases.plan_of(name, batch)})
    plan = torch.tensor(cases.PLAN)
    steps = [OptimizerStep(1, 0, i, i, (plan == i).nonzero().squeeze(-1)) for i in range(2)]
    done, _ = update.run(batch, MicroBatches(batch, 40), steps, observers, host)
    return columns_of(done, observers.end()[INFLUENCE_TRACE], knobs)


def columns_of(batch: RolloutBatch, table: Table, knobs: InfluenceTraceConfig) -> dict[str, np.ndarray]:
    """What a step's file holds of its responses and scores."""
    status = torch.zeros(len(batch.prompts), dtype=torch.long)
    if knobs.is_parts:
        rows, columns, _ = parts_columns(batch, table, status)
    else:
        rows, columns, _ = influence_columns(batch, table, status, knobs, 64.0)
    known = {name: np.asarray(values) for name, values in response_columns(batch, rows).items()}
    return known | columns


def table_of(folder: Path, name: str, world: int) -> Table:
    table = harness.table_of(folder / f"{name}.{world}", world, INFLUENCE_TRACE)
    assert not table.failure
    return table


def joined(folder: Path, name: str, world: int) -> dict[str, np.ndarray]:
    """The columns that the driver makes of the ranks' tables."""
    knobs = InfluenceTraceConfig(**cases.knobs_of(name))
    return columns_of(batch_of(folder, name), table_of(folder, name, world), knobs)


@pytest.mark.parametrize(("world", "name"), on_ranks(cases.LAYOUTS, cases.LORA))
def test_captured_gradients_sum_to_the_weight_gradient(folder: Path, name: str, world: int) -> None:
    found = torch.load(folder / f"{name}.{world}" / "rank0.pt")
    # All linear layers but the head; with adapters, the two of each of them.
    assert len(found["errors"]) == (28 if name in cases.LORA else 14)
    worst = max(found["errors"], key=found["errors"].get)
    assert found["errors"][worst] < 1e-5, f"{worst} is off by {found['errors'][worst]:.1e}"


@pytest.mark.parametrize(("world", "name"), on_ranks(cases.LAYOUTS, cases.KNOBS))
def test_scores_are_those_of_the_embedded_loop(folder: Path, name: str, world: int) -> None:
    expected, found = embedded(folder, name), joined(folder, name, world)
    assert list(found["row"]) == list(expected["row"]) == list(range(16))
    assert list(found["optimizer_step"]) == cases.PLAN
    assert list(found["length"]) == list(expected["length"])
    step_of_token = np.repeat(found["optimizer_step"], found["length"])
    for column in ("influence_position", "prompt_influence", "pairwise"):
        first = step_of_token == 0 if column == "influence_position" else slice(None)
        ours, theirs = found[column][first], expected[column][first]
        tolerance = 1e-5 if column == "influence_position" else 2e-3  # the others hold the second mini-batch too
        error = float(np.abs(ours - theirs).max() / np.abs(theirs).max())
        assert error < tolerance, f"{column} is off by {error:.1e}"
    if "influence_loss_term" in expected:  # by small steps on shards here, by forward mode there
        ours, theirs = found["influence_loss_term"], expected["influence_loss_term"]
        assert np.abs(ours - theirs).max() < 5e-3 * np.abs(theirs).max()
    ours, theirs = (
        found["influence_position"][step_of_token == 1],
        expected["influence_position"][step_of_token == 1],
    )
    # After an Adam step, whose first update is close to the sign of the gradient, roundings have been magnified.
    assert np.abs(ours - theirs).max() < 2e-3 * np.abs(theirs).max()


@pytest.mark.parametrize(("world", "name"), on_ranks(cases.PARTS))
def test_default_scores_are_those_of_the_embedded_loop(folder: Path, name: str, world: int) -> None:
    """One direction, sharded as the weights are. In the first mini-batch Adam's state is empty, and its step is like
    the gradient's sign, which makes roundings large."""
    expected, found = embedded(folder, name), joined(folder, name, world)
    assert list(found["row"]) == list(expected["row"]) == list(range(16))
    np.testing.assert_allclose(found["loss_weight"], expected["loss_weight"], rtol=1e-6)
    columns = [name for name in ("influence", "influence_own", "log_prob_after", "pairwise") if name in expected]
    assert [name for name in columns if name not in found] == [] and "influence" in columns
    for column in [*columns, *(book for book in BOOKS if book in expected)]:
        ours, theirs = found[column], expected[column]
        assert np.array_equal(np.isnan(ours), np.isnan(theirs)), column
        there = np.isfinite(theirs)
        if name == "parts_bf16":
            # The gradient is of a bf16 backward pass. Where it is nearly 0, the first steps' division by it magnifies
            # what a group alone contributes.
            by_group = column in ("influence_own", "pairwise", "change_by_own")
            assert by_group or np.corrcoef(ours[there], theirs[there])[0, 1] > 0.95, column
            continue
        error = float(np.abs(ours[there] - theirs[there]).max() / np.abs(theirs[there]).max())
        assert error < 5e-2, f"{column} is off by {error:.1e}"
        assert np.corrcoef(ours[there], theirs[there])[0, 1] > 0.999, column


@pytest.mark.parametrize(("world", "name"), on_ranks(cases.PARTS))
def test_the_base_of_the_difference_is_the_pass_of_training_bit_by_bit(folder: Path, name: str, world: int) -> None:
    """Which saves a forward pass; a pass in bf16 is too coarse for it."""
    for rank in range(world):
        kept, equal = torch.load(folder / f"{name}.{world}" / f"rank{rank}.pt")["kept"]
        assert equal and kept == (name != "parts_bf16")


@pytest.mark.parametrize(("world", "name"), on_ranks(cases.FACTORED))
def test_scores_in_the_optimizers_geometry_are_those_of_the_embedded_loop(folder: Path, name: str, world: int) -> None:
    """Second moments lie in shards here: their row and column means are made over ranks. In the first mini-batch there
    are none yet, and the batch's own gradient is all there is."""
    expected, found = embedded(folder, name), joined(folder, name, world)
    assert list(found["row"]) == list(expected["row"])
    step_of_token = np.repeat(found["optimizer_step"], found["length"])
    for step in (0, 1):
        ours, theirs = (some["influence_loss_term"][step_of_token == step] for some in (found, expected))
        error = float(np.abs(ours - theirs).max() / np.abs(theirs).max())
        assert error < 2e-2, f"mini-batch {step} is off by {error:.1e}"
        assert np.corrcoef(ours, theirs)[0, 1] > 0.9999


@pytest.mark.parametrize("name", ["contrast", "contrast_padded", "loss_term"])
def test_a_pass_of_loss_terms_gathers_weights_once_for_all_responses_of_a_group(folder: Path, name: str) -> None:
    """Of the four of a group each of two ranks has two: one after the other they would gather twice in every pass."""
    made = torch.load(folder / f"{name}.2" / "rank0.pt")
    assert made["micro_batches"] == made["passes"]
    assert all(0 < passes <= 8 for passes in made["passes"]), "at most four passes for either of two groups"


@pytest.mark.parametrize("name", cases.TURNS)
def test_tokens_of_others_have_no_score_and_the_policys_those_of_the_embedded_loop(folder: Path, name: str) -> None:
    """verl's response mask with holes, as its agent loops with tools make it; two ranks."""
    expected, found = embedded(folder, name), joined(folder, name, 2)
    own = found["loss_mask"]
    assert np.array_equal(own, expected["loss_mask"]) and not own.all()
    first = own & (np.repeat(found["optimizer_step"], found["length"]) == 0)
    for column in ("influence_position", "influence_loss_term"):
        assert (column in found) == (column in expected)
        if column in found:
            assert np.array_equal(np.isnan(found[column]), ~own)
            error = np.abs(found[column][first] - expected[column][first]).max()
            assert error < 2e-3 * np.abs(expected[column][first]).max(), column


@pytest.mark.parametrize("name", cases.CORRECTED)
def test_weights_of_the_rollout_correction_are_part_of_the_step_and_not_of_its_target(folder: Path, name: str) -> None:
    expected, found = embedded(folder, name), joined(folder, name, 2)
    first = np.repeat(found["optimizer_step"], found["length"]) == 0
    columns = [column for column in expected if column.startswith("influence_")]
    assert "influence_loss_term" in columns and len(columns) >= 2
    for column in columns:
        ours, theirs = found[column][first], expected[column][first]
        error = np.abs(ours - theirs).max() / np.abs(theirs).max()
        assert error < 2e-3, f"{column} is off by {error:.1e}"


def test_a_last_mini_batch_without_scores_does_not_cost_the_others(folder: Path) -> None:
    """All its groups have equal rewards, say."""
    found = table_of(folder, "first_only", 2)
    rows = [row for row, mini_batch in enumerate(cases.PLAN) if mini_batch == 0]
    assert sorted(found.columns["position"]) == rows and len(rows) == 8 and found.facts["mini_batches"] == 1
    assert all(len(scores) for scores in found.columns["position"].values())


def test_the_layout_does_not_change_the_training(folder: Path) -> None:
    """Packed, padded, recomputed, offloaded, on one rank or two: the same weights after two optimizer steps."""
    expected = torch.load(folder / "packed.1" / "rank0.pt")["parameters"]
    for world, name in on_ranks(cases.LAYOUTS):
        found = torch.load(folder / f"{name}.{world}" / "rank0.pt")["parameters"]
        for key, value in expected.items():
            if value.dim() < 2:
                continue  # a bias of k_proj has no gradient but rounding, which Adam makes a whole step of
            two_steps = 2 * harness.LEARNING_RATE * value.numel() ** 0.5
            assert (found[key] - value).norm() < 0.05 * two_steps, (name, world, key)


def test_a_checkpoint_of_two_workers_opens_on_one(folder: Path) -> None:
    saved, opened = (torch.load(folder / f"checkpoint.{world}.0.pt") for world in (2, 1))
    for kind in ("parameters", "moments"):
        assert saved[kind].keys() == opened[kind].keys() and len(saved[kind]) > 20
        for key, value in saved[kind].items():
            assert torch.equal(opened[kind][key], value), f"{kind} {key}"
    assert saved["schedule"] == opened["schedule"] == 1


def test_a_checkpoint_becomes_a_plain_transformers_folder(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from gradtrace.integrations.verl.launch.checkpoints import export_policy

    policy = export_policy(folder)
    model = AutoModelForCausalLM.from_pretrained(policy)
    saved = torch.load(folder / "checkpoint.2.0.pt")["parameters"]
    for name, value in model.named_parameters():
        assert torch.equal(value, saved[name]), name
    assert AutoTokenizer.from_pretrained(policy)("1+2").input_ids


def test_a_checkpoint_becomes_one_of_the_embedded_loop(folder: Path) -> None:
    """With the optimizer's moments under their names: what `gradtrace verify` steps from."""
    from safetensors.torch import load_file

    from gradtrace.integrations.verl.launch.checkpoints import converted, steps_of
    from gradtrace.training.checkpoint import check_complete

    assert steps_of(folder) == [1]
    checkpoint = converted(folder, 1)
    check_complete(checkpoint)
    saved, moments = torch.load(folder / "checkpoint.2.0.pt"), load_file(checkpoint / "optimizer.safetensors")
    weights = load_file(checkpoint / "policy" / "model.safetensors")
    for index, name in enumerate(saved["parameters"]):
        assert torch.equal(weights[name], saved["parameters"][name]), name
        assert torch.equal(moments[f"exp_avg/{name}"], saved["moments"][index]), name
    assert float(moments[f"step/{name}"]) == 1


def test_ulysses_with_sdpa_is_refused(folder: Path) -> None:
    assert "wrong loss" in torch.load(folder / "refusals.pt")["ulysses"]


def test_small_steps_of_weights_that_are_stored_in_half_precision_are_refused(folder: Path) -> None:
    """Loss terms, blame and the probe: computing in bf16 is no obstacle, storing the weights so is."""
    said = torch.load(folder / "refusals.pt")["coarse"]
    assert "stored as torch.bfloat16" in said and "model_dtype=fp32" in said


def test_a_hung_rank_is_named(folder: Path) -> None:
    message = torch.load(folder / "refusals.pt")["hung"]
    assert "within 2 s" in message and "Ranks 1 failed" in message, message


# ---------------------------------------------------------------- the entropy probe

PROBES = [(world, name) for world in (1, 2) for name in cases.probes(world)]
SAME = [(world, name) for world, name in PROBES if name not in cases.PROBES_OF_OTHER_NUMBERS]


@pytest.mark.parametrize(("world", "name"), SAME)
def test_the_probe_is_that_of_the_embedded_loop(folder: Path, name: str, world: int) -> None:
    """On shards there are central differences in float32, there forward mode in float64. A difference moves numbers by
    1e-3 of their size, so rounding (6e-8 of it) leaves an error of some 1e-4 of the largest change of a token."""
    expected, expected_shares, expected_measured, expected_after = probe_reference.embedded(folder, name)
    found, shares, measured, after = probe_reference.of_ranks(folder, name, world)
    change = expected.d_entropies.abs().max()
    assert (found.base.entropies - expected.base.entropies).abs().max() < 1e-5
    assert (found.d_entropies - expected.d_entropies).abs().max() < 1e-3 * change
    assert (found.d_log_probs - expected.d_log_probs).abs().max() < 1e-3 * expected.d_log_probs.abs().max()
    assert (after.entropies - expected_after.entropies).abs().max() < 1e-3 * change
    assert (shares.tokens - expected_shares.tokens).abs().max() < 1e-3 * expected_shares.tokens.abs().max()
    for ours, theirs in (
        (found.change.value, expected.change.value),
        (measured.change.value, expected_measured.change.value),
        (found.change.stderr, expected.change.stderr),
        (shares.momentum, expected_shares.momentum),
        (shares.decay, expected_shares.decay),
        (shares.legacy, expected_shares.legacy),
    ):
        assert abs(ours - theirs) < 1e-3 * float(expected_shares.responses.abs().sum()), (ours, theirs)


@pytest.mark.parametrize(("world", "name"), PROBES)
def test_what_is_predicted_is_measured_and_is_the_sum_of_its_parts(folder: Path, name: str, world: int) -> None:
    """Also where the training itself is in bf16: the probe is not, and would not see the change otherwise."""
    found, shares, measured, _ = probe_reference.of_ranks(folder, name, world)
    scale = float(shares.responses.abs().sum())  # the change is a small rest of large shares
    assert abs(shares.legacy - found.change.value) < 1e-3 * scale
    assert abs(measured.change.value - found.change.value) < 0.02 * scale  # curvature of a step of 1e-3
    parts = float(shares.responses.sum()) + shares.momentum + shares.decay
    # The gradient of bf16 is not quite that of the terms.
    assert abs(parts - found.change.value) < (0.2 if name == "probe_bf16" else 2e-3) * scale


@pytest.mark.parametrize(("world", "name"), PROBES)
def test_training_does_not_notice_the_probe(folder: Path, name: str, world: int) -> None:
    for rank in range(world):
        made = torch.load(folder / f"{name}.{world}" / f"rank{rank}.pt")
        for kind in ("parameters", "moments"):
            for key, value in made[False][kind].items():
                assert torch.equal(made[True][kind][key], value), f"{kind} {key}"
        assert torch.equal(made[True]["random"], made[False]["random"])
