"""What TracIn selection costs: scores by ghost product and by forward mode against per-sample gradients, and a selected
training step against a vanilla one.

`speedup_over_per_sample_*`: the products of 32 responses with a validation gradient, from one gradient per response by
autograd (theirs), and from the method that `auto` takes (ours), on the same batch; the numbers are compared too. On the
demo's model and on SmolLM2-135M. `ghost_over_tangent_*` is the time of one method over that of the other.
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
from gradtrace.config_loader import load_config
from gradtrace.instruments.columns import no_truth
from gradtrace.instruments.tracin import Piece, TracInSelector
from gradtrace.trace.run_files import RunFiles
from gradtrace.training.instruments import tracin_instrument
from gradtrace.training.loop import Trainer
from gradtrace.training.metrics import Timer
from gradtrace.training.observer import StepObserver
from gradtrace.training.parts import Parts, build_parts
from gradtrace.training.terminal import SilentDisplay

RESPONSES = 32


class Batch:
    """Random responses, all of one length, with random advantages; validation is another such batch."""

    def __init__(self, model: Any, prompt: int, length: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.model = model
        self.prompt = prompt
        vocabulary = model.config.vocab_size
        self.ids = torch.randint(3, vocabulary, (RESPONSES, prompt + length), generator=generator)
        self.advantages = torch.randn(RESPONSES, generator=generator)

    def losses(self, rows: Tensor) -> Tensor:
        """[r]: −A Σ ℓ."""
        ids = self.ids[rows]
        logits = self.model(input_ids=ids, use_cache=False).logits[:, self.prompt - 1 : -1]
        log_probs = torch.log_softmax(logits, -1).gather(-1, ids[:, self.prompt :, None]).squeeze(-1)
        return -(log_probs.sum(1) * self.advantages[rows])

    def piece(self) -> Piece:
        rows = torch.arange(RESPONSES)
        tokens = torch.zeros(self.ids.shape, dtype=torch.bool)
        tokens[:, self.prompt :] = True
        return Piece(rows, lambda: self.losses(rows), rows, tokens)


def per_sample(batch: Batch, target: dict[str, Tensor]) -> Tensor:
    named = dict(batch.model.named_parameters())
    weights = [named[name] for name in target]
    scores = []
    for r in range(RESPONSES):
        gradients = torch.autograd.grad(batch.losses(torch.tensor([r])).sum(), weights)
        scores.append(sum(float((g * t).sum()) for g, t in zip(gradients, target.values(), strict=True)))
    return torch.tensor(scores, dtype=torch.float64)


def compare_scoring(
    model: Any, prompt: int, length: int, rounds: int
) -> tuple[dict[str, float], dict[str, Any]]:
    batch, validation = Batch(model, prompt, length), Batch(model, prompt, length, seed=1)
    automatic = TracInSelector(model)
    selectors = {method: TracInSelector(model, method) for method in ("ghost", "tangent")}
    target = automatic.set_validation(lambda: validation.losses(torch.arange(RESPONSES)).mean())
    for selector in selectors.values():
        selector.set_validation_gradient(target)
    found: dict[str, Tensor] = {}

    def score(method: str) -> Callable[[], None]:
        def work() -> None:
            found[method] = selectors[method].score([batch.piece()])

        return work

    def each() -> None:
        found["per_sample"] = per_sample(batch, target)

    ours = automatic.method
    against = alternate(each, score(ours), rounds)
    methods = alternate(score("ghost"), score("tangent"), max(rounds, 3))
    size = float(found["per_sample"].abs().max())
    difference = {m: float((found[m] - found["per_sample"]).abs().max()) / size for m in selectors}
    ratios = {"speedup_over_per_sample": against.ratio, "ghost_over_tangent": methods.ratio}
    detail = {
        "auto": ours,
        "responses": RESPONSES,
        "tokens": f"{prompt} + {length}",
        "per_sample_over_auto": against.detail(),
        "ghost_over_tangent": methods.detail(),
        "largest_difference_to_per_sample": {m: f"{d:.1e}" for m, d in difference.items()},
    }
    return ratios, detail


def demo_parts(folder: str) -> Parts:
    return build_parts(
        load_config(
            [
                f"trainer.runs_dir={folder}",
                "trainer.cpu_threads=1",
                "task.arithmetic.warm_start.max_steps=60",
                "trainer.influence_trace.enable=false",
                "trainer.entropy_trace.enable=false",
                "trainer.tracin.diagnose_every=0",
            ]
        )
    )


def compare_steps(rounds: int) -> tuple[dict[str, float], dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        trainers, steps = {}, dict.fromkeys(("selected", "vanilla"), 0)
        for name in steps:
            parts = demo_parts(folder)
            selecting = name == "selected"
            observer = tracin_instrument(parts, None, {}, no_truth, print) if selecting else StepObserver()
            trainers[name] = Trainer(parts, RunFiles(Path(folder) / name), observer, SilentDisplay())
        seconds: dict[str, list[float]] = {"selected": [], "vanilla": [], "scoring": [], "sampling": []}

        def step(name: str) -> Callable[[], None]:
            def work() -> None:
                trainer, timer = trainers[name], Timer()
                steps[name] += 1
                batch, _ = trainer.experience.collect(trainer.parts.generators["rollout"], timer)
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
    ratios = {"overhead_selected_step": whole.ratio, "overhead_selected_update": update.ratio}
    detail = {
        "step": whole.detail(),
        "update": update.detail(),
        "validation_gradient_and_scores_s": round(sorted(seconds["scoring"])[len(sampling) // 2], 4),
        "validation_rollouts_s": round(sorted(sampling)[len(sampling) // 2], 4),
    }
    return ratios, detail


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(__doc__, arguments)
    ratios: dict[str, float] = {}
    detail: dict[str, Any] = {"machine": machine()}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the demo trains: its operations are too short to share
    found, detail["demo_model"] = compare_scoring(tiny_model(), 10, 18, 3 if args.quick else 9)
    ratios |= {f"{name}_demo": value for name, value in found.items()}
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
