"""Traces inside the training loop: true scores, files that say what they hold, and weights that never notice."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from gradtrace import open_run
from gradtrace.algorithms import LossInputs, LossOutputs, accepted, high_entropy_tokens, register_policy_loss
from gradtrace.algorithms.registry import policy_losses
from gradtrace.attribution import InfluenceConfig, InfluenceTracer
from gradtrace.attribution.factors.objectives import Passes
from gradtrace.batch import RolloutBatch
from gradtrace.errors import GradtraceError
from gradtrace.instruments.influence.plan import status_by_contrast
from gradtrace.policy.microbatch import Sequences
from gradtrace.policy.policy import Policy
from gradtrace.trace.columns import GroupStatus, Selection
from gradtrace.training.host import open_instruments
from gradtrace.training.run import train
from tests.training import small

OLDER = tuple(
    f"trainer.influence_trace.{knob}"
    for knob in (
        "hessian_mode=inverse",
        "reg_rule=per_dimension",
        "credit=position",
        "target=output_function",
    )
)
"""The original's definition, which the engine's own tests hold against brute force."""
EXACT = ("trainer.influence_trace.enable=true", *OLDER)
ONE_STEP = ("trainer.total_steps=1", "trainer.validation.every=0")


def influence(*knobs: str) -> list[str]:
    return [f"trainer.influence_trace.{knob}" for knob in knobs]


def run(folder: Path, *more: str) -> Path:
    return train(small.config(folder, *more)).run_dir


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "policy" / "model.safetensors")


def columns(run_dir: Path, kind: str = "influence_trace", step: int = 1) -> dict[str, np.ndarray]:
    with np.load(run_dir / kind / "steps" / f"step_{step:06d}.npz", allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def meta(run_dir: Path) -> dict[str, object]:
    return json.loads(columns(run_dir)["meta_json"].tobytes())


# ---------------------------------------------------------------- tracing changes nothing


@pytest.mark.parametrize(
    "extra",
    [
        (),
        tuple(influence("credit=both", "hessian_source=token")),
        tuple(influence("output_function=log_prob")),
        ("algorithm.policy_loss=archer", "actor.epochs=2"),
    ],
    ids=["plain", "loss-term", "own-pass", "archer"],
)
def test_weights_after_three_steps_are_bit_identical_with_traces_on_and_off(
    tmp_path: Path, extra: tuple[str, ...]
) -> None:
    common = ("trainer.total_steps=3", *[knob for knob in extra if "influence_trace" not in knob])
    plain = weights(run(tmp_path, *common))
    traced_dir = run(tmp_path, *common, *EXACT, *extra, "trainer.entropy_trace.enable=true")
    traced = weights(traced_dir)
    assert open_run(traced_dir).steps("influence_trace") == [1, 2, 3]
    for name, tensor in plain.items():
        assert torch.equal(tensor, traced[name]), name


# ---------------------------------------------------------------- the scores are the engine's


def engine_scores(policy: Policy, batch: RolloutBatch, rows: torch.Tensor, config: InfluenceConfig) -> list[np.ndarray]:
    """Scores of F = Σ A ℓ on these rows, from one padded pass of its own."""
    micro = Sequences.of(batch).padded(rows)
    with InfluenceTracer(policy.model, config=config) as tracer:
        log_probs, _ = policy.statistics(micro)
        advantages = batch.advantages[rows, : micro.mask.shape[1]][micro.mask]
        with tracer.capture(response=torch.arange(len(rows)), tokens=micro.tokens):
            (log_probs * advantages).sum().backward()
        trace = tracer.score(
            accepted=accepted(batch.rewards, batch.group)[rows],
            group=batch.group[rows],
            sign=torch.where(batch.advantages[rows, 0] < 0, -1.0, 1.0),
        )
    policy.model.zero_grad()
    return [scores.numpy() for scores in trace.position_scores]


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "fixed_length"])
@pytest.mark.parametrize("packing", ["never", "always"])
@pytest.mark.parametrize("output", ["training_loss", "log_prob_advantage"])
def test_scores_in_the_loop_equal_the_engine_on_the_same_batch(
    tmp_path: Path, aggregation: str, packing: str, output: str
) -> None:
    """On policy the training loss is Σ A ℓ up to its normaliser, however tokens were aggregated and packed."""
    more = (
        *(f"algorithm.aggregation={aggregation}", f"actor.packing={packing}", "actor.token_budget=40"),
        *("actor.mini_batch_size=0", *EXACT, *ONE_STEP, *influence(f"output_function={output}")),
    )
    trainer = small.trainer(tmp_path, *more)
    trainer.steps = open_instruments(trainer.components, trainer.files, print)
    trainer.steps.start(0)
    timer_batch, _ = trainer.experience.collect(trainer.components.generators["rollout"], _timer())
    before = {name: p.detach().clone() for name, p in trainer.components.policy.model.named_parameters()}
    batch, metrics = trainer.train_step(timer_batch, 1, _timer())
    trainer.steps.close()
    with torch.no_grad():
        for name, p in trainer.components.policy.model.named_parameters():
            p.copy_(before[name])
    step = columns(trainer.files.path)
    rows = torch.from_numpy(step["row"].astype(np.int64))
    assert len(rows) == metrics["influence_trace/selected_responses"] > 0
    expected = np.concatenate(
        engine_scores(trainer.components.policy, batch, rows, InfluenceConfig.older(projection_dim_factor=0))
    )
    scale = np.abs(expected).max()
    np.testing.assert_allclose(step["influence_position"] / scale, expected / scale, atol=2e-4)


def _timer() -> object:
    from gradtrace.metrics import Timer

    return Timer()


@pytest.mark.parametrize("output", ["training_loss", "log_prob_advantage", "log_prob_reward", "log_prob"])
@pytest.mark.parametrize("extra", [(), ("algorithm.entropy_coef=0.01", "algorithm.kl_coef=0.1")], ids=["", "kl"])
def test_both_credits_add_up_to_the_same_total(tmp_path: Path, output: str, extra: tuple[str, ...]) -> None:
    knobs = influence("credit=both", "response_reduction=sum", "hessian_mode=identity", f"output_function={output}")
    step = columns(run(tmp_path, *EXACT, *ONE_STEP, *knobs, *extra))
    assert set(step["optimizer_step"]) == {0, 1}
    owner = np.repeat(np.arange(len(step["row"])), step["length"])
    position = np.bincount(owner, step["influence_position"]) + step["prompt_influence"]
    loss_term = np.bincount(owner, step["influence_loss_term"])
    assert np.abs(position).max() > 0
    np.testing.assert_allclose(position, loss_term, rtol=2e-3, atol=2e-3 * np.abs(position).max())


def test_riding_objectives_equal_their_own_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On policy `log_prob` rides on the training backward; a pass of its own must give the same scores."""
    from gradtrace.instruments.influence import capture as module

    knobs = influence("output_function=log_prob", "credit=both", "hessian_mode=identity")
    riding = columns(run(tmp_path, *EXACT, *ONE_STEP, *knobs))
    asked = []

    def never_ride(*args: object) -> Passes:
        asked.append(args)
        return Passes(step_rides=False, target_rides=True)

    monkeypatch.setattr(module, "plan_passes", never_ride)
    own = columns(run(tmp_path, *EXACT, *ONE_STEP, *knobs))
    assert asked
    for name in ("influence_position", "influence_loss_term", "prompt_influence"):
        np.testing.assert_allclose(riding[name], own[name], rtol=2e-3, atol=2e-3 * np.abs(own[name]).max())


