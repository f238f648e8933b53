"""The demos' starting policies: a tiny transformer that has learnt the task, and then wrong habits.

Stage 1 trains on right responses until they are sampled often enough; stage 2 briefly on responses with wrong steps
(`misapply`, or a guess instead of a call), down to about 20 % correct. RL has those habits to unlearn. The result is a
plain transformers folder, kept under a name made from the settings, so that the next run starts at once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from gradtrace.algorithms.logits import log_probs_from_logits
from gradtrace.errors import GradtraceError
from gradtrace.tasks import arithmetic, calculator
from gradtrace.tasks.arithmetic import STOP, VOCABULARY, ArithmeticTask, Chain
from gradtrace.tasks.base import is_validation
from gradtrace.tasks.settings import ArithmeticConfig, CalculatorConfig
from gradtrace.trace.files import atomic_directory

VERSION = 1
"""Part of the cache's key: raise it when this file changes what comes out."""
CHECK_EVERY = 20
WARMUP_STEPS = 20

WarmStartProgress = Callable[[str, int, float], None]
"""(stage, step, accuracy so far) while it runs."""
Lessons = Callable[[random.Random, int, float], tuple[Tensor, Tensor]]
"""(rng, how many, probability that a step goes wrong) → long[count, S], prompts and responses, padded on the right; and
bool[count, S]: what the policy has to write of them."""
TinyConfig = ArithmeticConfig | CalculatorConfig


def warm_start(config: TinyConfig, cache: Path, progress: WarmStartProgress | None = None) -> Path:
    """The folder of the warm-started model, made now if it is not in the cache."""
    settings = json.dumps({"version": VERSION, **dataclasses.asdict(config)}, sort_keys=True)
    folder = cache / f"warm_start_{hashlib.sha256(settings.encode()).hexdigest()[:12]}"
    if folder.is_dir():
        return folder
    model = train(config, progress or (lambda stage, step, accuracy: None))
    try:
        with atomic_directory(folder) as unfinished:
            model.save_pretrained(unfinished)
            task = arithmetic if isinstance(config, ArithmeticConfig) else calculator
            task.build_tokenizer().save_pretrained(unfinished)
            (unfinished / "warm_start.json").write_text(settings)
    except OSError:
        if not folder.is_dir():
            raise
        # A run that was started beside this one has made it meanwhile, from the same settings.
    return folder


def build_model(config: TinyConfig, seed: int) -> Qwen2ForCausalLM:
    is_arithmetic = isinstance(config, ArithmeticConfig)
    name, vocabulary = ("arithmetic", VOCABULARY) if is_arithmetic else ("calculator", calculator.VOCABULARY)
    if config.hidden_size % config.heads:
        raise GradtraceError(f"task.{name}.heads={config.heads} does not divide hidden_size={config.hidden_size}.")
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(vocabulary),
            hidden_size=config.hidden_size,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.heads,
            intermediate_size=2 * config.hidden_size,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            eos_token_id=STOP,
            pad_token_id=VOCABULARY.index("<pad>"),
        )
    )


def train(config: TinyConfig, progress: WarmStartProgress) -> Qwen2ForCausalLM:
    settings = config.warm_start
    rng = random.Random(f"warm_start/{settings.seed}")
    model, lessons = build_model(config, settings.seed), lessons_of(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    step = 0

    def learn(corruption: float) -> None:
        nonlocal step
        step += 1
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * min(1.0, step / WARMUP_STEPS)
        tokens, learnt = lessons(rng, settings.batch_size, corruption)
        loss = -learnt_log_probs(model, tokens, learnt).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for number in range(1, settings.max_steps + 1):
        learn(0.0)
        if number % CHECK_EVERY == 0:
            reached = accuracy(model, rng, lessons)
            progress("clean chains", number, reached)
            if reached >= settings.target_accuracy:
                break
    for number in range(1, settings.corrupted_steps + 1):
        learn(settings.corruption)
        if number % CHECK_EVERY == 0:
            progress("wrong habits", number, accuracy(model, rng, lessons))
    return model.eval()


def lessons_of(config: TinyConfig) -> Lessons:
    if isinstance(config, CalculatorConfig):
        return partial(calculator.draw_lessons, config)
    prompt = 2 * config.operations + 2

    def draw(rng: random.Random, count: int, corruption: float) -> tuple[Tensor, Tensor]:
        rows: list[list[int]] = []
        while len(rows) < count:
            chain = Chain.draw(rng, config.operations)
            if not is_validation(chain):
                rows.append([*ArithmeticTask.encode(chain.prompt + chain.solution(corruption, rng)), STOP])
        tokens = torch.tensor(rows)
        return tokens, (torch.arange(tokens.shape[1]) >= prompt).expand(tokens.shape)

    return draw


def learnt_log_probs(model: Qwen2ForCausalLM, tokens: Tensor, learnt: Tensor) -> Tensor:
    """Log-probs float[N] of the tokens that the policy has to write, row by row."""
    logits = model(tokens[:, :-1], use_cache=False).logits[learnt[:, 1:]]
    return log_probs_from_logits(logits, tokens[learnt])


@torch.no_grad()
def accuracy(model: Qwen2ForCausalLM, rng: random.Random, lessons: Lessons, count: int = 256) -> float:
    """Mean probability of sampling the whole right response: its accuracy without the noise of sampling."""
    tokens, learnt = lessons(rng, count, 0.0)
    found = torch.zeros(tokens.shape).masked_scatter(learnt, learnt_log_probs(model, tokens, learnt))
    return float(found.sum(-1).exp().mean())
