"""Which instruments watch a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from gradtrace.attribution import AttributionError, InfluenceConfig
from gradtrace.config import Config, InfluenceTraceConfig
from gradtrace.errors import GradtraceError
from gradtrace.instruments.columns import Truth, no_truth
from gradtrace.instruments.entropy_trace import EntropyTrace
from gradtrace.instruments.influence_trace import InfluenceSettings, InfluenceTraceInstrument
from gradtrace.tasks.arithmetic import ArithmeticTask
from gradtrace.tasks.base import Task
from gradtrace.trace.run_files import RunFiles
from gradtrace.trace.schema import ENTROPY_TRACE, INFLUENCE_TRACE
from gradtrace.trace.token_text import TokenBytes
from gradtrace.trace.writer import TraceWriter
from gradtrace.training.observer import Observers, StepObserver
from gradtrace.training.parts import Parts


def build_observer(parts: Parts, files: RunFiles, report: Callable[[str], None]) -> StepObserver:
    """The enabled instruments of `parts.config`, as one observer. `report` shows a line to the user."""
    trainer = parts.config.trainer
    meta = {"task": parts.task.name, "temperature": parts.config.rollout.temperature}
    truth = truth_of(parts.task)
    observers: list[StepObserver] = []
    if trainer.entropy_trace.enable or trainer.influence_trace.enable:
        files.write_token_bytes(TokenBytes.from_tokenizer(parts.task.tokenizer))
    if trainer.entropy_trace.enable:
        writer = open_writer(files, ENTROPY_TRACE, trainer.entropy_trace, report)
        observers.append(EntropyTrace(writer, trainer.entropy_trace.write_every, meta, truth))
    if trainer.influence_trace.enable:
        writer = open_writer(files, INFLUENCE_TRACE, trainer.influence_trace, report)
        try:
            observers.append(
                InfluenceTraceInstrument(
                    parts.policy,
                    tracer_config(trainer.influence_trace),
                    influence_settings(parts.config),
                    writer,
                    meta,
                    truth,
                    report,
                )
            )
        except AttributionError as error:
            raise GradtraceError(f"trainer.influence_trace: {error}") from error
    return Observers(observers)


def open_writer(files: RunFiles, kind: str, config: Any, report: Callable[[str], None]) -> TraceWriter:
    return TraceWriter(files.path, kind, fsync=config.fsync, on_error=config.on_error, on_report=report)


def tracer_config(config: InfluenceTraceConfig) -> InfluenceConfig:
    """The knobs that both share, under the same names; pairwise scores are kept if they may be stored."""
    shared = {field.name for field in dataclasses.fields(InfluenceConfig)} - {"pairwise"}
    knobs = {name: getattr(config, name) for name in shared}
    knobs["module_name_filter"] = tuple(config.module_name_filter)
    return InfluenceConfig(**knobs, pairwise=config.pairwise_max_mb > 0)


def influence_settings(config: Config) -> InfluenceSettings:
    trace, algorithm = config.trainer.influence_trace, config.algorithm
    return InfluenceSettings(
        write_every=trace.write_every,
        max_prompts_per_step=trace.max_prompts_per_step,
        pairwise_max_mb=trace.pairwise_max_mb,
        on_error=trace.on_error,
        kl_in_loss=algorithm.kl_coef > 0
        or algorithm.policy_loss == "archer",  # archer has a KL term of its own
        entropy_bonus=algorithm.entropy_coef != 0,
    )


def truth_of(task: Task) -> Truth:
    """What the task knows beyond the reward: the right answer's tokens, and where a response first leaves it."""
    if not isinstance(task, ArithmeticTask):
        return no_truth

    def truth(item: dict[str, Any], response: list[int]) -> tuple[list[int], int | None]:
        return task.encode(item["expected"]), task.first_wrong_token(item, response)

    return truth
