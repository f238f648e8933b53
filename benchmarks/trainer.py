"""One GRPO step, rollout and update included, against TRL's GRPOTrainer: same weights, prompts, shapes, dtype,
sampling and loss (token mean, clip, no KL), one optimizer step per rollout, on the same threads.

TRL's side is its real `train()`: a callback times each step from its begin to its end, and our steps run in
between, so the sides alternate. Its logging and data loading fall outside the timed part. Ours is measured twice:
with the default settings, which compute a prompt once for all its responses, and with `actor.share_prompts=never`
(`…_apart`); the update they make is the same.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.utils import logging as transformers_logging

from benchmarks.common import Timing, emit, machine, parse_arguments, seconds, smollm2_path
from gradtrace.config.loader import load_config
from gradtrace.metrics import Timer
from gradtrace.tasks.arithmetic import ArithmeticTask
from gradtrace.tasks.base import Prompt
from gradtrace.tasks.rewards import RewardFunction
from gradtrace.tasks.settings import ArithmeticConfig, WarmStartConfig
from gradtrace.tasks.warm_start import warm_start
from gradtrace.trace.run_files import RunFiles
from gradtrace.training.components import build_components
from gradtrace.training.loop import Trainer
from gradtrace.training.terminal import SilentDisplay

QUESTIONS = [
    "Tell me a long story about a lighthouse keeper and a storm.",
    "Explain in detail how a steam engine works, from the boiler to the wheels.",
    "Describe the life of a river from its spring to the sea.",
    "Write a long letter from a sailor to his sister about his first voyage.",
    "Explain how bread is made, and why each step matters.",
    "Describe a market in the morning, with its sounds and smells.",
    "What is the history of the bicycle? Answer at length.",
    "Give a long account of how bees live in a hive.",
]


@dataclass(frozen=True)
class Case:
    model: Path
    prompts: list[str]
    n: int
    max_new_tokens: int
    warmup: int
    rounds: int
    threads: int


def reward_of(text: str) -> float:
    """Arbitrary, cheap and different between responses, so that no group is constant."""
    return zlib.crc32(text.encode()) % 1000 / 1000


class OurSide:
    """The embedded loop's step on the case's prompts, again and again."""

    def __init__(self, case: Case, folder: Path, share_prompts: str) -> None:
        config = load_config(
            [
                f"actor.share_prompts={share_prompts}",
                "trainer.influence_trace.enable=false",
                "trainer.entropy_trace.enable=false",
                "trainer.blame.enable=false",
                f"model.path={case.model}",
                "model.device=cpu",
                f"trainer.cpu_threads={case.threads}",
                f"rollout.n={case.n}",
                f"rollout.max_new_tokens={case.max_new_tokens}",
                f"data.train_batch_size={len(case.prompts)}",
                "actor.mini_batch_size=0",
                "actor.optim.lr=1e-6",
                "actor.optim.warmup_steps=0",
                "algorithm.policy_loss_options.clip_high=0.2",
            ]
        )
        parts = build_components(config)
        tokenizer = AutoTokenizer.from_pretrained(case.model)
        prompts = [Prompt(tokenizer(text)["input_ids"], {"prompt": text}) for text in case.prompts]
        parts.task.tokenizer = tokenizer
        parts.task.stop_token_ids = (tokenizer.eos_token_id,)
        parts.task.next_prompts = lambda count: prompts  # type: ignore[method-assign]
        parts.reward = RewardFunction("crc", lambda response, item: reward_of(response))
        self.trainer = Trainer(parts, RunFiles(folder), SilentDisplay())
        self.steps = 0
        self.lengths: list[float] = []
        self.phases: dict[str, list[float]] = {}

    def step(self) -> None:
        self.steps += 1
        timer = Timer()
        batch, _ = self.trainer.experience.collect(self.trainer.components.generators["rollout"], timer)
        batch, metrics = self.trainer.train_step(batch, self.steps, timer)
        self.lengths.append(metrics["response_length/mean"])
        for name, value in timer.seconds.items():
            self.phases.setdefault(name, []).append(value)


class Alternate(TrainerCallback):
    """Times TRL's steps and makes one of ours after each."""

    def __init__(self, ours: dict[str, OurSide], warmup: int) -> None:
        self.ours = ours
        self.warmup = warmup
        self.times: dict[str, list[float]] = {"theirs": [], **{name: [] for name in ours}}
        self.made = 0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.start = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        taken = {"theirs": time.perf_counter() - self.start}
        taken.update({name: seconds(side.step) for name, side in self.ours.items()})
        self.made += 1
        if self.made > self.warmup:
            for name, value in taken.items():
                self.times[name].append(value)


