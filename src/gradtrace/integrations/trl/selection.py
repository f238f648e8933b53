"""TracIn selection in a `GRPOTrainer`: our instrument, with TRL's model, rewards and validation prompts.

Validation completions come from our sampler with a generator of its own, so that nothing is drawn from TRL's random
numbers; they are judged by the trainer's reward functions. On several processes the first one samples, and each judges
a part of what it sampled. A completion that is left out is masked as TRL itself masks truncated ones: it has no loss,
and the loss's normaliser does not count its tokens.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradtrace.algorithms import advantage
from gradtrace.attribution.collectives import Ranks
from gradtrace.batch import RolloutBatch
from gradtrace.config import TracinConfig
from gradtrace.errors import GradtraceError
from gradtrace.instruments.host import asked_by
from gradtrace.instruments.tracin.instrument import TracinInstrument, TracinRecord
from gradtrace.instruments.tracin.losses import aggregated
from gradtrace.instruments.tracin.model_scorer import ModelScorer
from gradtrace.instruments.tracin.scores import adam_geometry
from gradtrace.instruments.tracin.selector import TracInSelector
from gradtrace.instruments.tracin.validation import ValidationSource
from gradtrace.integrations.trl.policy import TrlPolicy
from gradtrace.policy.rollouts import judge, rollout
from gradtrace.rollout import Sampler, SamplingParams
from gradtrace.rollout.sampler import evaluation_mode
from gradtrace.tasks.base import Prompt

TOKENS_PER_PASS = 16384
"""Tokens in one forward pass of our own, padding counted."""
AGGREGATION = {"grpo": "sequence_mean", "sapo": "sequence_mean", "dr_grpo": "fixed_length"}
"""How TRL's loss types weigh tokens; the others count every token alike."""


def tracin_instrument(trainer: Any, record: TracinRecord, policy: TrlPolicy, ranks: Ranks) -> TracinInstrument:
    settings: TracinConfig = record.config
    if settings.val_files:
        raise GradtraceError("selection.val_files is not read here: give GRPOTrainer an eval_dataset instead.")
    if settings.train_on_validation:
        raise GradtraceError(
            "selection.train_on_validation=True cannot run in TRL: GRPOTrainer splits a rollout of fixed size into its "
            "optimizer steps, and more completions do not fit. Put the trusted prompts into train_dataset as well; "
            "train_on_validation=False."
        )
    if trainer.tools or trainer.rollout_func is not None:
        raise GradtraceError(
            "TracIn selection samples its validation set by itself, in one turn: leave `selection` out where "
            "GRPOTrainer has tools, an environment_factory or a rollout_func; the traces work with them."
        )
    if trainer.eval_dataset is None or isinstance(trainer.eval_dataset, dict):
        raise GradtraceError(
            "TracIn selection scores completions against validation prompts: give GRPOTrainer one eval_dataset."
        )
    optimizer = None
    if settings.preconditioner == "adam":
        # Until its first step the optimizer has nothing to weigh by.
        optimizer = adam_geometry(trainer.optimizer, "selection.preconditioner").optimizer
    with asked_by("selection"):
        selector = TracInSelector(policy.model, settings.method, settings.parameters)
    host = ModelScorer(policy, selector, TOKENS_PER_PASS, optimizer, ranks=ranks)
    weigh = aggregated(AGGREGATION.get(trainer.loss_type, "token_mean"), trainer.max_completion_length)
    source = validation_source(trainer, settings, policy, ranks)
    return TracinInstrument(record, host, weigh, source)


def validation_source(trainer: Any, settings: TracinConfig, policy: TrlPolicy, ranks: Ranks) -> ValidationSource:
    """Prompts of the trainer's eval_dataset, sampled at the current weights and judged by its reward functions."""
    tokenizer = trainer._tokenizer
    rows = [dict(row) for row in trainer.eval_dataset]
    ids = trainer._tokenize_prompts([row["prompt"] for row in rows])[0]
    sampler = Sampler(policy.model, tokenizer.pad_token_id)
    params = SamplingParams(
        n=settings.val_n or trainer.num_generations,
        max_new_tokens=trainer.max_completion_length,
        temperature=trainer.temperature,
        top_p=trainer.args.top_p,
        top_k=trainer.args.top_k or 0,
        stop_token_ids=tuple(trainer.eos_token_ids),
    )

    def sample(prompts: list[Prompt], generator: torch.Generator) -> RolloutBatch:
        found: RolloutBatch | None = None
        with evaluation_mode(policy.model), torch.no_grad():
            if ranks.place == 0:
                found = rollout(sampler, prompts, params, generator)
            batch = ranks.gather(found)[0]
            assert batch is not None
            return judge(batch, tokenizer, partial(_rewards, trainer, ranks))

    pool = [Prompt(list(prompt), row) for prompt, row in zip(ids, rows, strict=True)]
    return ValidationSource(settings, pool, advantage("grpo"), trainer.args.seed, sample)


def _rewards(trainer: Any, ranks: Ranks, texts: list[str], items: list[dict[str, Any]]) -> list[float]:
    """The trainer's reward functions, weighted as it weighs them; 0 where none of them judged. TRL joins what its ranks
    judge, in their order: each takes equally many, the last of them again where they do not divide evenly."""
    count, share = len(texts), -(-len(texts) // ranks.size)
    places = [min(i, count - 1) for i in range(ranks.place * share, (ranks.place + 1) * share)]
    texts, items = [texts[i] for i in places], [items[i] for i in places]
    prompts = [item["prompt"] for item in items]
    chat = not isinstance(prompts[0], str)
    completions = [[{"role": "assistant", "content": text}] if chat else text for text in texts]
    ids = trainer._tokenizer(texts, add_special_tokens=False)["input_ids"]
    with torch.random.fork_rng():
        found = trainer.plain_rewards(items, prompts, completions, ids)
    weighted: Tensor = (found * trainer.reward_weights.to(found.device)).nansum(dim=1)
    return weighted.tolist()[:count]


def masked(output: dict[str, Any], batch: RolloutBatch, rows: Tensor) -> dict[str, Any]:
    """This rank's part `rows` of TRL's rollout with what selection decided: dropped completions have no loss, kept ones
    their (soft) weight."""
    if batch.kept is None:
        return output
    mask, advantages = output["completion_mask"], output["advantages"]
    kept = batch.kept[rows].to(mask.device)
    advantages_kept = batch.need("advantages")[rows, : mask.shape[1]]
    place = batch.response_mask[rows].int().argmax(1, keepdim=True)
    first = advantages_kept.gather(1, place)[:, 0] if advantages.dim() == 1 else advantages_kept
    return output | {
        "completion_mask": mask * kept[:, None].to(mask.dtype),
        "num_items_in_batch": batch.response_mask[batch.kept].sum().to(mask.device),
        "advantages": torch.where(kept if advantages.dim() == 1 else kept[:, None], first.to(advantages), 0.0),
    }