def test_a_loss_that_does_not_claim_to_be_plain_gets_a_pass_of_its_own(tmp_path: Path) -> None:
    """A loss on the tokens of high entropy alone is not −A∇ℓ at ratio 1: riding on it would score wrongly."""

    @register_policy_loss("entropy_masked", needs=("entropies",))
    def entropy_masked(inputs: LossInputs, *, quantile: float = 0.8) -> LossOutputs:
        assert inputs.entropies is not None
        high = high_entropy_tokens(inputs.entropies, inputs.mask, quantile)
        return LossOutputs(torch.where(high, -inputs.advantages * inputs.log_probs, 0.0))

    try:
        knobs = [
            *EXACT,
            *ONE_STEP,
            *influence("output_function=log_prob_advantage"),
            "actor.mini_batch_size=0",
        ]
        plain = columns(run(tmp_path, *knobs))
        masked = columns(run(tmp_path, *knobs, "algorithm.policy_loss=entropy_masked"))
    finally:
        del policy_losses._entries["entropy_masked"]
    expected = plain["influence_position"]
    np.testing.assert_allclose(masked["influence_position"], expected, rtol=2e-3, atol=2e-3 * np.abs(expected).max())


def test_output_functions_differ_off_policy_and_agree_on_policy(tmp_path: Path) -> None:
    """In the second mini-batch ratios have left 1: `training_loss` and `log_prob_advantage` must part there."""
    by_output = {
        output: columns(
            run(tmp_path, *EXACT, *ONE_STEP, *influence("hessian_mode=identity", f"output_function={output}"))
        )
        for output in ("training_loss", "log_prob_advantage")
    }
    first = by_output["training_loss"]
    late = np.repeat(first["optimizer_step"], first["length"]) > 0
    ours, theirs = (by_output[output]["influence_position"] for output in by_output)
    np.testing.assert_allclose(ours[~late], theirs[~late], rtol=1e-3, atol=1e-5)
    assert not np.allclose(ours[late], theirs[late], rtol=1e-3, atol=1e-5)


