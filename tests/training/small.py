"""Real runs that take a second: a random transformer of a few thousand parameters on the demo's task.

It cannot solve the task, so the reward counts characters: groups are mixed from the first step on.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from gradtrace.batch import RolloutBatch
from gradtrace.config.loader import load_config
from gradtrace.config.root import Config
from gradtrace.instruments.contract import Observer, Reporter
from gradtrace.policy.policy import Policy
from gradtrace.tasks.arithmetic import VOCABULARY
from gradtrace.trace.run_files import RunFiles
from gradtrace.training.components import Components, build_components
from gradtrace.training.loop import Trainer
from gradtrace.training.terminal import SilentDisplay

REWARD = """
def count_ones(response, item):
    return response.count("1") + 0.1 * len(response)
"""


def overrides(folder: Path, *more: str) -> list[str]:
    """Of a run of a few steps in `folder`."""
    (folder / "reward.py").write_text(REWARD)
    return [
        f"trainer.runs_dir={folder / 'runs'}",
        "trainer.cpu_threads=1",
        "task.arithmetic.operations=2",
        "task.arithmetic.hidden_size=16",
        "task.arithmetic.layers=1",
        "task.arithmetic.heads=2",
        "task.arithmetic.warm_start.max_steps=2",
        "task.arithmetic.warm_start.corrupted_steps=0",
        "task.arithmetic.warm_start.batch_size=4",
        f"reward.path={folder / 'reward.py'}:count_ones",
        "data.train_batch_size=4",
        "rollout.n=3",
        "rollout.max_new_tokens=8",
        "actor.mini_batch_size=2",
        "actor.optim.lr=1e-2",
        "trainer.total_steps=4",
        "trainer.validation.every=2",
        "trainer.validation.prompts=4",
        "trainer.checkpoint.every=0",
        "trainer.entropy_trace.enable=false",
        "trainer.influence_trace.enable=false",
        "trainer.blame.enable=false",
        *more,
    ]


def resume(run_dir: Path, *more: str) -> Config:
    """The run goes on, with its own reward, which has to be asked for."""
    return load_config([f"resume={run_dir}", f"reward.path={run_dir.parents[1] / 'reward.py'}:count_ones", *more])


def config(folder: Path, *more: str) -> Config:
    return load_config(overrides(folder, *more))


def trainer(folder: Path, *more: str, reporter: Reporter | None = None, observer: Observer | None = None) -> Trainer:
    """Watched by nobody but these two."""
    found = Trainer(components(folder, *more), RunFiles(folder / "run"), SilentDisplay())
    if reporter is not None or observer is not None:
        found.steps.add("mine", reporter or Observed(), observer)
    return found


class Observed(Reporter):
    """Plans every step."""

    def plan(self, batch: RolloutBatch, step: int, sampled: RolloutBatch | None) -> tuple[RolloutBatch, bool]:
        return batch, True


def components(folder: Path, *more: str) -> Components:
    return build_components(config(folder, *more))


def metrics(run_dir: Path, timings: bool = False) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl; without timings they depend on the seed alone."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    unstable = ("timing_s/", "perf/", "check")
    return [
        {key: value for key, value in record.items() if timings or not key.startswith(unstable)} for record in records
    ]


def model(dtype: torch.dtype = torch.float64, seed: int = 0, **options: Any) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    settings = {
        "vocab_size": len(VOCABULARY),
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 32,
        "initializer_range": 0.3,
        "tie_word_embeddings": True,
    }
    return Qwen2ForCausalLM(Qwen2Config(**{**settings, **options})).to(dtype).eval()


def policy(dtype: torch.dtype = torch.float64, temperature: float = 1.0, **options: Any) -> Policy:
    return Policy(model(dtype, **options), torch.device("cpu"), temperature)


def random_batch(groups: int = 3, n: int = 3, longest: int = 6, seed: int = 0) -> RolloutBatch:
    """Prompts and responses of different lengths, random advantages and sampler log-probs (float64)."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (groups * n,), generator=generator)
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    shape = mask.shape

    def noise() -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) * mask

    prompt_lengths = torch.randint(1, 6, (groups,), generator=generator).tolist()
    return RolloutBatch(
        prompts=[torch.randint(3, 18, (k,), generator=generator).tolist() for k in prompt_lengths],
        group=torch.arange(groups).repeat_interleave(n),
        responses=torch.randint(3, 18, shape, generator=generator) * mask,
        response_mask=mask,
        finished=torch.ones(groups * n, dtype=torch.bool),
        sampler_log_probs=-noise().abs() - 0.5,
        rewards=torch.randn(groups * n, generator=generator),
        advantages=noise(),
        ref_log_probs=-noise().abs(),
    )
