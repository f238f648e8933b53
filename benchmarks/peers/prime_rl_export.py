"""Bytes of a step's trace file against prime-rl's token export, for the same rollouts.

prime-rl writes one JSON line per sequence with a list per field, prompt tokens included (fields learned from its public
source, src/prime_rl/trainer/rl/token_export.py, schema version 1; the writer here is ours). Ours is the entropy trace:
token ids, entropies, log-probs, rewards, advantages, prompts once per group; prime-rl's extra fields (importance ratio,
mismatch KL, masks) follow from log-probs of sampler and trainer, of which ours keeps one. Therefore two comparisons:
its format as it is, and its layout with only the fields that ours has too. `_gz`: both sides through gzip.
Rollouts are synthetic: random token ids and float32 numbers of the sizes that training has; seconds are of writing.
"""

from __future__ import annotations

import gzip
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import emit, machine, parse_arguments
from gradtrace.batch import RolloutBatch
from gradtrace.instruments.entropy_trace import ENTROPY_TRACE
from gradtrace.instruments.entropy_trace.reporter import entropy_columns
from gradtrace.trace.writer import TraceWriter

VOCABULARY = 49152
SHARED_FIELDS = ("token_ids", "loss_mask", "advantages", "rewards", "trainer_logprobs", "entropy")


def rollouts(groups: int, n: int, prompt: int, longest: int) -> RolloutBatch:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(longest // 4, longest + 1, (groups * n,), generator=generator)
    mask = torch.arange(longest) < lengths[:, None]

    def positive() -> torch.Tensor:
        return torch.rand(mask.shape, generator=generator).log().neg() * mask

    old = -positive()
    rewards = torch.randint(0, 2, (groups * n,), generator=generator).float()
    grouped = rewards.view(groups, n)
    advantages = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)
    return RolloutBatch(
        prompts=torch.randint(0, VOCABULARY, (groups, prompt), generator=generator).tolist(),
        group=torch.arange(groups).repeat_interleave(n),
        responses=torch.randint(0, VOCABULARY, mask.shape, generator=generator) * mask,
        response_mask=mask,
        finished=lengths < longest,
        sampler_log_probs=old + 1e-3 * torch.randn(mask.shape, generator=generator) * mask,
        rewards=rewards,
        old_log_probs=old,
        entropies=positive(),
        advantages=advantages.flatten()[:, None] * mask,
    )


def prime_rl_records(batch: RolloutBatch, step: int) -> list[dict[str, Any]]:
    """One record per sequence with prime-rl's field names."""
    assert batch.rewards is not None and batch.old_log_probs is not None
    assert batch.entropies is not None and batch.advantages is not None
    records = []
    for row, group in enumerate(batch.group.tolist()):
        prompt, length = batch.prompts[group], int(batch.response_lengths[row])
        zeros = torch.zeros(len(prompt))

        def whole(
            values: torch.Tensor, row: int = row, zeros: torch.Tensor = zeros, length: int = length
        ) -> torch.Tensor:
            return torch.cat([zeros, values[row, :length]])

        trainer, sampler = whole(batch.old_log_probs), whole(batch.sampler_log_probs)
        log_ratio = trainer - sampler
        ratio = log_ratio.exp()
        advantages = whole(batch.advantages).tolist()
        trained = [False] * len(prompt) + [True] * length
        records.append(
            {
                "schema_version": 1,
                "step": step,
                "export_step": step,
                "rank": 0,
                "micro_step": row,
                "micro_sequence_idx": 0,
                "export_sequence_idx": row,
                "run_id": None,
                "env_name": "synthetic",
                "token_ids": prompt + batch.responses[row, :length].tolist(),
                "position_ids": list(range(len(prompt) + length)),
                "loss_mask": trained,
                "advantages": advantages,
                "losses": [{"rl": {"advantage": a, "mask": m}} for a, m in zip(advantages, trained, strict=True)],
                "rewards": [float(batch.rewards[row])] * (len(prompt) + length),
                "inference_logprobs": sampler.tolist(),
                "trainer_logprobs": trainer.tolist(),
                "entropy": whole(batch.entropies).tolist(),
                "mismatch_kl": (ratio - log_ratio - 1).tolist(),
                "log_importance_ratio": log_ratio.tolist(),
                "importance_ratio": ratio.tolist(),
                "prob_delta": (trainer.exp() - sampler.exp()).tolist(),
                "is_masked": [False] * (len(prompt) + length),
                "is_masked_high": [False] * (len(prompt) + length),
                "is_masked_low": [False] * (len(prompt) + length),
            }
        )
    return records


def json_lines(records: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(record, separators=(",", ":")).encode() + b"\n" for record in records)


def our_file(batch: RolloutBatch, folder: Path) -> bytes:
    with TraceWriter(folder, ENTROPY_TRACE, on_error="raise") as writer:
        writer.write(1, entropy_columns(batch), {"task": "synthetic"})
    return next((folder / ENTROPY_TRACE / "steps").iterdir()).read_bytes()


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(__doc__, arguments)
    batch = rollouts(4, 8, 64, 128) if args.quick else rollouts(32, 8, 128, 512)
    start = time.perf_counter()
    records = prime_rl_records(batch, 1)
    theirs = json_lines(records)
    their_seconds = time.perf_counter() - start
    shared = json_lines([{name: record[name] for name in SHARED_FIELDS} for record in records])
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        ours = our_file(batch, Path(folder))
        our_seconds = time.perf_counter() - start
    zipped = {name: len(gzip.compress(data)) for name, data in (("theirs", theirs), ("shared", shared), ("ours", ours))}
    tokens = int(batch.response_lengths.sum())
    ratios = {
        "bytes_prime_rl": len(theirs) / len(ours),
        "bytes_prime_rl_gz": zipped["theirs"] / zipped["ours"],
        "bytes_prime_rl_shared_fields": len(shared) / len(ours),
        "bytes_prime_rl_shared_fields_gz": zipped["shared"] / zipped["ours"],
    }
    detail = {
        "machine": machine(),
        "responses": len(batch),
        "response_tokens": tokens,
        "prompt_tokens_each": len(batch.prompts[0]),
        "theirs_bytes": len(theirs),
        "theirs_shared_fields_bytes": len(shared),
        "ours_bytes": len(ours),
        "gz_bytes": zipped,
        "ours_bytes_per_response_token": round(len(ours) / tokens, 2),
        "theirs_bytes_per_response_token": round(len(theirs) / tokens, 2),
        "theirs_s": round(their_seconds, 3),
        "ours_s": round(our_seconds, 3),
    }
    emit("peers.prime_rl_export", ratios, detail)


if __name__ == "__main__":
    main()
