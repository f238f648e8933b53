"""Which instruments watch a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradtrace.algorithms import policy_loss
from gradtrace.attribution import InfluenceTracer, TrainingPass
from gradtrace.batch import RolloutBatch
from gradtrace.config import AlgorithmConfig
from gradtrace.errors import GradtraceError
from gradtrace.instruments.blame.instrument import BlameInstrument
from gradtrace.instruments.blame.shares import BlameRecord
from gradtrace.instruments.columns import Truth
from gradtrace.instruments.entropy_probe.columns import ProbeRecord
from gradtrace.instruments.entropy_probe.observer import EntropyProbeInstrument
from gradtrace.instruments.entropy_trace.instrument import EntropyTrace
from gradtrace.instruments.findings.watch import Findings
from gradtrace.instruments.host import asked_by
from gradtrace.instruments.influence.instrument import InfluenceTraceInstrument
from gradtrace.instruments.influence.record import InfluenceRecord
from gradtrace.instruments.mismatch import MismatchShare
from gradtrace.instruments.observer import Observers, StepObserver
from gradtrace.instruments.tracin.instrument import TracinInstrument
from gradtrace.instruments.tracin.losses import aggregated
from gradtrace.instruments.tracin.model_scorer import ModelScorer
from gradtrace.instruments.tracin.selector import TracInSelector
from gradtrace.instruments.tracin.validation import ValidationSource, validation_advantage, validation_pool
from gradtrace.policy.rollouts import judge, rollout
from gradtrace.rollout.params import EVERY_TOKEN, SamplingParams
from gradtrace.tasks.base import Prompt
from gradtrace.trace.kinds import enabled_kinds
from gradtrace.trace.run_files import RunFiles
from gradtrace.trace.schema import BLAME, ENTROPY_PROBE, ENTROPY_TRACE, INFLUENCE_TRACE, TRACIN
from gradtrace.trace.token_text import TokenBytes
from gradtrace.trace.writer import TraceWriter
from gradtrace.training.parts import Parts


def build_observer(parts: Parts, files: RunFiles, report: Callable[[str], None]) -> StepObserver:
    """The enabled instruments of `parts.config`, as one observer. `report` shows a line to the user."""
    trainer = parts.config.trainer
    meta = {"task": parts.task.name, "temperature": parts.config.rollout.temperature}
    truth = parts.task.truth
    observers: list[StepObserver] = []
    if trainer.mismatch_every:  # before those whose hooks listen to the passes of training
        algorithm = parts.config.algorithm
        loss = policy_loss(algorithm.policy_loss, **algorithm.policy_loss_options)
        observers.append(MismatchShare(parts.policy, loss, trainer.mismatch_every))
    if enabled_kinds(trainer):
        files.write_token_bytes(TokenBytes.from_tokenizer(parts.task.tokenizer))
    if trainer.tracin.enable:  # first: what it leaves out, the others do not see
        writer = open_writer(files, TRACIN, trainer.tracin, report)
        with asked_by("trainer.tracin"):
            observers.append(tracin_instrument(parts, writer, meta, truth, report))
    if trainer.entropy_trace.enable:
        writer = open_writer(files, ENTROPY_TRACE, trainer.entropy_trace, report)
        observers.append(EntropyTrace(writer, trainer.entropy_trace.write_every, meta, truth))
    if trainer.influence_trace.enable:
        writer = open_writer(files, INFLUENCE_TRACE, trainer.influence_trace, report)
        record = InfluenceRecord(trainer.influence_trace, writer, meta, truth, report)
        record.say_scope(parts.config.data.train_batch_size, parts.config.actor.mini_batch_size)
        with asked_by("trainer.influence_trace"):
            instrument = InfluenceTraceInstrument(
                parts.policy,
                record,
                loss_traits(parts.config.algorithm),
                parts.optimizer.adamw,
                grad_clip=parts.config.actor.optim.grad_clip,
            )
            observers.append(instrument)
            check_memory(parts, instrument.tracer, report)
    if trainer.blame.enable:
        writer = open_writer(files, BLAME, trainer.blame, report)
        with asked_by("trainer.blame"):
            blame_record = BlameRecord(trainer.blame, writer, meta, truth, report)
            observers.append(blame_instrument(parts, blame_record))
    if trainer.entropy_probe.every:
        writer = open_writer(files, ENTROPY_PROBE, trainer.entropy_probe, report)
        probe_record = ProbeRecord(trainer.entropy_probe, writer, meta, truth, report)
        observers.append(entropy_probe(parts, probe_record))
    return Observers(observers)


def build_findings(parts: Parts, files: RunFiles, report: Callable[[str], None], observer: StepObserver) -> Findings:
    """The detectors, which read the blame of a step where the run has it."""
    own = [o for o in getattr(observer, "observers", []) if isinstance(o, BlameInstrument)]
    return Findings(
        parts.config.trainer.findings,
        files.path,
        lambda ids: str(parts.task.tokenizer.decode(ids)),
        report,
        lambda: own[0].last if own else None,
    )


def blame_instrument(parts: Parts, record: BlameRecord) -> BlameInstrument:
    optimizer = parts.optimizer

    def coming() -> tuple[dict[str, Tensor], float]:
        gradient = {name: p.grad for name, p in optimizer.parameters.items() if p.grad is not None}
        return gradient, optimizer.clip_factor

    return BlameInstrument(parts.policy, record, optimizer.adamw, coming)


def check_memory(parts: Parts, tracer: InfluenceTracer, report: Callable[[str], None]) -> None:
    """Say what the trace may need at most, and refuse what cannot fit before anything is allocated."""
    config = parts.config
    most = config.trainer.influence_trace.max_prompts_per_step or config.data.train_batch_size
    responses = min(most, config.data.train_batch_size) * config.rollout.n
    tokens = responses * config.rollout.max_new_tokens
    needed = tracer.memory_estimate(responses, tokens).total
    device = parts.policy.device
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()
    size = f"{needed / 2**20:,.0f} MB for {responses} responses of up to {config.rollout.max_new_tokens} tokens"
    if needed > free:
        raise GradtraceError(
            f"trainer.influence_trace needs up to {size} in {len(tracer.blocks)} layers, and {free / 2**20:,.0f} MB "
            "are free: raise projection_dim_factor, set max_hessian_dim, max_modules or max_prompts_per_step, or leave "
            "solver=auto."
        )
    report(f"influence trace: {len(tracer.blocks)} layers, at most {size}.")


def available_memory() -> int:
    """Bytes that programs can still allocate on this machine."""
    with open("/proc/meminfo") as file:
        lines = dict(line.split(":") for line in file)
    return int(lines["MemAvailable"].split()[0]) * 1024


def entropy_probe(parts: Parts, record: ProbeRecord) -> EntropyProbeInstrument:
    config = parts.config
    settings = config.trainer.entropy_probe
    if config.model.lora.dropout:
        raise GradtraceError(
            "trainer.entropy_probe: with model.lora.dropout the update is of another model than the one that is "
            "sampled and measured: set model.lora.dropout=0."
        )
    return EntropyProbeInstrument(
        parts.policy,
        parts.optimizer,
        parts.sampler,
        parts.task.held_out(settings.prompts, "trainer.entropy_probe.prompts", record.report),
        SamplingParams.of(config.rollout, parts.task.stop_token_ids, n=settings.n, **EVERY_TOKEN),
        config.trainer.seed,
        config.actor.token_budget,
        record,
    )


def tracin_instrument(
    parts: Parts,
    writer: TraceWriter | None,
    meta: dict[str, Any],
    truth: Truth,
    report: Callable[[str], None],
) -> TracinInstrument:
    config = parts.config
    settings = config.trainer.tracin
    n = settings.val_n or config.rollout.n
    params = SamplingParams.of(config.rollout, parts.task.stop_token_ids, n=n)

    def sample(prompts: list[Prompt], generator: torch.Generator) -> RolloutBatch:
        batch = rollout(parts.sampler, prompts, params, generator)
        return judge(batch, parts.task.tokenizer, parts.reward)

    pool = validation_pool(config, parts.task, report)
    if settings.trains_on_validation and settings.train_on_validation is None:
        report(
            "tracin: validation rollouts are trained on, too. Prompts that must stay held out: "
            "trainer.tracin.train_on_validation=false."
        )
    estimator = validation_advantage(config.algorithm.advantage, config.algorithm.advantage_options)
    source = ValidationSource(settings, pool, estimator, config.trainer.seed, sample)
    host = ModelScorer(
        parts.policy,
        TracInSelector(parts.policy.model, settings.method, settings.parameters),
        config.actor.token_budget,
        parts.optimizer.adamw if settings.preconditioner == "adam" else None,
    )
    weigh = aggregated(config.algorithm.aggregation, config.rollout.max_new_tokens)
    return TracinInstrument(settings, host, weigh, source, writer, meta, truth, report)


def open_writer(files: RunFiles, kind: str, config: Any, report: Callable[[str], None]) -> TraceWriter:
    return TraceWriter(files.traces, kind, fsync=config.fsync, on_error=config.on_error, on_report=report)


def loss_traits(algorithm: AlgorithmConfig) -> TrainingPass:
    """What is true of every backward pass of this algorithm's loss."""
    loss = policy_loss(algorithm.policy_loss, **algorithm.policy_loss_options)
    return TrainingPass(
        policy_gradient_at_ratio_one=loss.plain_at_ratio_one,
        kl_in_loss=algorithm.kl_coef > 0 or loss.own_kl,
        entropy_bonus=algorithm.entropy_coef != 0,
    )
