"""Tools and environments of TRL: tokens that it masks are shown, have no scores, and the others' scores are right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trl
from datasets import Dataset
from trl import GRPOTrainer

from gradtrace.integrations.trl import attach
from tests.integrations.trl_reference import EXACT, assert_equal, engine_scores, step_of, train
from tests.integrations.trl_runs import grpo_config
from tests.tasks.byte_model import byte_tokenizer
from tests.training.small import VOCABULARY
from tests.training.small import model as small_model

ENV = [VOCABULARY.index("="), VOCABULARY.index("7"), VOCABULARY.index("=")]


def in_two_turns(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """A rollout_func: the policy's tokens (random ones do), an environment's reply, the policy's again."""
    generator = torch.Generator().manual_seed(trainer.state.global_step)
    completions, masks = [], []
    for _ in prompts:
        first, second = (int(torch.randint(1, 4, (), generator=generator)) for _ in range(2))
        own = torch.randint(4, 17, (first + second,), generator=generator).tolist()
        completions.append([*own[:first], *ENV, *own[first:]])
        masks.append([1] * first + [0] * 3 + [1] * second)
    return {
        "prompt_ids": trainer.processing_class(prompts)["input_ids"],
        "completion_ids": completions,
        "logprobs": None,
        "env_mask": masks,
    }


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_scores_of_masked_completions_equal_the_engines(
    loss_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    setup = {"loss_type": loss_type, "max_completion_length": 12, "more": {"rollout_func": in_two_turns}}
    model = train(tmp_path, setup, blame_every=1)
    step = step_of(tmp_path)
    for r in range(step.n_responses):
        assert [part.role for part in step.segments(r)] == ["assistant", "environment", "assistant"]
        assert step.tokens(r)["token_id"][~step.written(r)].tolist() == ENV

    assert_equal(step, engine_scores(model, step, EXACT))
    entropy = step_of(tmp_path, kind="entropy_trace")
    for column in ("entropy", "log_prob"):
        assert np.array_equal(np.isnan(entropy[column]), ~entropy["loss_mask"])
    shares = step_of(tmp_path, kind="blame")["token_grad_share"]
    assert np.nansum(shares) == pytest.approx(1.0, abs=1e-4)


def multiply(a: int, b: int) -> int:
    """Multiplies two numbers.

    Args:
        a: The first number.
        b: The second number.

    Returns:
        Their product.
    """
    return a * b


class Shop:
    """An environment with a tool of its own."""

    def reset(self, **row: Any) -> None:
        self.sold = 0

    def sell(self, count: int) -> str:
        """Sells so many.

        Args:
            count: How many.

        Returns:
            What is said then.
        """
        self.sold += count
        return f"{self.sold} sold"


CALLS = {
    "multiply": '{"name": "multiply", "arguments": {"a": 6, "b": 7}}',
    "sell": '{"name": "sell", "arguments": {"count": 3}}',
}


class Scripted(GRPOTrainer):
    """TRL's trainer, which calls tools and masks what they return by itself; only what is sampled is written here."""

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], *others: Any, **named: Any
    ) -> tuple[list[list[int]], None]:
        name = "sell" if self.environment_factories else "multiply"
        asked = f"<tool_call>\n{CALLS[name]}\n</tool_call><|im_end|>"
        found = []
        for row, ids in enumerate(prompt_ids):
            answered = "<tool_response>" in self.processing_class.decode(ids[-120:])
            texts = [f"It is {row}<|im_end|>"] if answered or row % 2 else [asked]
            found.append(self.processing_class(texts[0])["input_ids"])
        return found, None


@pytest.mark.parametrize("kind", ["tools", "environment_factory"])
def test_tools_and_environments_are_traced_through_trls_mask(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("jmespath", reason="TRL's tools need it")
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja").read_text()
    tokenizer.eos_token = "<|im_end|>"
    model = small_model(torch.float64, vocab_size=len(tokenizer), tie_word_embeddings=False)
    more = {"tools": [multiply]} if kind == "tools" else {"environment_factory": Shop}
    trainer = Scripted(
        model=model,
        reward_funcs=lambda completions, **row: [float(len(str(c)) % 3) for c in completions],
        args=grpo_config(tmp_path, max_completion_length=400, max_steps=1, learning_rate=0.0),
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": f"{i}?"}] for i in range(4)]}),
        processing_class=tokenizer,
        **more,
    )
    attach(trainer, tmp_path / "run", influence=EXACT, on_error="raise", blame_every=1)
    trainer.train()
    step = step_of(tmp_path)
    seen = 0
    for r in range(step.n_responses):
        told = tokenizer.decode(step.tokens(r)["token_id"][~step.written(r)])
        own = tokenizer.decode(step.tokens(r)["token_id"][step.written(r)])
        assert ("<tool_response>" in told) == ("<tool_call>" in own) and "It is" in own
        seen += "42" in told or "3 sold" in told
    assert seen
    metrics = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])
    assert metrics["batch/ends_like_a_middle"] == 0.0  # a turn's end is no middle
    assert_equal(step, engine_scores(trainer.model.eval(), step, EXACT))
    assert np.nansum(step_of(tmp_path, kind="blame")["token_grad_share"]) == pytest.approx(1.0, abs=1e-4)