# ---------------------------------------------------------------- the files say what they hold


def test_every_group_has_a_status_and_every_scored_response_its_tokens(tmp_path: Path) -> None:
    run_dir = run(tmp_path, *EXACT, *ONE_STEP, "trainer.entropy_trace.enable=true")
    step, whole = columns(run_dir), columns(run_dir, "entropy_trace")
    assert len(step["group_id"]) == 4 and len(whole["row"]) == 12
    scored = step["group_status"] == GroupStatus.SCORED
    assert set(step["group"]) == set(np.flatnonzero(scored))
    for r, row in enumerate(step["row"]):
        ours = slice(step["token_offsets"][r], step["token_offsets"][r + 1])
        theirs = slice(whole["token_offsets"][row], whole["token_offsets"][row + 1])
        for name in ("token_id", "entropy", "log_prob"):
            np.testing.assert_array_equal(step[name][ours], whole[name][theirs])
    assert step["captured"].all()
    said = meta(run_dir)
    assert said["credit"] == ["position"] and "positive" in str(said["sign"])


def test_entropy_and_log_prob_are_those_of_the_sampling_policy(tmp_path: Path) -> None:
    """Also of rows in later mini-batches: the sampler's own log-probs are the witness."""
    trainer = small.trainer(tmp_path, *ONE_STEP, "trainer.entropy_trace.enable=true")
    trainer.steps = open_instruments(trainer.components, trainer.files, print)
    rollout, _ = trainer.experience.collect(trainer.components.generators["rollout"], _timer())
    trainer.train_step(rollout, 1, _timer())
    trainer.steps.close()
    step = columns(trainer.files.path, "entropy_trace")
    np.testing.assert_allclose(step["log_prob"], rollout.sampler_log_probs[rollout.response_mask].numpy(), atol=1e-4)
    assert (step["entropy"] > 0).all()


def test_max_prompts_per_step_caps_and_says_so(tmp_path: Path) -> None:
    run_dir = run(tmp_path, *EXACT, *ONE_STEP, *influence("max_prompts_per_step=1"))
    step = columns(run_dir)
    assert (step["group_status"] == GroupStatus.SCORED).sum() == 1
    assert (step["group_status"] == GroupStatus.OVER_PROMPT_CAP).sum() >= 1
    record = small.metrics(run_dir)[-1]
    assert record["influence_trace/selected_prompts"] == 1
    assert record["influence_trace/debug_groups_over_cap"] == (step["group_status"] == 2).sum()


def test_groups_that_a_selection_left_without_contrast_take_no_place() -> None:
    batch = small.random_batch(groups=3, n=2).replace(rewards=torch.tensor([1.0, 0, 1, 0, 1, 0]))
    dropped = torch.tensor([True, True, False, True, True, True])  # group 1 has lost its accepted response
    assert status_by_contrast(batch, 0).tolist() == [GroupStatus.SCORED] * 3
    scored, constant = GroupStatus.SCORED, GroupStatus.CONSTANT_REWARD
    assert status_by_contrast(batch.replace(kept=dropped), 2).tolist() == [scored, constant, scored]


