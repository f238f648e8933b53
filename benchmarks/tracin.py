"""What TracIn selection costs: scores by ghost product and by forward mode against per-sample gradients, and a selected
training step against a vanilla one.

`speedup_over_per_sample`: the products of 32 responses with a validation gradient, from one gradient per response by
autograd (theirs), and from the method that `auto` takes (ours), as the trainer calls it, on the same batch of 4 prompts
× 8 responses; the numbers are compared too. On the demo's model and (`…_135m`) on SmolLM2-135M. `ghost_over_tangent`
is the time of one method over that of the other.
`overhead_selected_step`: a whole training step of the demo (rollout, update) with selection at its defaults, over one
without; most of it is 64 × 8 validation rollouts and their gradient. `overhead_selected_update`: without the rollouts.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import Timing, alternate, emit, load_smollm2, machine, parse_arguments, tiny_model
from gradtrace.attribution import TrainingPass
from gradtrace.batch import RolloutBatch
from gradtrace.config.loader import load_config
from gradtrace.instruments.tracin import TracinConfig
from gradtrace.instruments.tracin.losses import Weighted, validation_losses
from gradtrace.instruments.tracin.observer import TracinObserver
from gradtrace.instruments.tracin.selector import TracInSelector
from gradtrace.metrics import Timer
from gradtrace.policy.microbatch import Sequences
from gradtrace.policy.policy import Policy
from gradtrace.trace.run_files import RunFiles
from gradtrace.training.components import Components, build_components
from gradtrace.training.host import PolicyHost, open_instruments
from gradtrace.training.loop import Trainer
from gradtrace.training.terminal import SilentDisplay

RESPONSES, GROUP = 32, 8


def random_batch(model: Any, prompt: int, length: int, seed: int = 0) -> RolloutBatch:
    """4 prompts × 8 random responses, all of one length, with random advantages."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = model.config.vocab_size
    prompts = torch.randint(3, vocabulary, (RESPONSES // GROUP, prompt), generator=generator).tolist()
    mask = torch.ones(RESPONSES, length, dtype=torch.bool)
    return RolloutBatch(
        prompts=prompts,
        group=torch.arange(len(prompts)).repeat_interleave(GROUP),
        responses=torch.randint(3, vocabulary, (RESPONSES, length), generator=generator),
        response_mask=mask,
        finished=mask[:, 0],
        sampler_log_probs=torch.zeros(mask.shape),
        advantages=torch.randn(RESPONSES, 1, generator=generator).expand(mask.shape),
    )


def per_sample(policy: Policy, batch: RolloutBatch, target: dict[str, Tensor]) -> Tensor:
    """One backward pass and one gradient for each response."""
    named = dict(policy.model.named_parameters())
    weights = [named[name] for name in target]
    sequences, advantages = Sequences.of(batch), batch.advantages
    assert advantages is not None
    scores = []
    for r in range(RESPONSES):
        micro = sequences.padded(torch.tensor([r]))
        loss = -(policy.statistics(micro)[0] * advantages[r]).sum()
        gradients = torch.autograd.grad(loss, weights)
        scores.append(sum(float((g * t).sum()) for g, t in zip(gradients, target.values(), strict=True)))
    return torch.tensor(scores, dtype=torch.float64)


def compare_scoring(model: Any, prompt: int, length: int, rounds: int) -> tuple[dict[str, Timing], dict[str, Any]]:
    policy = Policy(model, torch.device("cpu"), 1.0)
    batch, validation = random_batch(model, prompt, length), random_batch(model, prompt, length, seed=1)
    rows, budget = torch.arange(RESPONSES), 1 << 20
    host = PolicyHost(policy, None, TrainingPass(), token_budget=budget)
    automatic = TracInSelector(model)
    observers = {
        method: TracinObserver(host, TracinConfig(method=method, preconditioner="none"))
        for method in ("ghost", "tangent")
    }
    target = dict(observers["ghost"]._gradient(validation_losses(validation, rows))[0])
    found: dict[str, Tensor] = {}

    def score(method: str) -> Callable[[], None]:
        def work() -> None:
            losses = Weighted(batch, rows, -batch.need("advantages"))
            found[method] = observers[method]._products(losses, target)[1]

        return work

    def each() -> None:
        found["per_sample"] = per_sample(policy, batch, target)

    ours = automatic.method
    for method in observers:
        score(method)()  # warms up; the 32 passes of the other side warm themselves
    against = alternate(each, score(ours), rounds, warmup=0)
    methods = alternate(score("ghost"), score("tangent"), max(rounds, 3), warmup=0)
    size = float(found["per_sample"].abs().max())
    difference = {m: float((found[m] - found["per_sample"]).abs().max()) / size for m in observers}
    ratios = {"speedup_over_per_sample": against, "ghost_over_tangent": methods}
    detail = {
        "auto": ours,
        "responses": f"{RESPONSES // GROUP} prompts × {GROUP}",
        "tokens": f"{prompt} + {length}",
        "per_sample_over_auto": against.detail(),
        "ghost_over_tangent": methods.detail(),
        "largest_difference_to_per_sample": {m: f"{d:.1e}" for m, d in difference.items()},
    }
    return ratios, detail


# A warm start that is too short to solve the task, and so a reward by which groups are mixed nevertheless.
REWARD = "def even(response, item):\n    return float(response[-1:] in tuple('02468'))\n"


def demo_parts(folder: str) -> Components:
    reward = Path(folder) / "reward.py"
    reward.write_text(REWARD)
    return build_components(
        load_config(
            [
                f"trainer.runs_dir={folder}",
                "trainer.cpu_threads=1",
                "task.arithmetic.warm_start.max_steps=60",
                f"reward.path={reward}:even",
                "trainer.influence_trace.enable=false",
                "trainer.entropy_trace.enable=false",
                "trainer.tracin.diagnose_every=0",
                "trainer.tracin.train_on_validation=false",
            ]
        )
    )


def compare_steps(rounds: int) -> tuple[dict[str, Timing], dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        trainers, steps = {}, dict.fromkeys(("selected", "vanilla"), 0)
        for name in steps:
            parts = demo_parts(folder)
            selecting = name == "selected"
            parts.config.trainer.tracin.enable = selecting
            files = RunFiles(Path(folder) / name)
            steps_of = open_instruments(parts, files, print, writes=False)
            trainers[name] = Trainer(parts, files, SilentDisplay(), steps_of)
        seconds: dict[str, list[float]] = {"selected": [], "vanilla": [], "scoring": [], "sampling": []}

        def step(name: str) -> Callable[[], None]:
            def work() -> None:
                trainer, timer = trainers[name], Timer()
                steps[name] += 1
                batch, _ = trainer.experience.collect(trainer.components.generators["rollout"], timer)
                _, metrics = trainer.train_step(batch, steps[name], timer)
                seconds[name].append(timer.total - timer.seconds["gen"] - timer.seconds["reward"])
                if name == "selected":
                    seconds["sampling"].append(metrics["timing_s/tracin_gen"])
                    seconds["scoring"].append(metrics["timing_s/tracin"] - metrics["timing_s/tracin_gen"])

            return work

        whole = alternate(step("selected"), step("vanilla"), rounds)
    sampling = seconds["sampling"]
    update = Timing(
        [total - s for total, s in zip(seconds["selected"], sampling, strict=True)][1:],
        seconds["vanilla"][1:],
    )
    ratios = {"overhead_selected_step": whole, "overhead_selected_update": update}
    detail = {
        "step": whole.detail(),
        "update": update.detail(),
        "validation_gradient_and_scores_s": round(sorted(seconds["scoring"])[len(sampling) // 2], 4),
        "validation_rollouts_s": round(sorted(sampling)[len(sampling) // 2], 4),
    }
    return ratios, detail


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(__doc__, arguments)
    ratios: dict[str, Timing] = {}
    detail: dict[str, Any] = {"machine": machine()}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the demo trains: its operations are too short to share
    found, detail["demo_model"] = compare_scoring(tiny_model(), 10, 18, 3 if args.quick else 9)
    ratios |= found
    found, detail["demo_step"] = compare_steps(3 if args.quick else 9)
    ratios |= found
    torch.set_num_threads(args.threads or threads)
    if not args.quick:
        model, _ = load_smollm2()
        found, detail["smollm2"] = compare_scoring(model, 32, 32, 2)
        ratios |= {f"{name}_135m": value for name, value in found.items()}
    emit("tracin", ratios, detail)


if __name__ == "__main__":
    main()
