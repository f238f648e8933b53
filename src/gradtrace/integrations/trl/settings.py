"""What to trace of a TRL run, and what cannot be traced."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gradtrace.attribution import InfluenceConfig
from gradtrace.config import FindingsConfig, InfluenceTraceConfig, TracinConfig
from gradtrace.errors import GradtraceError
from gradtrace.instruments.columns import Truth, no_truth
from gradtrace.integrations.trl.losses import LOSS_TYPES


@dataclass(frozen=True)
class TraceSettings:
    run_dir: str | os.PathLike[str]
    """The run's folder: traces, metrics.jsonl, config.yaml. `gradtrace view RUN_DIR` shows it while it grows."""
    influence: InfluenceConfig | None = field(default_factory=InfluenceConfig)
    """Knobs of the influence trace; None: no influence trace."""
    selection: TracinConfig | None = None
    """TracIn selection against the trainer's eval_dataset; None: train on every completion."""
    entropy: bool = True
    """Write the entropy trace: entropy and log-prob of every completion token."""
    blame: bool = True
    """Write the blame trace: each completion's and token's share of the gradient's squared norm."""
    blame_every: int = 5
    """Rollouts between steps that are shared out, beside those whose gradient is unusually large."""
    findings: FindingsConfig = field(default_factory=FindingsConfig)
    """Thresholds of the detectors that say what is wrong with the run; `FindingsConfig(enable=False)`: none."""
    write_every: int = 1
    """Rollouts between traces."""
    mismatch_every: int = 10
    """Rollouts between measurements of mismatch/share_of_update, made where the sampler's log-probs are known and were
    others than the trainer's (docs/mismatch.md); 0 is never."""
    verify_every: int = 0
    """Rollouts between checks of the scores by real optimizer steps, which are taken back; 0 is never. Where a
    rollout is dealt over several optimizer steps there is no check."""
    max_prompts_per_step: int = 0
    """Trace at most this many prompts with mixed rewards of a rollout; 0 is no cap."""
    pairwise_max_mb: float = 64.0
    """Store the effect of each token on each sibling completion while a rollout's file stays below this."""
    on_error: Literal["warn", "raise"] = "warn"
    """What a failed trace does to the training."""
    fsync: bool = False
    """Force every trace file to the disk before it counts as written."""
    truth: Truth = no_truth
    """(dataset row, completion ids) → (ids of the right answer, index of the first wrong token), where known."""

    @property
    def influence_trace(self) -> InfluenceTraceConfig:
        """The tracer's knobs together with what these settings say about its files."""
        assert self.influence is not None
        config = InfluenceTraceConfig(
            **dataclasses.asdict(self.influence),
            enable=True,
            verify_every=self.verify_every,
            max_prompts_per_step=self.max_prompts_per_step,
            write_every=self.write_every,
            fsync=self.fsync,
            on_error=self.on_error,
            pairwise_max_mb=self.pairwise_max_mb,
        )
        config.validate("")
        return config

    @property
    def path(self) -> Path:
        return Path(self.run_dir)


def check_supported(trainer: Any, settings: TraceSettings) -> None:
    """Raise for what would give wrong numbers or none; everything else of GRPOTrainer goes."""
    args = trainer.args
    if settings.verify_every and trainer.accelerator.num_processes > 1:
        raise GradtraceError(
            f"verify_every={settings.verify_every} takes real optimizer steps back, which one process does alone; here "
            f"are {trainer.accelerator.num_processes}. Leave it out, and run `gradtrace verify` on a checkpoint."
        )
    sharded, parallel = trainer.is_fsdp_enabled, trainer.accelerator.parallelism_config
    sizes = [getattr(parallel, f"{kind}_size", 1) for kind in ("tp", "cp", "sp")]
    refused = {
        f"{args.n_gpu} GPUs in one process (DataParallel)": args.n_gpu > 1,
        "DeepSpeed (use FSDP2 or plain data parallelism)": trainer.is_deepspeed_enabled,
        "FSDP in its first version (set fsdp_version: 2)": sharded and not trainer.accelerator.is_fsdp2,
        "FSDP in bf16 with loss terms, which are differences of passes (use InfluenceConfig(credit='tail'))": (
            sharded and args.bf16 and settings.influence is not None and settings.influence.wants_loss_term
        ),
        "tensor or sequence parallelism (use data parallelism)": max(sizes) > 1,
        "fp16 (its gradients are scaled; use bf16)": args.fp16,
        "torch.compile (hooks do not fire in compiled graphs; torch_compile=False)": args.torch_compile,
        "images": trainer._is_vlm,
        f"loss_type={trainer.loss_type!r}": trainer.loss_type not in LOSS_TYPES,
    }
    found = [what for what, is_so in refused.items() if is_so]
    if found:
        raise GradtraceError(
            f"gradtrace cannot trace this GRPOTrainer: it uses {', '.join(found)}. Train without it, or without the "
            "trace; several GPUs work with torchrun or `accelerate launch` (docs/trl.md)."
        )
