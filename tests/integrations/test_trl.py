"""The trace of a real GRPOTrainer: equal to our engine on the same batch, and without any effect on training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor
from trl import GRPOTrainer

import gradtrace
from gradtrace.attribution import InfluenceConfig
from gradtrace.errors import GradtraceError
from gradtrace.instruments.tracin import TracinConfig
from gradtrace.integrations.trl import TracedGRPOTrainer, attach
from gradtrace.viewer.catalog import RunCatalog, state_of
from gradtrace.viewer.group import group_payload
from tests.integrations.trl_reference import EXACT, POSITION, assert_equal, engine_scores, step_of, train
from tests.integrations.trl_runs import grpo_trainer, reward, weights
from tests.training.small import model as small_model
from tests.training.test_one_writer import writer

LORA = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)}
SETUPS: dict[str, dict[str, Any]] = {
    "accumulation": {},
    "one_slice": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1},
    "checkpointing": {"gradient_checkpointing": True},
    "reentrant_checkpointing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "lora": {"more": LORA},
    "split_over_steps": {
        "steps_per_generation": 4,
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1,
    },
    "several_passes": {
        "num_iterations": 2,
        "max_steps": 2,
        "steps_per_generation": 2,
        "gradient_accumulation_steps": 1,
    },
    "two_rollouts_a_step": {"steps_per_generation": 2, "gradient_accumulation_steps": 4},
    "kl": {"beta": 0.1},
    "bf16": {"bf16": True},
    "evaluation": {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "per_device_eval_batch_size": 4,
        "more": {"eval_dataset": Dataset.from_dict({"prompt": ["5+5=", "2*2+1="]})},
    },
    "entropy_bonus": {
        "entropy_coef": 0.1,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
    },
}


@pytest.mark.parametrize("name", [name for name in SETUPS if name != "bf16"])
def test_scores_equal_the_engines_on_the_same_batch(name: str, tmp_path: Path) -> None:
    model = train(tmp_path, SETUPS[name])
    step = step_of(tmp_path)
    assert step.n_responses == 8 and len(step["influence_position"]) == step["length"].sum() > 0
    # KL: at the reference itself its gradient is 0, so the objective is the same.
    assert_equal(step, engine_scores(model, step, EXACT, bonus=SETUPS[name].get("entropy_coef", 0.0)))


@pytest.mark.parametrize(
    ("name", "output_function"),
    [
        ("accumulation", "log_prob"),
        ("kl", "log_prob"),
        ("kl", "log_prob_advantage"),
        ("kl", "log_prob_reward"),
    ],
)
def test_every_objective_equals_the_engines(name: str, output_function: Any, tmp_path: Path) -> None:
    """With KL the training pass is not the objective: the trace makes a pass of its own, left-padded."""
    config = InfluenceConfig.older(projection_dim_factor=0, credit="both", output_function=output_function)
    model = train(tmp_path, SETUPS[name], influence=config)
    assert_equal(step_of(tmp_path), engine_scores(model, step_of(tmp_path), config))


def test_entropies_and_log_probs_are_those_of_the_sampling_weights(tmp_path: Path) -> None:
    """Also in a rollout that is split over optimizer steps: then they come from TRL's pass after the generation."""
    setup = SETUPS["split_over_steps"]
    trainer = grpo_trainer(tmp_path, dtype=torch.float64, temperature=0.7, **setup)
    before = small_model(torch.float64, tie_word_embeddings=False)  # of the same seed, untouched by TRL
    attach(trainer, tmp_path / "run", influence=POSITION, on_error="raise")
    trainer.train()
    step = step_of(tmp_path, 1, "entropy_trace")
    assert step.n_responses == 8
    for r in range(8):
        prompt = step["prompt_ids"][
            step["prompt_offsets"][step["group"][r]] : step["prompt_offsets"][step["group"][r] + 1]
        ]
        response = step.tokens(r)["token_id"]
        ids = torch.tensor(np.concatenate([prompt, response])).long()[None]
        with torch.no_grad():
            log_probs = torch.log_softmax(before(input_ids=ids).logits[0, len(prompt) - 1 : -1] / 0.7, -1)
        chosen = log_probs.gather(1, ids[0, len(prompt) :, None]).squeeze(1)
        np.testing.assert_allclose(step.tokens(r)["log_prob"], chosen.numpy(), atol=1e-5)
        np.testing.assert_allclose(step.tokens(r)["entropy"], -(log_probs.exp() * log_probs).sum(1).numpy(), atol=1e-5)
    assert set(step_of(tmp_path)["optimizer_step"]) == {0, 1, 2, 3}