def rewards_of(completions: list[str], **_: Any) -> list[float | None]:
    """The reward as TRL calls it."""
    return [reward_of(text) for text in completions]


def compare(case: Case, name: str) -> tuple[dict[str, Timing], dict[str, Any]]:
    """Ratios with the default settings and with every response's own prompt, and details."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(case.threads)
    with tempfile.TemporaryDirectory() as folder:
        sides = {
            "ours": OurSide(case, Path(folder) / "default", share_prompts="auto"),
            "ours_apart": OurSide(case, Path(folder) / "apart", share_prompts="never"),
        }
        callback = Alternate(sides, case.warmup)
        responses = len(case.prompts) * case.n
        model = AutoModelForCausalLM.from_pretrained(case.model, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(case.model)
        arguments = GRPOConfig(
            output_dir=str(Path(folder) / "theirs"),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=responses,
            gradient_accumulation_steps=1,
            steps_per_generation=1,
            num_generations=case.n,
            max_completion_length=case.max_new_tokens,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            beta=0.0,
            epsilon=0.2,
            epsilon_high=0.2,
            loss_type="dapo",
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            max_steps=case.warmup + case.rounds,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            logging_steps=10_000,
            seed=0,
        )
        trainer = GRPOTrainer(
            model=model,
            processing_class=tokenizer,
            args=arguments,
            reward_funcs=rewards_of,
            train_dataset=Dataset.from_list([{"prompt": text} for text in case.prompts]),
            callbacks=[callback],
        )
        trainer.train()
        theirs_length = trainer.state.log_history[-1]["completions/mean_length"]
    ours, times = sides["ours"], callback.times
    timing, apart = (Timing(times["theirs"], times[side]) for side in ("ours", "ours_apart"))
    phases = {name: round(statistics.median(values), 5) for name, values in ours.phases.items()}
    detail = {
        **timing.detail(),
        "ours_samples_per_s": round(responses / timing.ours_median, 2),
        "theirs_samples_per_s": round(responses / timing.theirs_median, 2),
        "responses": responses,
        "max_new_tokens": case.max_new_tokens,
        "ours_mean_length": round(sum(ours.lengths) / len(ours.lengths), 2),
        "theirs_mean_length": round(theirs_length, 2),
        "without_shared_prompts": apart.detail(),
        "ours_phases_s": phases,
        "threads": case.threads,
    }
    return {f"speedup_trl_{name}": timing, f"speedup_trl_{name}_apart": apart}, detail


def tiny_case(quick: bool, threads: int, folder: Path) -> Case:
    """The demo's model and shapes; trained just enough to know how long a response is."""
    task = ArithmeticTask(ArithmeticConfig())
    settings = ArithmeticConfig(warm_start=WarmStartConfig(max_steps=60, corrupted_steps=0))
    prompts = [prompt.item["prompt"] for prompt in task.next_prompts(32)]
    return Case(warm_start(settings, folder), prompts, 8, 20, warmup=2, rounds=5 if quick else 25, threads=threads)


def smollm2_case(quick: bool, threads: int) -> Case:
    path = smollm2_path()
    tokenizer = AutoTokenizer.from_pretrained(path)
    prompts = [
        str(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
            )
        )
        for question in QUESTIONS[: 2 if quick else 4]
    ]
    return Case(path, prompts, 4, 32 if quick else 64, warmup=1, rounds=2 if quick else 4, threads=threads)


def only(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=["tiny", "smollm2"], help="one of the two models")


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(__doc__, arguments, only)
    transformers_logging.disable_progress_bar()
    threads = args.threads or torch.get_num_threads()
    ratios: dict[str, Timing] = {}
    details: dict[str, Any] = {"machine": machine()}
    with tempfile.TemporaryDirectory() as folder:
        if args.only != "smollm2":
            found, details["tiny"] = compare(tiny_case(args.quick, threads, Path(folder)), "tiny")
            ratios |= found
        if args.only != "tiny":
            found, details["smollm2"] = compare(smollm2_case(args.quick, threads), "smollm2")
            ratios |= found
    emit("trainer", ratios, details)


if __name__ == "__main__":
    main()
