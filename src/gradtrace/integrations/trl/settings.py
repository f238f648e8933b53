"""What to trace of a TRL run, what cannot be traced, and what its config.yaml says."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import yaml

from gradtrace.attribution import InfluenceConfig
from gradtrace.config.keys import check_fields
from gradtrace.errors import GradtraceError
from gradtrace.instruments import registry
from gradtrace.instruments.blame import BlameConfig
from gradtrace.instruments.columns import Truth, no_truth
from gradtrace.instruments.contract import Instrument
from gradtrace.instruments.entropy_trace import EntropyTraceConfig
from gradtrace.instruments.findings import FindingsConfig
from gradtrace.instruments.influence import InfluenceTraceConfig
from gradtrace.instruments.tracin import TracinConfig
from gradtrace.integrations.trl.losses import LOSS_TYPES

KEYWORDS = {"influence_trace": "influence trace", "tracin": "selection"}
"""Sections that `attach` knows by another name."""
LEFT_OUT = ("blame", "mismatch_every")
"""Sections that are on by default and left out, with the reason, where a trainer does not allow them."""


def keyword(section: str) -> str:
    return KEYWORDS.get(section, section)


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
    """Rollouts between checks of the default score by real optimizer steps, which are taken back; 0 is never."""
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
    instruments: Mapping[str, Any] = field(default_factory=dict)
    """Instruments of installed packages, {"sway": {"write_every": 2}}: values for an instrument's settings, which turn
    it on. For one of ours, further values of its settings."""

    @property
    def path(self) -> Path:
        return Path(self.run_dir)

    def sections(self) -> SimpleNamespace:
        """The settings of instruments under the names of their sections in a configuration."""
        files: dict[str, Any] = {"fsync": self.fsync, "on_error": self.on_error}
        sections = SimpleNamespace(
            entropy_trace=EntropyTraceConfig(enable=self.entropy, write_every=self.write_every, **files),
            blame=BlameConfig(enable=self.blame, write_every=self.blame_every, **files),
            mismatch_every=self.mismatch_every,
            findings=self.findings,
        )
        if self.influence is not None:
            sections.influence_trace = InfluenceTraceConfig(
                **dataclasses.asdict(self.influence),
                **files,
                enable=True,
                write_every=self.write_every,
                verify_every=self.verify_every,
                max_prompts_per_step=self.max_prompts_per_step,
                pairwise_max_mb=self.pairwise_max_mb,
            )
            sections.influence_trace.validate("")
        if self.selection is not None:
            sections.tracin = dataclasses.replace(self.selection, enable=True, **files)
        for name, values in self.instruments.items():
            one = registry.instruments().get(name)
            if one is None:
                known = ", ".join(registry.instruments())
                raise GradtraceError(f"instruments: there is no instrument {name!r}. Known: {known}.")
            new = {**files, "write_every": self.write_every}
            setattr(sections, one.key, with_values(one, getattr(sections, one.key, None), values, new))
        return sections

    def sections_for(self, cannot: Mapping[str, str]) -> tuple[SimpleNamespace, list[str]]:
        """`sections` without what is on by default and the trainer does not allow; and lines that say so."""
        sections, lines = self.sections(), []
        for name, one in registry.enabled(sections).items():
            unmet = [need for need in one.needed(getattr(sections, one.key)) if need in cannot]
            if unmet and one.key in LEFT_OUT and name not in self.instruments:
                delattr(sections, one.key)
                if one.record is not None:
                    lines.append(f"no {name.replace('_', ' ')} trace: {cannot[unmet[0]]}.")
        return sections, lines


def with_values(one: Instrument, section: Any, values: Any, new: Mapping[str, Any]) -> Any:
    """An instrument's settings with `values`, enabled. `new`: what else a section has that was not there before."""
    if not isinstance(values, Mapping):
        return values
    base, defaults = (one.default(), new) if section is None else (section, {})
    known = {each.name for each in dataclasses.fields(base)}
    if wrong := sorted(set(values) - known):
        raise GradtraceError(
            f"instruments: {one.name} has no setting {', '.join(wrong)}. Known: {', '.join(sorted(known))}."
        )
    given = {name: value for name, value in {"enable": True, **defaults, **values}.items() if name in known}
    found = dataclasses.replace(base, **given)
    check_fields(found, f"instruments.{one.name}.")
    return found


def check_supported(trainer: Any, settings: TraceSettings) -> None:
    """Raise for what would give wrong numbers or none; everything else of GRPOTrainer goes."""
    args = trainer.args
    settings.sections()  # they are right
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
        "FSDP in bf16, which rounds away what scores are: differences of passes (use float32, or "
        "InfluenceConfig(credit='position'))": (
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


def run_config(trainer: Any, settings: TraceSettings) -> str:
    """The text of the run's config.yaml: settings under the names that our viewer and readers know, and TRL's own."""
    args, sections = trainer.args, settings.sections()
    known = registry.instruments().values()
    off = {one.key: {"enable": False} for one in known if hasattr(one.default(), "enable")}
    on = {one.key: getattr(sections, one.key) for one in known if hasattr(sections, one.key)}
    rollouts = args.gradient_accumulation_steps / (args.steps_per_generation * trainer.num_iterations)
    config = {
        "engine": "trl",
        "model": {"path": str(trainer.model.config._name_or_path)},
        "data": {"train_batch_size": args.generation_batch_size // trainer.num_generations},
        "rollout": {
            "n": trainer.num_generations,
            "max_new_tokens": trainer.max_completion_length,
            "temperature": trainer.temperature,
        },
        "algorithm": {"advantage": "grpo", "policy_loss": trainer.loss_type, "kl_coef": trainer.beta},
        "actor": {"optim": {"lr": args.learning_rate}},
        "trainer": {
            "total_steps": int(trainer.state.max_steps * rollouts),
            **{key: plain(section) for key, section in (off | on).items()},
        },
        "trl": {name: value for name, value in args.to_sanitized_dict().items() if value is not None},
    }
    return yaml.safe_dump(config, sort_keys=False, allow_unicode=True)


def plain(section: Any) -> Any:
    """Settings as YAML has them."""
    values = dataclasses.asdict(section) if dataclasses.is_dataclass(section) else section  # type: ignore[arg-type]
    return json.loads(json.dumps(values, default=str))