@pytest.mark.parametrize("name", ["reentrant_checkpointing", "lora", "split_over_steps", "kl", "bf16", "evaluation"])
def test_tracing_changes_nothing(name: str, tmp_path: Path) -> None:
    runs = []
    for traced in (False, True):
        trainer = grpo_trainer(tmp_path / str(traced), **SETUPS[name])
        if traced:
            objective = InfluenceConfig.older(output_function="log_prob", credit="both")  # with passes of its own
            attach(trainer, tmp_path / "run", influence=objective, on_error="raise")
        trainer.train()
        runs.append((weights(trainer), torch.get_rng_state(), trainer.state.log_history))
    assert all(torch.equal(runs[1][0][key], value) for key, value in runs[0][0].items())
    assert torch.equal(runs[0][1], runs[1][1])
    assert [log.get("grad_norm") for log in runs[0][2]] == [log.get("grad_norm") for log in runs[1][2]]


@pytest.mark.parametrize("name", ["accumulation", "lora", "kl"])
def test_checks_of_the_scores_change_nothing_and_stand_in_the_metrics(name: str, tmp_path: Path) -> None:
    runs = []
    for every in (0, 1):
        trainer = grpo_trainer(tmp_path / str(every), **SETUPS[name])
        attach(trainer, tmp_path / f"run{every}", verify_every=every, on_error="raise")
        trainer.train()
        runs.append((weights(trainer), torch.get_rng_state()))
    assert all(torch.equal(runs[1][0][key], value) for key, value in runs[0][0].items())
    assert torch.equal(runs[0][1], runs[1][1])
    rows = gradtrace.open_run(tmp_path / "run1").metrics()[0]
    assert all(-1 <= row["influence_trace/validity"] <= 1 for row in rows)
    assert all("influence_trace/validity_baseline" in row for row in rows)


def test_checks_of_several_weights_of_coarse_ones_and_of_other_scores_are_refused_with_the_reason(
    tmp_path: Path,
) -> None:
    trainer = grpo_trainer(tmp_path, **SETUPS["split_over_steps"])
    with pytest.raises(GradtraceError, match="verify_every=1 holds the default score against real optimizer steps"):
        attach(trainer, tmp_path / "run", influence=POSITION, verify_every=1)
    attach(trainer, tmp_path / "run", verify_every=1)
    with pytest.raises(GradtraceError, match="no gradient is of a whole rollout"):
        trainer.train()
    assert not (tmp_path / "run").exists()
    trainer = grpo_trainer(tmp_path / "bf16", dtype=torch.bfloat16)
    attach(trainer, tmp_path / "coarse", verify_every=1)
    with pytest.raises(GradtraceError, match="run `gradtrace verify` on a checkpoint"):
        trainer.train()


def test_the_run_opens_in_the_viewer_with_the_metrics_users_know(tmp_path: Path) -> None:
    trainer = grpo_trainer(
        tmp_path,
        cls=TracedGRPOTrainer,
        more={"run_dir": tmp_path / "runs" / "mine", "influence": EXACT},
        per_device_train_batch_size=8,
        gradient_accumulation_steps=1,
        max_steps=3,
    )
    trainer.train()
    run = gradtrace.open_run(tmp_path / "runs" / "mine")
    assert run.steps("influence_trace") == run.steps("entropy_trace") == [1, 2, 3]
    records, _ = run.metrics()
    assert [record["step"] for record in records] == [1, 2, 3]
    for name in ("critic/rewards/mean", "actor/entropy", "actor/grad_norm", "response_length/mean", "timing_s/step",
                 "influence_trace/rows_emitted"):  # fmt: skip
        assert all(name in record for record in records), name
    for record, log in zip(records, trainer.state.log_history, strict=False):
        assert record["critic/rewards/mean"] == pytest.approx(log["reward"])
        assert record["actor/entropy"] == pytest.approx(log["entropy"], rel=1e-5)
    catalog = RunCatalog([run.path], None)
    served = catalog.refresh()[0]
    view = catalog.step_view(served, 1)
    assert view is not None
    payload = group_payload(view, 0, served.vocabulary)
    assert len(payload["responses"]) == 4


def test_a_subclass_of_the_users_keeps_its_own_methods(tmp_path: Path) -> None:
    class Mine(GRPOTrainer):
        calls = 0

        def _compute_loss(self, *args: Any) -> Tensor:
            type(self).calls += 1
            return super()._compute_loss(*args)

    trainer = grpo_trainer(tmp_path, cls=Mine, max_steps=1)
    attach(trainer, tmp_path / "run", on_error="raise")
    assert isinstance(trainer, Mine)
    trainer.train()
    assert Mine.calls + type(trainer).calls > 0 and step_of(tmp_path).n_responses == 8


