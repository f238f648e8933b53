"""Responses of several turns: tokens that the policy did not write are shown, carry no gradient and have no score."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import gradtrace
from gradtrace import open_run
from gradtrace.algorithms import Denominator, aggregate
from gradtrace.algorithms.advantages.turn_rloo import turns_by_mask
from gradtrace.algorithms.settings import AlgorithmConfig
from gradtrace.batch import RolloutBatch
from gradtrace.cli import main
from gradtrace.errors import GradtraceError
from gradtrace.instruments.influence.books import Nats
from gradtrace.policy.loss import PolicyLoss, fill_statistics
from gradtrace.policy.microbatch import MicroBatches
from gradtrace.policy.policy import KeepDouble
from gradtrace.segments import Segment, segments_by_mask
from gradtrace.trace.results import load_batch, save_batch
from gradtrace.trace.token_text import TokenBytes
from tests.instruments.test_contrast_scores import CONTRAST, brute_force, second_step
from tests.instruments.test_record import close
from tests.instruments.test_traces import columns, influence
from tests.policy.test_microbatch import LAYOUTS, one_by_one
from tests.training import small


def with_holes(batch: RolloutBatch, seed: int = 3) -> RolloutBatch:
    """Tokens of others in the middle of responses, at their beginning and at their end."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(batch.response_mask.shape, generator=generator) < 0.6
    drawn[::2, 0] = False
    drawn[torch.arange(len(batch)), batch.response_lengths // 2] = True
    mask = batch.response_mask & drawn
    assert not bool(mask[:, 0].all()) and bool((mask.sum(1) < batch.response_lengths).any())
    columns = {name: getattr(batch, name) for name in ("advantages", "ref_log_probs")}
    zeroed = {name: None if c is None else torch.where(mask, c, 0.0) for name, c in columns.items()}
    return batch.replace(response_mask=mask, lengths=batch.response_lengths, **zeroed)


# ---------------------------------------------------------------- the batch


def test_turns_come_from_segments_or_from_the_mask() -> None:
    assert segments_by_mask([True, True, False, True]) == [
        Segment(0, 0, "assistant"),
        Segment(2, 0, "environment"),
        Segment(3, 1, "assistant"),
    ]
    assert [part.turn for part in segments_by_mask([False, True, False, True])] == [0, 0, 0, 1]
    batch = small.random_batch()
    assert batch.all_segments() is None
    holed = with_holes(batch)
    assert holed.response_lengths.tolist() == batch.response_lengths.tolist()
    segments = holed.all_segments()
    assert segments is not None
    for parts, mask, turns in zip(segments, holed.response_mask, turns_by_mask(holed.response_mask), strict=True):
        own = [(part.start, part.turn) for part in parts if part.role == "assistant"]
        assert all(mask[start] and turns[start] == turn for start, turn in own)


def test_segments_and_lengths_stay_with_their_responses(tmp_path: Path) -> None:
    batch = with_holes(small.random_batch())
    batch = batch.replace(segments=batch.all_segments())
    part = batch.select(torch.tensor([4, 1]))
    assert part.segments == [batch.segments[4], batch.segments[1]]
    assert part.response_lengths.tolist() == batch.response_lengths[[4, 1]].tolist()
    one_turn = small.random_batch(seed=1)
    both = RolloutBatch.concat([batch, one_turn])
    assert both.segments[: len(batch)] == batch.segments
    assert both.segments[len(batch) :] == [[Segment(0, 0, "assistant")]] * len(one_turn)
    assert both.response_lengths[len(batch) :].tolist() == one_turn.response_lengths.tolist()
    save_batch(batch, {}, tmp_path / "batch")
    again = load_batch(tmp_path / "batch")[0]
    assert again.segments == batch.segments and torch.equal(again.response_lengths, batch.response_lengths)
    with pytest.raises(ValueError, match="after the end of a response"):
        batch.replace(lengths=torch.zeros(len(batch), dtype=torch.long))


# ---------------------------------------------------------------- loss


@pytest.fixture
def float64() -> Iterator[None]:
    """Norms inside of models round to float32 otherwise."""
    with KeepDouble():
        yield


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_gradient_are_of_the_tokens_that_the_policy_wrote(layout: str, float64: None) -> None:
    batch, actor = with_holes(small.random_batch()), small.policy()
    expected, entropies = (torch.where(batch.response_mask, c, 0.0) for c in one_by_one(batch, actor))
    rows = torch.arange(len(batch))
    filled = fill_statistics(actor, batch, MicroBatches(batch, 30, layout), rows)
    torch.testing.assert_close(filled.old_log_probs.double(), expected.detach(), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(filled.entropies.double(), entropies.detach(), rtol=1e-8, atol=1e-8)
    loss = PolicyLoss(actor, AlgorithmConfig(), 6)
    weights = list(actor.trainable().values())
    brute = -(expected * batch.advantages).sum() / int(batch.response_mask.sum())
    found = torch.tensor(0.0, dtype=torch.float64)
    on_policy = batch.replace(old_log_probs=expected.detach())
    for micro in MicroBatches(on_policy, 30, layout)(rows):
        log_probs, made = (micro.unflatten(values) for values in actor.statistics(micro))
        terms = loss.terms(on_policy, micro, log_probs, made)
        found = found + aggregate(terms, micro.mask, "token_mean", Denominator.of(batch.response_mask))
    for ours, theirs in zip(torch.autograd.grad(found, weights), torch.autograd.grad(brute, weights), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)
    of_tokens = loss.token_losses(on_policy, MicroBatches(on_policy, 30, layout), rows.flip(0))
    weighted = -(batch.advantages).flip(0)[batch.response_mask.flip(0)]  # at ratio 1
    torch.testing.assert_close(of_tokens, weighted.to(of_tokens))


# ---------------------------------------------------------------- instruments, in the training loop


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory):
    """A step whose rollout has holes, with every instrument on."""
    folder = tmp_path_factory.mktemp("turns")
    extra = (
        *("trainer.entropy_trace.enable=true", "trainer.blame.enable=true", "trainer.blame.on_error=raise"),
        *(
            "trainer.entropy_probe.every=1",
            "trainer.entropy_probe.prompts=4",
            "trainer.entropy_probe.on_error=raise",
        ),
        *("trainer.validation.every=0",),
    )
    return second_step(
        folder,
        *influence("measure=all", "verify_every=2"),
        *extra,
        change=with_holes,
    )


@pytest.mark.parametrize("kind", ["entropy_trace", "influence_trace", "blame", "entropy_probe"])
def test_every_file_shows_the_tokens_of_others_and_has_no_number_for_them(traced, kind: str) -> None:
    trainer, batch = traced
    step = open_run(trainer.files.path).step(kind, 2)
    trained = step["row"] >= 0
    of_batch = np.repeat(trained, step["length"])
    scores = {
        "influence",
        "influence_own",
        "log_prob_after",
        "entropy",
        "log_prob",
        "token_grad_share",
        "push",
        "token_share",
    }
    seen = 0
    for r in np.flatnonzero(trained):
        row = int(step["row"][r])
        length = int(batch.response_lengths[row])
        tokens, mask = step.tokens(r), batch.response_mask[row, :length].numpy()
        np.testing.assert_array_equal(tokens["token_id"], batch.responses[row, :length])
        np.testing.assert_array_equal(step.written(r), mask)
        assert [part.start for part in step.segments(r)] == [part.start for part in segments_by_mask(mask.tolist())]
        for name in scores & set(tokens):
            np.testing.assert_array_equal(np.isnan(tokens[name]), ~mask, err_msg=name)
            seen += 1
        if "captured" in tokens:
            np.testing.assert_array_equal(tokens["captured"], mask)
        block = step.pairwise(r)
        if block is not None:
            np.testing.assert_array_equal(np.isnan(block.scores).all(1), ~mask)
    assert seen and (~step["loss_mask"][of_batch]).any()


def test_alternatives_stand_where_their_token_stands_among_those_of_others(traced) -> None:
    """Own tokens among the alternatives have the probability that the token columns have at this place."""
    trainer, _ = traced
    compared = 0
    for number in (1, 2):
        step = open_run(trainer.files.path).step("influence_trace", number)
        place = {row: r for r, row in enumerate(step["row"].tolist())}
        for one in step.meta["alternatives"]:
            tokens, index = step.tokens(place[one["row"]]), one["token"]
            assert step.written(place[one["row"]])[index]
            for token, before, after in one["gained"]:
                if token == tokens["token_id"][index]:
                    compared += 1
                    assert before == pytest.approx(np.exp(tokens["log_prob_before"][index]), rel=1e-3)
                    assert after == pytest.approx(np.exp(tokens["log_prob_after"][index]), rel=1e-3)
    assert compared


def test_scores_of_the_contrast_are_what_one_optimizer_step_does(tmp_path: Path) -> None:
    trainer, batch = second_step(tmp_path, *CONTRAST, "trainer.validation.every=0", change=with_holes)
    step = columns(trainer.files.path, step=2)
    chosen = np.arange(3)
    rows = torch.from_numpy(step["row"][chosen].astype(np.int64))
    for index, expected in zip(chosen, brute_force(trainer, batch, rows), strict=True):
        own = slice(step["token_offsets"][index], step["token_offsets"][index + 1])
        found = step["influence_loss_term"][own][step["loss_mask"][own]]
        np.testing.assert_allclose(found, expected, rtol=5e-3, atol=5e-3 * np.abs(expected).max())


def test_shares_of_the_gradient_add_up_without_the_tokens_of_others(traced) -> None:
    trainer, _ = traced
    shares = columns(trainer.files.path, "blame", 2)["token_grad_share"]
    assert np.nansum(shares) == pytest.approx(1.0, abs=1e-4)


def test_by_turn_a_stretch_of_the_policy_has_the_sum_of_its_scores(traced, capsys: pytest.CaptureFixture[str]) -> None:
    trainer, _ = traced
    step = open_run(trainer.files.path).step("influence_trace", 2)
    group = int(step["group"][0])
    trainer.files.write_token_bytes(TokenBytes.from_tokenizer(trainer.components.task.tokenizer))
    capsys.readouterr()
    options = ["--step", "2", "--group", str(group), "--by", "influence,turn"]
    assert main(["trace", "show", str(trainer.files.path), *options]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    printed = [line for line in lines if line and line[0].isdigit()]
    first = step.group(group).responses[0]
    starts = [part.start for part in step.segments(first)]
    sums = np.add.reduceat(np.nan_to_num(step.tokens(first)["influence"]), starts)
    shown = Nats(np.nan_to_num(step["influence"]))
    for line, total, start in zip(printed, sums, starts, strict=False):
        expected = "–" if not step.written(first)[start] else shown.signed(total)
        assert line[1] == expected


# ---------------------------------------------------------------- a loop of one's own


def test_record_takes_a_loss_mask_and_segments(tmp_path: Path) -> None:
    parts = [Segment(0, 0, "assistant"), Segment(2, 0, "tool", "calc"), Segment(3, 1, "assistant")]
    given = {
        "prompts": [[1, 2]],
        "responses": [[3, 4, 5, 6], [3, 4]],
        "rewards": [1.0, 0.0],
        "log_probs": [[-1.0] * 4, [-1.0] * 2],
        "entropies": [[0.5] * 4, [0.5] * 2],
    }
    mask = [[1, 1, 0, 1], [1, 1]]
    gradtrace.record(tmp_path, 1, **given, loss_mask=mask, segments=[parts, parts[:1]])
    close(tmp_path)
    step = open_run(tmp_path).step("entropy_trace", 1)
    assert step.segments(0) == parts and step.segments(1) == parts[:1]
    assert np.isnan(step.tokens(0)["entropy"]).tolist() == [False, False, True, False]
    with pytest.raises(GradtraceError, match="loss_mask has 2 rows for 2 responses; row 0 has 3 numbers"):
        gradtrace.record(tmp_path, 2, **given, loss_mask=[[1, 1, 0], [1, 1]])


def test_verify_steps_on_tokens_of_the_policy_alone() -> None:
    batch = with_holes(small.random_batch(groups=1, n=3))
    model = small.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    masks = [m[:n].tolist() for m, n in zip(batch.response_mask, batch.response_lengths.tolist(), strict=True)]
    given = {
        "prompt_ids": [batch.prompts[0]] * 3,
        "response_ids": batch.response_ids,
        "rewards": [1.0, 0.0, 0.0],
        "tokens": 0,
        "halves": 0,
    }
    found = gradtrace.verify(model, optimizer, **given, loss_mask=masks)
    assert found.steps_taken == int(batch.response_mask.sum())
    with pytest.raises(GradtraceError, match="the policy wrote no token of response 0"):
        gradtrace.verify(model, optimizer, **given, loss_mask=[[False] * len(m) for m in masks])
