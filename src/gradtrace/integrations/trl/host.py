"""The host of a `GRPOTrainer`: its model with the passes that instruments ask for, and what it knows of the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from gradtrace.algorithms import Denominator, advantage
from gradtrace.algorithms import token_weights as aggregated
from gradtrace.attribution.collectives import Ranks, is_sharded
from gradtrace.attribution.geometry import ClippedGradients, unwrapped
from gradtrace.batch import RolloutBatch
from gradtrace.errors import GradtraceError
from gradtrace.instruments.columns import Truth
from gradtrace.instruments.contract import Backward, NextGradient, OptimizerStep, Rows, Samples, Table, TrainingRun
from gradtrace.instruments.steps import InstrumentSteps
from gradtrace.integrations.trl.batches import LeftPadded, Rollout, left_padded
from gradtrace.integrations.trl.losses import AGGREGATION, clipped_loss, token_weights, training_pass
from gradtrace.integrations.trl.settings import keyword
from gradtrace.policy.loss import policy_terms
from gradtrace.policy.microbatch import MicroBatch, MicroBatches
from gradtrace.policy.policy import Policy
from gradtrace.policy.rollouts import judge, rollout
from gradtrace.rollout import Sampler, SamplingParams
from gradtrace.rollout.sampler import evaluation_mode
from gradtrace.rollout.settings import EVERY_TOKEN
from gradtrace.tasks.base import Prompt
from gradtrace.training.host import How, PolicyHost, Source

TOKENS_PER_PASS = 16384
"""Tokens in one pass of our own over responses that are not a slice, padding counted."""


@dataclass
class TrlPolicy(Policy):
    trainer: Any
    log_probs_and_entropies: Callable[..., tuple[Tensor, Tensor | None, Tensor | None]]
    """`GRPOTrainer._get_per_token_logps_and_entropies` of the trainer."""

    @staticmethod
    def of(trainer: Any, log_probs_and_entropies: Callable[..., Any]) -> TrlPolicy:
        accelerator = trainer.accelerator
        model = accelerator.unwrap_model(trainer.model)
        return TrlPolicy(model, accelerator.device, trainer.temperature, trainer, log_probs_and_entropies)

    def statistics(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """A slice as TRL computes it; other inputs (for forward-mode derivatives, which TRL's fused head has not)
        with the model's own head. Draws nothing from the generators that training draws from."""
        # Through torch's older kind of checkpoints `autograd.grad` does not pass.
        reentrant = (self.trainer.args.gradient_checkpointing_kwargs or {}).get("use_reentrant")
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng())
            if reentrant or not isinstance(micro, LeftPadded):
                stack.enter_context(without_checkpointing(self.model))
            if not isinstance(micro, LeftPadded):
                return super().statistics(micro)
            log_probs, entropies, _ = self.log_probs_and_entropies(
                self.model, micro.input_ids, micro.attention_mask, micro.mask.shape[1], compute_entropy=True
            )
        assert entropies is not None
        mask = micro.mask.to(log_probs.device)
        return log_probs[mask], entropies[mask]

    @contextmanager
    def own_pass(self) -> Iterator[list[Tensor]]:
        """What FSDP has accumulated of training's gradients waits."""
        model = self.model
        if not isinstance(model, FSDPModule):
            with super().own_pass() as outputs:
                yield outputs
            return
        model.set_requires_gradient_sync(False)
        try:
            with super().own_pass() as outputs:
                yield outputs
        finally:
            # Whether training's next backward pass is the last one before the optimizer step.
            model.set_requires_gradient_sync(bool(self.trainer.accelerator.sync_gradients))


@contextmanager
def without_checkpointing(model: Any) -> Iterator[None]:
    """Forward mode keeps no activations, and torch's checkpoints and transformers' hook on the embeddings, which calls
    `requires_grad_`, do not work under it."""
    switched = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    embedding = model.get_input_embeddings()
    hooks = dict(embedding._forward_hooks)
    for module in switched:
        module.gradient_checkpointing = False
    for key, hook in hooks.items():
        if getattr(hook, "__name__", "") == "make_inputs_require_grads":
            del embedding._forward_hooks[key]
    try:
        yield
    finally:
        for module in switched:
            module.gradient_checkpointing = True
        embedding._forward_hooks.update(hooks)


