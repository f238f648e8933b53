"""`gradtrace.verify`: right scores are trusted, wrong ones are not, and the model does not notice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradtrace
from gradtrace.attribution import InfluenceConfig
from gradtrace.errors import GradtraceError
from gradtrace.instruments.verify.measure import Effects
from gradtrace.instruments.verify.trial import BASELINE, RealSteps, Trial, in_precision, working_copy
from gradtrace.instruments.verify.verification import INFLUENCE, INFLUENCE_OWN, Verification, judgement
from tests.attribution.models import random_responses, tiny_model
from tests.instruments.test_verify import batch_of
from tests.training.test_one_writer import writer


class Loop:
    """A tiny model after twenty steps of AdamW on a loss of its own, and groups of four responses."""

    def __init__(self, groups: int = 4, dtype: torch.dtype = torch.float64) -> None:
        rollout = random_responses(groups=groups, n=4, seed=3)
        cut = list(zip(rollout.sequences, rollout.prompt_lengths, strict=True))
        prompts = {int(g): [int(g), 1, 2] for g in rollout.group.unique()}
        self.prompt_ids: list[list[int]] = [prompts[int(g)] for g in rollout.group]
        self.response_ids = [ids[length:].tolist() for ids, length in cut]
        self.rewards = rollout.accepted.double().tolist()
        self.model = tiny_model("llama")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01)
        for seed in range(20):
            batch = batch_of(groups=groups, seed=seed)
            for name, gradient in Trial(self.model, self.optimizer, batch).gradient.items():
                self.model.get_parameter(name).grad = gradient
            self.optimizer.step()
        self.model.to(dtype)
        for parameter, state in self.optimizer.state.items():
            state |= {key: in_precision(value, parameter) for key, value in state.items()}
            assert parameter.grad is not None
            parameter.grad = parameter.grad.to(dtype)

    def verify(self, **options: Any) -> Verification:
        sizes = {"tokens": 10, "halves": 0}
        return gradtrace.verify(
            self.model,
            self.optimizer,
            prompt_ids=self.prompt_ids,
            response_ids=self.response_ids,
            rewards=self.rewards,
            **(sizes | options),
        )

    def state(self) -> list[Tensor]:
        moments = [v for p in self.model.parameters() for v in self.optimizer.state[p].values()]
        return [*(p for p in self.model.parameters()), *(p.grad for p in self.model.parameters()), *moments]  # type: ignore[misc]


@pytest.fixture(scope="module")
def found() -> tuple[Loop, Verification, list[Tensor]]:
    loop = Loop()
    verification = loop.verify()
    scores = verification.predictions[INFLUENCE]
    return loop, verification, [scores[r] for r in range(len(loop.rewards))]


def test_influence_is_trusted(found: tuple[Loop, Verification, list[Tensor]]) -> None:
    _, verification, _ = found
    assert verification.is_trustworthy and verification.judged == INFLUENCE
    table = verification.table
    assert table[INFLUENCE]["token"].low > 0.7 and table[INFLUENCE]["token_pearson"].mean > 0.95
    assert table[INFLUENCE_OWN]["token_own"].mean > 0.9 and table[INFLUENCE]["done"].mean > 0.9
    assert verification.books.pearson > 0.99 and 0.9 < verification.books.slope < 1.1
    record = verification.record()
    assert record["steps_taken"] == record["steps_planned"] == 40 and record["groups"] == 4
    assert set(record["table"]) >= {INFLUENCE, INFLUENCE_OWN, "identity, position", BASELINE}
    assert "what training on a token does to the mini-batch's objective" in record["verdict"]


def test_of_the_first_step_only_what_it_does_to_tokens_is_predicted() -> None:
    """Adam's state is empty: how much a token weighs hardly matters to a step that is like the gradient's sign."""
    loop = Loop()
    loop.optimizer.state.clear()
    for group in loop.optimizer.param_groups:
        group["weight_decay"] = 0.0
    verification = loop.verify()
    own = verification.table[INFLUENCE]
    assert own["done"].mean > 0.95 > own["token"].mean
    assert "Adam's state is empty" in verification.verdict and verification.record()["first_step"]


def shuffled(scores: Sequence[Tensor]) -> list[Tensor]:
    order = torch.randperm(sum(map(len, scores)), generator=torch.Generator().manual_seed(1))
    return list(torch.cat(list(scores))[order].split([len(s) for s in scores]))


@pytest.mark.parametrize("wrong", ["shuffled", "flipped", "constant"])
def test_planted_wrong_scores_are_not_trusted(found: tuple[Loop, Verification, list[Tensor]], wrong: str) -> None:
    loop, _, scores = found
    planted = {
        "shuffled": shuffled(scores),
        "flipped": [-s for s in scores],
        "constant": [torch.ones_like(s) for s in scores],
    }[wrong]
    verification = loop.verify(scores=planted)
    assert verification.judged == "given scores" and verification.is_trustworthy is False
    if wrong == "flipped":
        assert "point the wrong way" in verification.verdict
    if wrong == "shuffled":
        assert abs(verification.table["given scores"]["token"].mean) < 0.4


def test_given_right_scores_are_trusted(found: tuple[Loop, Verification, list[Tensor]]) -> None:
    loop, verification, scores = found
    again = loop.verify(scores=scores)
    assert again.is_trustworthy
    assert again.agreement["given scores"] == verification.agreement[INFLUENCE]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_model_optimizer_and_gradients_are_the_same_afterwards(dtype: torch.dtype) -> None:
    loop = Loop(groups=1, dtype=dtype)
    before = [tensor.clone() for tensor in loop.state()]
    loop.verify(tokens=3, precision="float32")
    assert all(torch.equal(a, b) for a, b in zip(before, loop.state(), strict=True))


def test_bf16_weights_are_measured_in_full_precision() -> None:
    half = Loop(groups=3, dtype=torch.bfloat16)
    full = Loop(groups=3, dtype=torch.bfloat16)
    full.model.double()
    for state in full.optimizer.state.values():
        state |= {key: value.double() for key, value in state.items() if value.dim()}
    first, second = half.verify(tokens=6), full.verify(tokens=6)
    measured = [[change for e in v.effects for step in e.measured for change in step] for v in (first, second)]
    assert measured[0] == pytest.approx(measured[1], rel=1e-6)
    model, optimizer, original = working_copy(half.model, half.optimizer, "float32")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert original is not None and original[0] is half.model and type(optimizer) is torch.optim.AdamW


def test_there_is_one_extra_copy_of_weights_and_state_at_most() -> None:
    """A model that is copied comes back from the given one; a model that is stepped in place keeps a copy."""
    loop = Loop(groups=1, dtype=torch.float32)
    model, optimizer, original = working_copy(loop.model, loop.optimizer, "float64")
    steps = RealSteps(model, optimizer, original=original)
    own = {value.data_ptr() for value in loop.state()}
    held = [*steps._weights.values(), *(v for state in steps._state.values() for v in state.values())]
    assert all(value.data_ptr() in own for value in held)
    assert working_copy(loop.model, loop.optimizer, "float32") == (loop.model, loop.optimizer, None)


def test_it_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(groups=3)
    straight = loop.verify()
    taken = Effects.take_next

    with monkeypatch.context() as patch:
        count = 0

        def killed(self: Effects, trial: Any) -> None:
            nonlocal count
            count += 1
            if count > 7:
                raise KeyboardInterrupt
            taken(self, trial)

        patch.setattr(Effects, "take_next", killed)
        with pytest.raises(KeyboardInterrupt):
            loop.verify(folder=tmp_path / "v")
    with monkeypatch.context() as patch:
        calls: list[int] = []
        patch.setattr(Effects, "take_next", lambda self, trial: (calls.append(1), taken(self, trial))[1])
        patch.setattr("gradtrace.instruments.verify.trial.Trial.parts", None)  # scores are there
        resumed = loop.verify(folder=tmp_path / "v")
    assert len(calls) == 30 - 7
    assert resumed.record()["table"] == straight.record()["table"]
    with writer(tmp_path / "v"), pytest.raises(GradtraceError, match="is being written by process"):
        loop.verify(folder=tmp_path / "v")
    lines = (tmp_path / "v" / "steps.jsonl").read_bytes()
    (tmp_path / "v" / "steps.jsonl").write_bytes(lines.replace(b"measured", b"measurec", 1))
    with pytest.raises(GradtraceError, match=r"steps\.jsonl is damaged: the checksum does not match"):
        loop.verify(folder=tmp_path / "v")
    with pytest.raises(GradtraceError, match="holds a verification with other settings"):
        loop.verify(folder=tmp_path / "v", seed=1)


def test_a_spent_budget_keeps_what_it_has_and_says_so(tmp_path: Path) -> None:
    loop = Loop(groups=3)
    first = loop.verify(budget=1e-9, folder=tmp_path / "v")
    assert first.is_trustworthy is None and first.steps_taken == 0 and len(first.left_out) == 4
    assert first.verdict == "too little to judge: no group measured to the end, 3 are needed"
    assert loop.verify(folder=tmp_path / "v").steps_taken == 30


def test_the_verdict_in_words() -> None:
    def groups(mean: float, width: float = 0.03, count: int = 8) -> list[float]:
        return [mean + (width if place % 2 else -width) for place in range(count)]

    free = {BASELINE: groups(0.21), "|A|": groups(0.1, 0.05)}
    assert judgement(groups(0.88), free) == (
        True,
        "scores of this run predict what training on a token does to the mini-batch's objective with .88 [.85, .91], "
        "the baseline |A|(1−p) has .21 [.18, .24]",
    )
    assert judgement(groups(0.2, 0.2), free)[0] is False
    assert judgement(groups(0.25, 0.2), free)[0] is False  # it may be chance
    assert judgement(groups(-0.3), free)[1].startswith("not trustworthy, they point the wrong way")
    assert judgement(groups(0.5, 0.6), free)[1].startswith("undecided, 8 groups are too few")
    assert judgement(groups(0.95), {BASELINE: groups(0.95)})[1].endswith("which is as good and needs no gradient")
    assert judgement(groups(0.9, count=2), {BASELINE: groups(0.2, count=2)})[0] is None
    strong, said = judgement(groups(0.6, 0.1), {BASELINE: groups(0.2), "|A|": groups(0.6, 0.05)})
    assert strong is False and said.endswith("|A| .60 [.56, .64]")  # the labels alone are as good


def test_a_score_from_captured_factors_is_asked_about_its_own_prompt() -> None:
    verification = Loop().verify(config=InfluenceConfig.older(projection_dim_factor=None, pairwise=False))
    assert verification.judged == "this score" and verification.question == "token_own"
    assert "its own prompt's objective" in verification.verdict
    ours, older = (verification.table[name]["token_own"].mean for name in (INFLUENCE_OWN, "this score"))
    assert ours > older + 0.1


def test_what_cannot_be_verified_is_refused_in_words() -> None:
    loop = Loop(groups=2)
    with pytest.raises(GradtraceError, match="every response has advantage 0"):
        gradtrace.verify(
            loop.model,
            loop.optimizer,
            prompt_ids=loop.prompt_ids,
            response_ids=loop.response_ids,
            rewards=[1.0] * len(loop.rewards),
        )
    with pytest.raises(GradtraceError, match="8 prompts, 8 responses and 2 rewards"):
        gradtrace.verify(
            loop.model,
            loop.optimizer,
            prompt_ids=loop.prompt_ids,
            response_ids=loop.response_ids,
            rewards=[1.0, 0.0],
        )
    with pytest.raises(GradtraceError, match="given scores: one tensor with a score per token"):
        loop.verify(scores=[torch.zeros(1)] * 8)
    with pytest.raises(GradtraceError, match="the optimizer does not know"):
        working_copy(loop.model, torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0))
    state = loop.optimizer.state[next(loop.model.parameters())]
    state["exp_avg"] = state["exp_avg"][:1]
    with pytest.raises(GradtraceError, match=r"quantised or factored"):
        loop.verify()
    loop.model.requires_grad_(False)
    with pytest.raises(GradtraceError, match="every parameter of the model is frozen"):
        loop.verify()
