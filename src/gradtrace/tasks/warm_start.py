"""The demo's starting policy: a tiny transformer that has learnt the task, and then wrong habits.

Stage 1 trains on correct chains until they are sampled right often enough; stage 2 briefly on chains with
`misapply` steps, down to about 20 % correct. RL has those habits to unlearn. The result is a plain transformers
folder, kept under a name made from the settings, so that the next run starts at once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from gradtrace.algorithms.logits import log_probs_from_logits
from gradtrace.config import ArithmeticConfig
from gradtrace.errors import GradtraceError
from gradtrace.tasks.arithmetic import VOCABULARY, Chain, build_tokenizer
from gradtrace.trace.atomic import atomic_directory

VERSION = 1
"""Part of the cache's key: raise it when this file changes what comes out."""
CHECK_EVERY = 20
WARMUP_STEPS = 20

Progress = Callable[[str, int, float], None]
"""(stage, step, accuracy so far) while it runs."""


def warm_start(config: ArithmeticConfig, cache: Path, progress: Progress | None = None) -> Path:
    """The folder of the warm-started model, made now if it is not in the cache."""
    settings = json.dumps({"version": VERSION, **dataclasses.asdict(config)}, sort_keys=True)
    folder = cache / f"warm_start_{hashlib.sha256(settings.encode()).hexdigest()[:12]}"
    if folder.is_dir():
        return folder
    model = train(config, progress or (lambda stage, step, accuracy: None))
    with atomic_directory(folder) as unfinished:
        model.save_pretrained(unfinished)
        build_tokenizer().save_pretrained(unfinished)
        (unfinished / "warm_start.json").write_text(settings)
    return folder


def build_model(config: ArithmeticConfig, seed: int) -> Qwen2ForCausalLM:
    if config.hidden_size % config.heads:
        raise GradtraceError(
            f"task.arithmetic.heads={config.heads} does not divide hidden_size={config.hidden_size}."
        )
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(VOCABULARY),
            hidden_size=config.hidden_size,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.heads,
            intermediate_size=2 * config.hidden_size,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            eos_token_id=VOCABULARY.index("<eos>"),
            pad_token_id=VOCABULARY.index("<pad>"),
        )
    )


def train(config: ArithmeticConfig, progress: Progress) -> Qwen2ForCausalLM:
    settings = config.warm_start
    rng = random.Random(f"warm_start/{settings.seed}")
    model = build_model(config, settings.seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    step = 0

    def learn(corruption: float) -> None:
        nonlocal step
        step += 1
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * min(1.0, step / WARMUP_STEPS)
        tokens = draw_tokens(rng, config.operations, settings.batch_size, corruption)
        loss = -response_log_probs(model, tokens, config.operations).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for number in range(1, settings.max_steps + 1):
        learn(0.0)
        if number % CHECK_EVERY == 0:
            reached = accuracy(model, rng, config.operations)
            progress("clean chains", number, reached)
            if reached >= settings.target_accuracy:
                break
    for number in range(1, settings.corrupted_steps + 1):
        learn(settings.corruption)
        if number % CHECK_EVERY == 0:
            progress("wrong habits", number, accuracy(model, rng, config.operations))
    return model.eval()


def draw_tokens(rng: random.Random, operations: int, count: int, corruption: float = 0.0) -> Tensor:
    """long[count, prompt + response]: training chains with their solutions and the stop token."""
    rows: list[list[int]] = []
    while len(rows) < count:
        chain = Chain.draw(rng, operations)
        if not chain.is_validation:
            text = chain.prompt + chain.solution(corruption, rng)
            rows.append([VOCABULARY.index(character) for character in text] + [VOCABULARY.index("<eos>")])
    return torch.tensor(rows)


def response_log_probs(model: Qwen2ForCausalLM, tokens: Tensor, operations: int) -> Tensor:
    """Log-probs float[count, T] of the tokens after the prompt."""
    prompt = 2 * operations + 2
    logits = model(tokens[:, :-1], use_cache=False).logits[:, prompt - 1 :]
    return log_probs_from_logits(logits, tokens[:, prompt:])


@torch.no_grad()
def accuracy(model: Qwen2ForCausalLM, rng: random.Random, operations: int, chains: int = 256) -> float:
    """Mean probability of sampling the whole correct response: its accuracy without the noise of sampling."""
    tokens = draw_tokens(rng, operations, chains)
    return float(response_log_probs(model, tokens, operations).sum(-1).exp().mean())