def test_completions_without_a_reward_and_masked_ones_stay_out_of_the_contrast(tmp_path: Path) -> None:
    def sometimes(completions: list[str], **others: Any) -> list[float | None]:
        return [None if i % 4 == 1 else value for i, value in enumerate(reward(completions))]

    trainer = grpo_trainer(tmp_path, reward_funcs=sometimes, mask_truncated_completions=True, max_completion_length=12)
    attach(trainer, tmp_path / "run", influence=EXACT, on_error="raise")
    trainer.train()
    for number in (1, 2):
        rows = step_of(tmp_path, number)["row"]
        assert not np.isin(rows % 4, 1).any()
        assert (step_of(tmp_path, number, "entropy_trace")["length"][rows] > 0).all()


def test_a_run_folder_is_never_overwritten_and_a_resumed_run_goes_on(tmp_path: Path) -> None:
    trainer = grpo_trainer(tmp_path, max_steps=2, save_strategy="steps", save_steps=1)
    attach(trainer, tmp_path / "run", on_error="raise")
    trainer.train()
    again = grpo_trainer(tmp_path)
    attach(again, tmp_path / "run")
    with pytest.raises(GradtraceError, match="holds a run already"):
        again.train()
    resumed = grpo_trainer(tmp_path, max_steps=3)
    attach(resumed, tmp_path / "run", on_error="raise")
    resumed.train(resume_from_checkpoint=str(tmp_path / "trl" / "checkpoint-1"))
    run = gradtrace.open_run(tmp_path / "run")
    assert run.steps("influence_trace") == [1, 2, 3]
    assert [record["step"] for record in run.metrics()[0]] == [1, 2, 3] and run.verify() == []


def test_a_failing_trace_is_reported_and_training_goes_on(tmp_path: Path, caplog: Any) -> None:
    def broken(item: dict[str, Any], response: list[int]) -> Any:
        raise RuntimeError("no truth today")

    trainer = grpo_trainer(tmp_path)
    attach(trainer, tmp_path / "run", truth=broken)
    trainer.train()
    assert trainer.state.global_step == 2 and trainer.gradtrace.errors == 2
    assert "no truth today" in caplog.text


def selection_run(folder: Path, selection: TracinConfig, **options: Any) -> Any:
    trainer = grpo_trainer(folder, **options)
    attach(trainer, folder / "run", influence=POSITION, selection=selection, on_error="raise")
    trainer.train()
    return trainer


@pytest.mark.parametrize("name", ["accumulation", "checkpointing", "lora", "split_over_steps"])
def test_selection_trains_on_the_kept_completions_alone(name: str, tmp_path: Path) -> None:
    setup = {"max_steps": 3, **SETUPS[name]}
    setup["more"] = {
        **setup.get("more", {}),
        "eval_dataset": Dataset.from_dict({"prompt": ["5+5=", "2*2+1="]}),
    }
    selection_run(tmp_path, TracinConfig(selection="top_fraction", top_fraction=0.5, diagnose_every=0), **setup)
    run = gradtrace.open_run(tmp_path / "run")
    assert run.verify() == [] and run.steps("tracin")[0] == 1
    step = run.step("tracin", 1)
    scores, kept = step["score"][:8], step["kept"][:8]  # behind them: the validation responses
    assert np.isfinite(scores).all() and kept.sum() == 4 and np.isnan(step["score"][8:]).all()
    assert scores[kept].min() >= scores[~kept].max()
    influence, entropy = run.step("influence_trace", 1), run.step("entropy_trace", 1)
    assert set(influence["row"]) <= set(np.flatnonzero(kept))
    assert (entropy["length"] > 0).all() and (entropy["entropy"] > 0).all(), "dropped completions are shown too"