def test_constant_groups_are_named_and_a_step_without_contrast_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "flat.py").write_text("def flat(response, item):\n    return 1.0\n")
    run_dir = run(tmp_path, *EXACT, *ONE_STEP, f"reward.path={tmp_path / 'flat.py'}:flat")
    step = columns(run_dir)
    assert (step["group_status"] == GroupStatus.CONSTANT_REWARD).all() and len(step["row"]) == 0
    record = small.metrics(run_dir)[-1]
    assert record["influence_trace/uid_constant"] == 4 and record["influence_trace/rows_emitted"] == 0


def test_max_tokens_marks_what_was_not_captured(tmp_path: Path) -> None:
    step = columns(run(tmp_path, *EXACT, *ONE_STEP, *influence("max_tokens_per_response=3")))
    index = np.concatenate([np.arange(length) for length in step["length"]])
    np.testing.assert_array_equal(step["captured"], index < 3)
    assert (step["influence_position"][index >= 3] == 0).all()
    long = step["length"] > 3
    assert (step["selection"][long] == Selection.CUT_AT_TOKEN_CAP).all()


def test_pairwise_scores_add_up_to_the_token_scores(tmp_path: Path) -> None:
    run_dir = run(tmp_path, *EXACT, *ONE_STEP, *influence("contrastive_agg=sum"))
    step = open_run(run_dir).step("influence_trace", 1)
    arrays = columns(run_dir)
    for r in range(len(arrays["row"])):
        block = step.pairwise(r)
        members = arrays["pairwise_member"][
            arrays["pairwise_member_offsets"][r] : arrays["pairwise_member_offsets"][r + 1]
        ]
        assert set(arrays["group"][members]) == {arrays["group"][r]}
        sign = np.where(arrays["accepted"][members], 1.0, -1.0)  # contrastive_agg=sum
        values = block.scores
        tokens = slice(arrays["token_offsets"][r], arrays["token_offsets"][r + 1])
        total = values @ sign
        np.testing.assert_allclose(
            total, arrays["influence_position"][tokens], rtol=1e-3, atol=1e-4 * np.abs(values).max()
        )


def test_pairwise_stays_within_its_budget(tmp_path: Path) -> None:
    assert "pairwise" not in columns(run(tmp_path, *EXACT, *ONE_STEP, *influence("pairwise_max_mb=0")))
    run_dir = run(tmp_path, *EXACT, *ONE_STEP, *influence("pairwise_max_mb=0.0003"))
    step = columns(run_dir)
    assert 0 < step["pairwise"].nbytes <= 0.0003 * 2**20
    assert meta(run_dir)["pairwise_responses"] < len(step["row"])


def test_write_every_skips_steps(tmp_path: Path) -> None:
    more = (
        *influence("write_every=2"),
        "trainer.entropy_trace.enable=true",
        "trainer.entropy_trace.write_every=3",
    )
    run_dir = run(tmp_path, *EXACT, *more)
    assert open_run(run_dir).steps("influence_trace") == [2, 4]
    assert open_run(run_dir).steps("entropy_trace") == [3]


def test_resumed_traces_are_those_of_an_uninterrupted_run(tmp_path: Path) -> None:
    more = (
        *EXACT,
        "trainer.entropy_trace.enable=true",
        "trainer.checkpoint.every=2",
        *influence("credit=both"),
    )
    straight = run(tmp_path, *more)
    broken = run(tmp_path, *more, "trainer.total_steps=3")  # its last checkpoint is step 3

    train(small.resume(broken, "trainer.total_steps=4"))
    for kind in ("entropy_trace", "influence_trace"):
        for step in range(1, 5):
            ours, theirs = columns(broken, kind, step), columns(straight, kind, step)
            assert ours.keys() == theirs.keys()
            for name in ours:
                np.testing.assert_array_equal(ours[name], theirs[name], err_msg=f"{kind} {step} {name}")


# ---------------------------------------------------------------- models and layers