class TrlHost(PolicyHost):
    """A rollout is one optimizer step of the trace, whose passes come slice by slice."""

    def __init__(self, trainer: Any, policy: TrlPolicy, ranks: Ranks) -> None:
        super().__init__(
            policy,
            unwrapped(trainer.optimizer),
            training_pass(trainer),
            grad_clip=trainer.args.max_grad_norm or 0.0,
            token_budget=TOKENS_PER_PASS,
            ranks=ranks,
            cannot=what_it_cannot(trainer, is_sharded(policy.model)),
        )
        self.trainer = trainer
        self.rollout: Rollout | None = None
        self.slice: LeftPadded | None = None
        """Whose passes are under way."""
        self._policy_loss = clipped_loss(trainer)

    # ------------------------------------------------------------ what is trained on

    def train_on(self, rollout: Rollout) -> None:
        """The slices of this rollout come next."""
        loss = self._policy_loss
        self.rollout = rollout
        self.source = Source(
            rollout.batch,
            partial(self._laid_out, rollout.batch),
            weights=torch.zeros(len(rollout.batch), dtype=torch.float64),
            update=rollout.update,
            terms=rollout.terms,
            policy_terms=None if loss is None else partial(policy_terms, loss, rollout.batch),
        )

    def drop(self) -> None:
        self.rollout = self.slice = self.source = None

    def enter_slice(self, inputs: dict[str, Tensor]) -> Rows:
        """The passes of a slice, as TRL gives it to its loss, come next. Returns its rows that are trained on."""
        assert self.rollout is not None
        micro = left_padded(inputs)
        weights = token_weights(self.trainer, inputs).amax(1)
        self.rollout.token_weight[micro.rows] = weights
        self.training.weights[micro.rows] = weights.double() / self.ranks.size
        self.slice = micro
        return self.training.rows(micro.rows[torch.isin(micro.rows, self.rollout.update.rows)])

    @property
    def steps_taken(self) -> int:
        """Optimizer steps on this rollout so far."""
        assert self.rollout is not None
        return int(self.trainer.state.global_step) - self.rollout.began_at

    def pass_of_slice(self) -> Backward:
        assert self.slice is not None
        return self.backward(self.training, self.slice, self.steps_taken)

    def _laid_out(self, batch: RolloutBatch, ids: Tensor, how: How) -> Iterable[MicroBatch]:
        if how == "fewest":
            return MicroBatches(batch, self.token_budget, self.policy.best_layout())(ids)
        if self.slice is not None and bool(torch.isin(ids, self.slice.rows).all()):
            return [self.slice.only(ids)]
        return MicroBatches(batch, self.token_budget)(ids)

    # ------------------------------------------------------------ what instruments ask for

    def own(self, update: OptimizerStep) -> Rows:
        rows = update.rows.sort().values
        return self.training.rows(rows[self.training.weights[rows] > 0])

    def next_gradient(self) -> NextGradient | None:
        """None where the rollout's passes belong to several steps, of which the next gradient is a part only."""
        # While gradients are not in sync more is to come, and on several ranks it is not their mean yet.
        if self.rollout is None or self.steps_taken or not self.trainer.accelerator.sync_gradients:
            return None
        gradient = ClippedGradients(self.model, self.trainer.args.max_grad_norm)
        return NextGradient(gradient, gradient.factor)


