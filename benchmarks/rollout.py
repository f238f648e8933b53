"""Tokens per second of our sampler against transformers' `generate`: same model, same batch, same lengths.

Both sample at temperature 1 from the whole vocabulary, nothing may stop early. Ours also returns the log-probs of
what it sampled; `generate` is not asked for them, which favours it.

- tiny: the demo's model and batch, 32 prompts of 10 tokens x 8 responses of 18.
- smollm2: SmolLM2-135M in float32, 2 prompts of 64 tokens x 8 responses of 64 tokens.

In the details: the same with 16 different prompts (nothing shared), and how close one decode step comes to the time
that reading the weights and the cache from memory takes at the least, the speed of memory measured in the same run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.common import Timing, alternate, emit, load_smollm2, parse_arguments, seconds, tiny_model
from gradtrace.rollout import Sampler, SamplingParams

Clock = Callable[[], float]
MEMORY_PROBE_BYTES = 512 * 2**20
"""Ten times the last-level cache of a server core complex, so that it measures memory."""


def random_prompts(count: int, length: int, vocabulary: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, vocabulary, (count, length), generator=generator).tolist()


def generate_with_transformers(model: Any, prompts: list[list[int]], n: int, new_tokens: int) -> Callable[[], None]:
    ids = torch.tensor(prompts)
    model.generation_config.eos_token_id = None

    def run() -> None:
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                num_return_sequences=n,
                max_new_tokens=new_tokens,
                pad_token_id=0,
            )
        assert output.shape == (len(prompts) * n, len(prompts[0]) + new_tokens), output.shape

    return run


def generate_with_gradtrace(model: Any, prompts: list[list[int]], n: int, new_tokens: int) -> Callable[[], None]:
    sampler, params = Sampler(model), SamplingParams(n=n, max_new_tokens=new_tokens)

    def run() -> None:
        batch = sampler.generate(prompts, params)
        assert batch.responses.shape == (len(prompts) * n, new_tokens), batch.responses.shape

    return run


def compare(model: Any, prompts: list[list[int]], n: int, new_tokens: int, rounds: int) -> Timing:
    """Half of the tokens warm up both sides, enough for ours to pack its weights."""
    sides = (generate_with_transformers, generate_with_gradtrace)
    for side in sides:
        side(model, prompts, n, new_tokens - new_tokens // 2)()
    theirs, ours = (side(model, prompts, n, new_tokens) for side in sides)
    return alternate(theirs, ours, rounds, warmup=0)


def described(timing: Timing, sequences: int, new_tokens: int) -> dict[str, Any]:
    tokens = sequences * new_tokens
    return {
        **timing.detail(),
        "sequences": sequences,
        "new_tokens": new_tokens,
        "theirs_tokens_per_s": round(tokens / timing.theirs_median, 1),
        "ours_tokens_per_s": round(tokens / timing.ours_median, 1),
        "ratio": round(timing.ratio, 3),
    }


def memory_bytes_per_second(rounds: int, clock: Clock = time.perf_counter) -> float:
    """How fast the cores together can read float32 from memory: a matrix times a vector."""
    matrix = torch.ones(MEMORY_PROBE_BYTES // 4 // 4096, 4096)
    vector = torch.ones(4096)
    torch.mv(matrix, vector)
    return MEMORY_PROBE_BYTES / min(seconds(lambda: torch.mv(matrix, vector), clock) for _ in range(rounds))


def bandwidth_share(
    model: Any,
    prompts: list[list[int]],
    n: int,
    new_tokens: int,
    rounds: int,
    clock: Clock = time.perf_counter,
) -> dict[str, Any]:
    """The least time that memory allows for one decode step, over the time it takes."""
    long = generate_with_gradtrace(model, prompts, n, new_tokens)
    short = generate_with_gradtrace(model, prompts, n, 1)  # reads the prompts, draws once, decodes nothing
    short()
    taken = [seconds(long, clock) - seconds(short, clock) for _ in range(rounds)]
    step_s = statistics.median(taken) / (new_tokens - 1)

    weight_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    config = model.config
    head_dim = model.model.layers[0].self_attn.head_dim
    token_bytes = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * head_dim
    cache_bytes = len(prompts) * n * (len(prompts[0]) + new_tokens // 2) * token_bytes  # half-way through
    bytes_per_second = memory_bytes_per_second(5, clock)
    limit_s = (weight_bytes + cache_bytes) / bytes_per_second
    return {
        "memory_GB_per_s": round(bytes_per_second / 1e9, 1),
        "MB_per_step": round((weight_bytes + cache_bytes) / 1e6),
        "limit_ms_per_step": round(limit_s * 1e3, 4),
        "ours_ms_per_step": round(step_s * 1e3, 3),
        "share_of_limit": round(limit_s / step_s, 3),
    }


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(__doc__, arguments)
    smollm2, _ = load_smollm2()
    rounds = 2 if args.quick else 5
    new_tokens = 16 if args.quick else 64

    tiny = compare(tiny_model(), random_prompts(32, 10, 18), n=8, new_tokens=18, rounds=5 * rounds)
    prompts = random_prompts(2, 64, smollm2.config.vocab_size)
    grouped = compare(smollm2, prompts, n=8, new_tokens=new_tokens, rounds=rounds)
    detail = {
        "tiny": described(tiny, 256, 18),
        "smollm2": described(grouped, 16, new_tokens),
        "smollm2_decode": bandwidth_share(smollm2, prompts, 8, new_tokens, rounds),
        "threads": torch.get_num_threads(),
    }
    if not args.quick:
        different = random_prompts(16, 64, smollm2.config.vocab_size)
        detail["smollm2_16_prompts"] = described(
            compare(smollm2, different, n=1, new_tokens=new_tokens, rounds=2), 16, new_tokens
        )
    emit(
        "rollout",
        {"speedup_generate_tiny": tiny, "speedup_generate_smollm2": grouped},
        detail,
    )


if __name__ == "__main__":
    main()