def test_lora_adapters_are_traced(tmp_path: Path) -> None:
    run_dir = run(tmp_path, *EXACT, *ONE_STEP, "model.lora.rank=2")
    assert small.metrics(run_dir)[-1]["influence_trace/debug_modules"] == 14  # A and B of seven layers
    assert len(columns(run_dir)["row"]) > 0


def test_the_output_head_that_sees_only_responses_can_be_traced(tmp_path: Path) -> None:
    """Tied to the embedding, which sees every position; both are one block."""
    knobs = influence("module_name_filter=[lm_head]", "credit=both", "hessian_mode=identity", "response_reduction=sum")
    step = columns(run(tmp_path, *EXACT, *ONE_STEP, *knobs))
    owner = np.repeat(np.arange(len(step["row"])), step["length"])
    position = np.bincount(owner, step["influence_position"]) + step["prompt_influence"]
    loss_term = np.bincount(owner, step["influence_loss_term"])
    # torch gives the embedding's padding row no gradient in reverse mode, and forward mode does not know that: a
    # response in which the policy sampled the padding token (0) has two different totals.
    plain = np.bincount(owner, step["token_id"] == 0) == 0
    assert plain.sum() > 2
    scale = np.abs(position).max()
    np.testing.assert_allclose(position[plain], loss_term[plain], rtol=2e-3, atol=2e-3 * scale)


def test_gradient_checkpointing_changes_no_score(tmp_path: Path) -> None:
    plain = columns(run(tmp_path, *EXACT, *ONE_STEP))
    checkpointed = columns(run(tmp_path, *EXACT, *ONE_STEP, "model.gradient_checkpointing=true"))
    np.testing.assert_allclose(plain["influence_position"], checkpointed["influence_position"], rtol=1e-4, atol=1e-6)


# ---------------------------------------------------------------- failures


def test_a_failing_trace_is_shown_and_counted_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(self: InfluenceTracer, *args: object, **kwargs: object) -> None:
        raise MemoryError("no memory left for the trace")

    plain = weights(run(tmp_path))
    monkeypatch.setattr(InfluenceTracer, "score", fails)
    run_dir = run(tmp_path, *EXACT)
    assert small.metrics(run_dir)[-1]["influence_trace/debug_errors"] == 4
    assert all(torch.equal(tensor, plain[name]) for name, tensor in weights(run_dir).items())
    with pytest.raises(MemoryError):
        run(tmp_path, *EXACT, *influence("on_error=raise"))


@pytest.mark.parametrize("inside", ["receive", "finish"])
def test_a_failure_inside_the_backward_pass_does_not_reach_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: str
) -> None:
    from gradtrace.attribution.factors.one_pass import OnePass

    def fails(*args: object) -> None:
        raise RuntimeError("out of memory in a hook")

    plain = weights(run(tmp_path))
    monkeypatch.setattr(OnePass, inside, fails)
    run_dir = run(tmp_path, *EXACT)
    assert small.metrics(run_dir)[-1]["influence_trace/debug_errors"] == 4
    assert all(torch.equal(tensor, plain[name]) for name, tensor in weights(run_dir).items())


def test_groups_of_a_skipped_update_are_marked_as_not_finite(tmp_path: Path) -> None:
    trainer = small.trainer(tmp_path, *EXACT, *ONE_STEP)
    trainer.steps = open_instruments(trainer.components, trainer.files, print)
    batch, _ = trainer.experience.collect(trainer.components.generators["rollout"], _timer())
    calls: list[int] = []

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return gradient * float("nan") if len(calls) == 1 else gradient

    trainer.components.policy.model.get_input_embeddings().weight.register_hook(spoil)
    _, metrics = trainer.train_step(batch, 1, _timer())
    trainer.steps.close()
    assert metrics["actor/skipped_updates"] == 1
    status = columns(trainer.files.path)["group_status"]
    assert (status == GroupStatus.NON_FINITE).sum() == 2 and (status == GroupStatus.SCORED).sum() == 2


def test_a_filter_that_matches_nothing_stops_the_run_before_it_starts(tmp_path: Path) -> None:
    with pytest.raises(GradtraceError, match="matches none"):
        run(tmp_path, *EXACT, *influence("module_name_filter=[c_attn]"))