def what_it_cannot(trainer: Any, sharded: bool) -> dict[str, str]:
    """What this trainer keeps instruments from, and why."""
    args = trainer.args
    found = {
        "more_rollouts": "train_on_validation=True cannot run in TRL: GRPOTrainer splits a rollout of fixed size into "
        "its optimizer steps, and more completions do not fit. Put the trusted prompts into train_dataset as well; "
        "train_on_validation=False.",
        "scope_pass": "this host cannot run the whole batch at the first weights",
        "fresh_samples": "TRL samples by itself, and the probe needs responses of its own at the weights of the step: "
        "run `gradtrace probe` on a checkpoint",
    }
    if args.steps_per_generation != args.gradient_accumulation_steps:
        found["next_gradient"] = (
            f"a rollout is dealt out over {args.steps_per_generation} slices and an optimizer step takes "
            f"{args.gradient_accumulation_steps}, so that no gradient is of a whole rollout; set steps_per_generation "
            "to gradient_accumulation_steps"
        )
    if clipped_loss(trainer) is None:
        found["policy_terms"] = f"loss_type={trainer.loss_type!r} does not clip every token's own ratio"
    if trainer.accelerator.num_processes > 1:
        found["trials"] = "real optimizer steps are taken back, which one process does alone"
    if trainer.tools or trainer.rollout_func is not None:
        found["samples"] = (
            "its prompts are sampled by gradtrace itself, in one turn: leave `selection` out where GRPOTrainer has "
            "tools, an environment_factory or a rollout_func; the traces work with them."
        )
    if sharded:
        found["token_terms"] = (
            "its forward-mode pass needs whole weights, and here they are sharded; train without FSDP for it"
        )
        found["policy_terms"] = found["gradient"] = "its gradients need whole weights, and FSDP shards them"
        found["samples"] = (
            "it needs whole weights on every process, and FSDP shards them: leave `selection` out, train without FSDP, "
            "or use gradtrace's verl integration."
        )
    return found


class TrlRun(TrainingRun):
    """What reporters may ask. Prompts of the eval_dataset are sampled by our own sampler with generators of their own,
    so that nothing is drawn from TRL's random numbers, and judged by the trainer's reward functions."""

    steps: InstrumentSteps

    def __init__(self, host: TrlHost, truth: Truth, report: Callable[[str], None]) -> None:
        trainer = host.trainer
        self.host = host
        self.trainer = trainer
        self.task = SimpleNamespace(name="trl", truth=truth)
        self.tokenizer = trainer._tokenizer
        self.seed = trainer.args.seed
        self.cannot = host.cannot
        self.estimator = advantage("grpo")
        self.report = report

    def setting(self, key: str) -> str:
        return keyword(key)

    def token_weights(self, mask: Tensor) -> Tensor:
        mode = AGGREGATION.get(self.trainer.loss_type, "token_mean")
        return aggregated(mask, mode, Denominator.of(mask, self.trainer.max_completion_length))

    def ask(self, name: str, question: Any) -> Table:
        return self.steps.ask(name, question)

    def held_out(self, count: int, key: str, files: Sequence[str] = (), unreported: bool = False) -> list[Prompt]:
        if files:
            raise GradtraceError(f"{key} is not read here: give GRPOTrainer an eval_dataset instead.")
        if self.trainer.eval_dataset is None or isinstance(self.trainer.eval_dataset, dict):
            raise GradtraceError(
                f"{key.split('.')[0]} needs prompts that are not trained on: give GRPOTrainer one eval_dataset."
            )
        rows = [dict(row) for row, _ in zip(self.trainer.eval_dataset, range(count), strict=False)]
        ids = self.trainer._tokenize_prompts([row["prompt"] for row in rows])[0]
        return [Prompt(list(prompt), row) for prompt, row in zip(ids, rows, strict=True)]

    @cached_property
    def _sampler(self) -> Sampler:
        return Sampler(self.host.model, self.tokenizer.pad_token_id)

    def sample(self, wanted: Samples) -> RolloutBatch:
        """Responses at the weights as they are. The first process samples, and each judges a part. Collective."""
        trainer, ranks = self.trainer, self.host.ranks
        shape = {"top_p": trainer.args.top_p, "top_k": trainer.args.top_k or 0}
        params = SamplingParams(
            n=wanted.n or trainer.num_generations,
            max_new_tokens=trainer.max_completion_length,
            temperature=trainer.temperature,
            stop_token_ids=tuple(trainer.eos_token_ids),
            **(EVERY_TOKEN if wanted.full_distribution else shape),
        )
        with evaluation_mode(self.host.model), torch.no_grad():
            is_first = ranks.place == 0
            found = rollout(self._sampler, wanted.prompts, params, wanted.generator) if is_first else None
            batch = ranks.gather(found)[0]
            assert batch is not None
            return judge(batch, self.tokenizer, self._rewards) if wanted.judged else batch

    def _rewards(self, texts: list[str], items: list[dict[str, Any]]) -> list[float]:
        """The trainer's reward functions, weighted as it weighs them; 0 where none of them judged. TRL joins what its
        ranks judge, in their order: each takes equally many, the last of them again where they do not divide evenly."""
        trainer, ranks = self.trainer, self.host.ranks
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
