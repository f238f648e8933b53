from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gradtrace.batch import RolloutBatch
from gradtrace.errors import GradtraceError
from gradtrace.rollout import Sampler, SamplingParams

POSITIONS = 64  # of the models in conftest.py


def seed(number: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def teacher_forced_log_probs(model: Any, prompt: list[int], response: list[int], temperature: float) -> Tensor:
    ids = torch.tensor([prompt + response])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None]).squeeze(-1)


def responses_of(batch: RolloutBatch) -> list[list[int]]:
    return [row[mask].tolist() for row, mask in zip(batch.responses, batch.response_mask, strict=True)]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_log_probs_equal_teacher_forced_ones(model: Any, prompts: list[list[int]], temperature: float) -> None:
    params = SamplingParams(n=3, max_new_tokens=14, temperature=temperature, stop_token_ids=(0,))
    batch = Sampler(model).generate(prompts, params, seed())
    assert len(set(batch.response_lengths.tolist())) > 2, "rows should leave at different steps in this test"
    for row, response in enumerate(responses_of(batch)):
        expected = teacher_forced_log_probs(model, prompts[int(batch.group[row])], response, temperature)
        torch.testing.assert_close(batch.sampler_log_probs[row, : len(response)], expected, atol=1e-5, rtol=1e-5)


def test_greedy_equals_transformers_generate(model: Any, prompts: list[list[int]]) -> None:
    batch = Sampler(model).generate(prompts, SamplingParams(max_new_tokens=12, temperature=0))
    for prompt, response in zip(prompts, responses_of(batch), strict=True):
        expected = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=12,
            pad_token_id=0,
        )
        assert response == expected[0, len(prompt) :].tolist()


def test_greedy_log_probs_are_those_of_temperature_one(either: Any, prompts: list[list[int]]) -> None:
    batch = Sampler(either).generate(prompts, SamplingParams(max_new_tokens=5, temperature=0))
    expected = teacher_forced_log_probs(either, prompts[0], responses_of(batch)[0], temperature=1.0)
    torch.testing.assert_close(batch.sampler_log_probs[0], expected, atol=1e-5, rtol=1e-5)


def test_responses_follow_the_model_distribution(either: Any) -> None:
    """Chi-square of 2-token responses: both steps, and the hand-over from prompt to cache, at once."""
    prompt, count, temperature = [3, 7, 4], 4000, 0.8
    params = SamplingParams(n=count, max_new_tokens=2, temperature=temperature)
    batch = Sampler(either, max_batch_tokens=2500).generate([prompt], params, seed(1))
    vocabulary = either.config.vocab_size
    with torch.no_grad():
        first = (either(torch.tensor([prompt])).logits[0, -1] / temperature).softmax(-1)
        continued = torch.tensor([[*prompt, token] for token in range(vocabulary)])
        second = (either(continued).logits[:, -1] / temperature).softmax(-1)
    expected = (first[:, None] * second).flatten().double() * count
    pairs = batch.responses[:, 0] * vocabulary + batch.responses[:, 1]
    observed = torch.bincount(pairs, minlength=vocabulary**2).double()
    common = expected >= 5  # rarer pairs are pooled, as the chi-square approximation asks for
    expected = torch.cat([expected[common], expected[~common].sum()[None]])
    observed = torch.cat([observed[common], observed[~common].sum()[None]])
    degrees = len(expected) - 1
    statistic = float(((observed - expected) ** 2 / expected).sum())
    assert degrees > 20
    assert statistic < degrees + 4 * (2 * degrees) ** 0.5, "more than 4 standard deviations off"


def test_siblings_differ_and_belong_to_their_prompt(either: Any, prompts: list[list[int]]) -> None:
    batch = Sampler(either).generate(prompts, SamplingParams(n=4, max_new_tokens=10), seed())
    assert batch.group.tolist() == [group for group in range(len(prompts)) for _ in range(4)]
    assert batch.prompts == prompts
    assert len({tuple(response) for response in responses_of(batch)}) > len(prompts)


def test_stop_token_ends_the_response_and_is_part_of_it(either: Any, prompts: list[list[int]]) -> None:
    params = SamplingParams(n=8, max_new_tokens=20, stop_token_ids=(0, 5))
    batch = Sampler(either, pad_token_id=23).generate(prompts, params, seed())
    assert batch.finished.any() and not batch.finished.all()
    for response, finished in zip(responses_of(batch), batch.finished.tolist(), strict=True):
        assert not {0, 5} & set(response[:-1])
        assert finished == (response[-1] in (0, 5))
        assert finished or len(response) == 20
    outside = ~batch.response_mask
    assert (batch.responses[outside] == 23).all() and (batch.sampler_log_probs[outside] == 0).all()