def test_keeping_everything_changes_nothing_and_a_dropped_completion_has_no_gradient(tmp_path: Path) -> None:
    def one_step(folder: Path, selection: TracinConfig | None) -> Any:
        options: dict[str, Any] = {
            "max_steps": 1,
            "optim": "sgd",
            "max_grad_norm": 0.0,
            "loss_type": "dr_grpo",
        }
        validation = Dataset.from_dict({"prompt": ["5+5=", "2*2+1=", "9-9="]})
        trainer = grpo_trainer(folder, dtype=torch.float64, more={"eval_dataset": validation}, **options)
        attach(trainer, folder / "run", influence=None, selection=selection, on_error="raise")
        trainer.train()
        return weights(trainer)

    score = {"preconditioner": "none", "diagnose_every": 0}
    plain = one_step(tmp_path / "plain", None)
    scored = one_step(tmp_path / "scored", TracinConfig(selection="none", **score))
    assert all(torch.equal(plain[name], value) for name, value in scored.items())
    half = one_step(tmp_path / "half", TracinConfig(selection="top_fraction", **score))
    step = gradtrace.open_run(tmp_path / "half" / "run").step("tracin", 1)
    model = small_model(torch.float64, tie_word_embeddings=False)
    total = torch.zeros((), dtype=torch.float64)
    for r in np.flatnonzero(step["kept"]):
        prompt = step.group(int(step["group"][r])).prompt_ids
        ids = torch.tensor(np.concatenate([prompt, step.tokens(int(r))["token_id"]])).long()[None]
        log_probs = torch.log_softmax(model(input_ids=ids).logits[0, len(prompt) - 1 : -1], -1)
        total = total - float(step["advantage"][r]) * log_probs.gather(1, ids[0, len(prompt) :, None]).sum()
    (total / (8 * 6)).backward()  # dr_grpo: completions · max_completion_length, two slices of 4 accumulated
    for name, parameter in model.named_parameters():
        moved, expected = half[name] - parameter.detach(), -1e-2 * parameter.grad
        assert float((moved - expected).norm()) <= 1e-5 * float(expected.norm()) + 1e-12, name


def test_evaluations_stand_in_the_metrics_of_their_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, SETUPS["evaluation"])
    records = gradtrace.open_run(tmp_path / "run").metrics()[0]
    assert any("trl/eval_reward" in record and "critic/rewards/mean" in record for record in records)
    assert f"gradtrace view {tmp_path / 'run'}" in capsys.readouterr().out


def test_one_process_writes_the_run_which_is_over_when_training_is(tmp_path: Path) -> None:
    process = writer(tmp_path / "run")
    trainer = grpo_trainer(tmp_path, max_steps=1)
    attach(trainer, tmp_path / "run", on_error="raise")
    trainer.gradtrace.settings.path.joinpath("metrics.jsonl").write_bytes(b"")  # so that it is not a run already
    with pytest.raises(GradtraceError, match=f"written by process {process.pid}"):
        trainer.train()
    process.kill()
    process.communicate()
    trainer.train()
    assert state_of(gradtrace.open_run(tmp_path / "run")) == "finished"


def test_failed_start_leaves_no_folder_and_run_log_has_what_went_wrong(tmp_path: Path) -> None:
    trainer = grpo_trainer(tmp_path, max_steps=1)
    attach(trainer, tmp_path / "run", influence=InfluenceConfig.older(module_name_filter=("no_such_layer",)))
    with pytest.raises(GradtraceError, match="no_such_layer"):
        trainer.train()
    assert not (tmp_path / "run").exists()

    def broken(item: dict[str, Any], response: list[int]) -> Any:
        raise RuntimeError("no truth today")

    trainer = grpo_trainer(tmp_path, max_steps=1)
    attach(trainer, tmp_path / "run", truth=broken)
    trainer.train()
    assert "no truth today" in (tmp_path / "run" / "run.log").read_text()


def test_blame_shares_of_a_rollout_add_up_to_one(tmp_path: Path) -> None:
    trainer = grpo_trainer(tmp_path, dtype=torch.float64, max_grad_norm=0.01, beta=0.1)
    attach(trainer, tmp_path / "run", influence=None, blame_every=1, on_error="raise")
    trainer.train()
    step = gradtrace.open_run(tmp_path / "run").step("blame", 2)
    (update,) = step.meta["updates"]
    assert update["clip_factor"] < 1 and abs(update["residual"]) < 1e-5
    assert step["grad_share"].sum() == pytest.approx(1.0, abs=1e-5)
    first = gradtrace.open_run(tmp_path / "run").metrics()[0][0]
    assert {"findings/total", "findings/gradient_spike", "batch/repetition"} <= first.keys()
    logged = [log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log]
    assert update["grad_norm"] == pytest.approx(logged[1], rel=1e-4)


def test_blame_is_refused_in_words_where_no_gradient_is_of_a_whole_rollout(tmp_path: Path, capsys: Any) -> None:
    trainer = grpo_trainer(tmp_path, steps_per_generation=4)
    attach(trainer, tmp_path / "run", influence=None, on_error="raise")
    trainer.train()
    assert "no blame trace" in capsys.readouterr().out
    assert "no blame trace" in (tmp_path / "run" / "run.log").read_text()
    assert "blame" not in gradtrace.open_run(tmp_path / "run").kinds()
