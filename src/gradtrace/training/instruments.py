"""Which instruments watch a run."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gradtrace.algorithms import policy_loss
from gradtrace.attribution import InfluenceTracer, TrainingPass
from gradtrace.batch import RolloutBatch
from gradtrace.config import AlgorithmConfig
from gradtrace.errors import GradtraceError
from gradtrace.instruments.blame.instrument import BlameInstrument
from gradtrace.instruments.blame.shares import BlameRecord
from gradtrace.instruments.entropy_probe.columns import ProbeRecord
from gradtrace.instruments.entropy_probe.observer import EntropyProbeInstrument
from gradtrace.instruments.entropy_trace.instrument import EntropyTrace
from gradtrace.instruments.findings.watch import Findings
from gradtrace.instruments.host import asked_by
from gradtrace.instruments.influence.instrument import InfluenceTraceInstrument
from gradtrace.instruments.influence.record import InfluenceRecord
from gradtrace.instruments.mismatch import MismatchShare
from gradtrace.instruments.observer import Observers, RunTraces, StepObserver
from gradtrace.instruments.tracin.instrument import TracinInstrument, TracinRecord
from gradtrace.instruments.tracin.losses import aggregated
from gradtrace.instruments.tracin.model_scorer import ModelScorer
from gradtrace.instruments.tracin.selector import TracInSelector
from gradtrace.instruments.tracin.validation import ValidationSource, validation_advantage, validation_pool
from gradtrace.policy.rollouts import judge, rollout
from gradtrace.rollout.params import EVERY_TOKEN, SamplingParams
from gradtrace.tasks.base import Prompt
from gradtrace.trace.kinds import enabled_kinds
from gradtrace.trace.run_files import RunFiles
from gradtrace.trace.schema import ENTROPY_TRACE
from gradtrace.trace.token_text import TokenBytes
from gradtrace.training.parts import Parts


def build_observer(parts: Parts, files: RunFiles, report: Callable[[str], None]) -> StepObserver:
    """The enabled instruments of `parts.config`, as one observer. `report` shows a line to the user."""
    trainer = parts.config.trainer
    meta = {"task": parts.task.name, "temperature": parts.config.rollout.temperature}
    traces = RunTraces(files, trainer, meta, parts.task.truth, report)
    observers: list[StepObserver] = []
    if trainer.mismatch_every:  # before those whose hooks listen to the passes of training
        algorithm = parts.config.algorithm
        loss = policy_loss(algorithm.policy_loss, **algorithm.policy_loss_options)
        observers.append(MismatchShare(parts.policy, loss, trainer.mismatch_every))
    if enabled_kinds(trainer):
        files.write_token_bytes(TokenBytes.from_tokenizer(parts.task.tokenizer))
    if trainer.tracin.enable:  # first: what it leaves out, the others do not see
        with asked_by("trainer.tracin"):
            observers.append(tracin_instrument(parts, traces.record(TracinRecord)))
    if trainer.entropy_trace.enable:
        writer = traces.writer(ENTROPY_TRACE)
        observers.append(EntropyTrace(writer, trainer.entropy_trace.write_every, meta, traces.truth))
    if trainer.influence_trace.enable:
        record = traces.record(InfluenceRecord)
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
        with asked_by("trainer.blame"):
            observers.append(blame_instrument(parts, traces.record(BlameRecord)))
    if trainer.entropy_probe.every:
        observers.append(entropy_probe(parts, traces.record(ProbeRecord)))
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


def tracin_instrument(parts: Parts, record: TracinRecord) -> TracinInstrument:
    config, settings = parts.config, record.config
    n = settings.val_n or config.rollout.n
    params = SamplingParams.of(config.rollout, parts.task.stop_token_ids, n=n)

    def sample(prompts: list[Prompt], generator: torch.Generator) -> RolloutBatch:
        batch = rollout(parts.sampler, prompts, params, generator)
        return judge(batch, parts.task.tokenizer, parts.reward)

    pool = validation_pool(config, parts.task, record.report)
    if settings.trains_on_validation and settings.train_on_validation is None:
        record.report(
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
    return TracinInstrument(record, host, weigh, source)


def loss_traits(algorithm: AlgorithmConfig) -> TrainingPass:
    """What is true of every backward pass of this algorithm's loss."""
    loss = policy_loss(algorithm.policy_loss, **algorithm.policy_loss_options)
    return TrainingPass(
        policy_gradient_at_ratio_one=loss.plain_at_ratio_one,
        kl_in_loss=algorithm.kl_coef > 0 or loss.own_kl,
        entropy_bonus=algorithm.entropy_coef != 0,
    )