def test_rows_that_leave_early_do_not_change_the_others(either: Any, prompts: list[list[int]]) -> None:
    endless = SamplingParams(n=6, max_new_tokens=16)
    stopping = SamplingParams(n=6, max_new_tokens=16, stop_token_ids=(2, 4, 9))
    without = Sampler(either).generate(prompts, endless, seed())
    with_stops = Sampler(either).generate(prompts, stopping, seed())
    lengths = with_stops.response_lengths
    assert lengths.min() < 4 and lengths.max() > 10
    for short, full in zip(responses_of(with_stops), responses_of(without), strict=True):
        assert short == full[: len(short)]


def test_same_seed_same_responses_other_seed_others(either: Any, prompts: list[list[int]]) -> None:
    sampler, params = Sampler(either), SamplingParams(n=2, max_new_tokens=8)
    first = sampler.generate(prompts, params, seed(3))
    again = sampler.generate(prompts, params, seed(3))
    other = sampler.generate(prompts, params, seed(4))
    assert torch.equal(first.responses, again.responses)
    assert torch.equal(first.sampler_log_probs, again.sampler_log_probs)
    assert not torch.equal(first.responses, other.responses)


def test_global_generator_is_used_when_none_is_given(either: Any, prompts: list[list[int]]) -> None:
    sampler, params = Sampler(either), SamplingParams(n=2, max_new_tokens=8)
    torch.manual_seed(5)
    first = sampler.generate(prompts, params)
    torch.manual_seed(5)
    assert torch.equal(first.responses, sampler.generate(prompts, params).responses)


@pytest.mark.parametrize("max_batch_tokens", [1, 70, 300])
def test_chunking_does_not_change_responses(model: Any, prompts: list[list[int]], max_batch_tokens: int) -> None:
    params = SamplingParams(n=3, max_new_tokens=12, stop_token_ids=(0,))
    whole = Sampler(model).generate(prompts, params, seed())
    split = Sampler(model, max_batch_tokens=max_batch_tokens).generate(prompts, params, seed())
    assert torch.equal(whole.responses, split.responses)
    assert torch.equal(whole.finished, split.finished)
    torch.testing.assert_close(whole.sampler_log_probs, split.sampler_log_probs, atol=1e-5, rtol=1e-5)


def test_later_prompts_do_not_change_earlier_responses(either: Any, prompts: list[list[int]]) -> None:
    params = SamplingParams(n=2, max_new_tokens=9)
    every = Sampler(either).generate(prompts, params, seed())
    alone = Sampler(either).generate(prompts[:1], params, seed())
    assert torch.equal(every.responses[:2], alone.responses)


def test_prompt_is_read_once_whatever_n(either: Any) -> None:
    rows_of_prompt_reads = []
    either.register_forward_pre_hook(
        lambda module, args, kwargs: rows_of_prompt_reads.append(tuple(kwargs["input_ids"].shape)),
        with_kwargs=True,
    )
    Sampler(either).generate([[3, 7, 4], [5, 1, 2]], SamplingParams(n=8, max_new_tokens=3), seed())
    assert [shape for shape in rows_of_prompt_reads if shape[1] > 1] == [(2, 3)]


def test_changed_weights_are_used_at_once(either: Any, prompts: list[list[int]]) -> None:
    sampler, params = Sampler(either), SamplingParams(max_new_tokens=6, temperature=0)
    sampler.generate(prompts, params)
    with torch.no_grad():
        for parameter in either.parameters():
            parameter.data.normal_(std=0.3)  # through .data: not even the version counter tells
    batch = sampler.generate(prompts, params)
    expected = teacher_forced_log_probs(either, prompts[0], responses_of(batch)[0], temperature=1.0)
    torch.testing.assert_close(batch.sampler_log_probs[0], expected, atol=1e-5, rtol=1e-5)


def test_training_mode_is_restored_module_by_module(either: Any, prompts: list[list[int]]) -> None:
    either.train()
    either.get_input_embeddings().eval()
    before = {name: module.training for name, module in either.named_modules()}
    Sampler(either).generate(prompts, SamplingParams(max_new_tokens=2))
    assert {name: module.training for name, module in either.named_modules()} == before


def test_dropout_is_off_while_sampling(prompts: list[list[int]]) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=24, n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.5)
    config.bos_token_id = config.eos_token_id = None
    model = GPT2LMHeadModel(config).train()
    batch = Sampler(model).generate(prompts, SamplingParams(max_new_tokens=6), seed())
    expected = teacher_forced_log_probs(model.eval(), prompts[2], responses_of(batch)[2], temperature=1.0)
    torch.testing.assert_close(batch.sampler_log_probs[2], expected, atol=1e-5, rtol=1e-5)


def test_results_can_enter_a_loss_and_the_model_still_trains(either: Any, prompts: list[list[int]]) -> None:
    batch = Sampler(either).generate(prompts, SamplingParams(max_new_tokens=4), seed())
    ids = torch.tensor([prompts[0] + responses_of(batch)[0]])
    log_probs = either(ids).logits[0, 2:-1].log_softmax(-1).gather(-1, batch.responses[0][:, None]).squeeze(-1)
    ratio = (log_probs - batch.sampler_log_probs[0]).exp()
    (ratio * batch.sampler_log_probs[0]).sum().backward()  # the product saves the sampler's tensor
    assert all(parameter.grad is not None for parameter in either.parameters() if parameter.requires_grad)


def test_progress_counts_every_response_once(either: Any, prompts: list[list[int]]) -> None:
    reports: list[tuple[int, int]] = []
    params = SamplingParams(n=3, max_new_tokens=12, stop_token_ids=(0, 1))
    Sampler(either, max_batch_tokens=90).generate(
        prompts, params, seed(), progress=lambda ended, of: reports.append((ended, of))
    )
    counts = [ended for ended, _ in reports]
    assert counts == sorted(set(counts)) and counts[-1] == 15
    assert {of for _, of in reports} == {15}


def test_items_travel_with_the_batch(either: Any, prompts: list[list[int]]) -> None:
    items: list[dict[str, Any]] = [{"prompt": str(index)} for index in range(len(prompts))]
    batch = Sampler(either).generate(prompts, SamplingParams(max_new_tokens=2), items=items)
    assert batch.items == items


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "prompt list is empty"),
        ([[1], []], "prompt 1 is empty"),
        ([[1], [1] * (POSITIONS + 1)], "prompt 1 has 65 tokens"),
        ([[1] * (POSITIONS - 3)], "max_new_tokens=4"),
        ([[1, 24]], "token ids from 1 to 24"),
        ([[-1]], "token ids from -1"),
    ],
)
def test_unusable_prompts_are_named(either: Any, prompts: list[list[int]], message: str) -> None:
    with pytest.raises(GradtraceError, match=message):
        Sampler(either).generate(prompts, SamplingParams(max_new_tokens=4))


def test_longest_prompt_that_fits_is_sampled(either: Any) -> None:
    batch = Sampler(either).generate([[1] * (POSITIONS - 4)], SamplingParams(max_new_tokens=4))
    assert batch.response_lengths.tolist() == [4]


def test_broken_weights_are_reported(either: Any, prompts: list[list[int]]) -> None:
    with torch.no_grad():
        either.get_input_embeddings().weight.fill_(float("nan"))
    with pytest.raises(GradtraceError, match="not finite"):
        Sampler(either).generate(prompts, SamplingParams(max_new_tokens=4))


@pytest.mark.parametrize(
    "changes",
    [{"n": 0}, {"max_new_tokens": 0}, {"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0},
     {"top_p": 1.5}, {"top_k": -1}],
)  # fmt: skip
def test_parameters_out_of_range_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(GradtraceError, match=next(iter(changes))):
        SamplingParams(**changes)


def test_pad_token_is_never_shown_to_the_model(either: Any, prompts: list[list[int]]) -> None:
    batch = Sampler(either, pad_token_id=999).generate(
        prompts, SamplingParams(n=4, max_new_tokens=12, stop_token_ids=(0, 1)), seed()
    )
    assert (batch.responses[~batch.response_mask] == 999).all() and not batch.response_mask.all()


def test_adapters_with_virtual_tokens_are_refused(either: Any) -> None:
    from peft import PromptTuningConfig, TaskType, get_peft_model

    config = PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=3)
    with pytest.raises(GradtraceError, match="PROMPT_TUNING"):
        Sampler(get_peft_model(either, config))


def test_batch_size_out_of_range_is_refused(either: Any) -> None:
    with pytest.raises(GradtraceError, match="max_batch_tokens=0"):
        Sampler(either, max_batch_tokens=0)
