"""The instruments of a run, step by step: their reporters, and in a process that has weights their observers, too."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gradtrace.attribution import AttributionError
from gradtrace.batch import RolloutBatch
from gradtrace.errors import GradtraceError
from gradtrace.instruments.columns import Truth, no_truth
from gradtrace.instruments.contract import Host, Instrument, Observer, Reporter, Samples, Table, TrainingRun
from gradtrace.instruments.observers import Observers
from gradtrace.instruments.record import Record
from gradtrace.instruments.registry import enabled, instruments
from gradtrace.metrics import GENERATED
from gradtrace.trace.writer import TraceWriter

if TYPE_CHECKING:
    from gradtrace.instruments.findings.watch import Findings


@contextmanager
def asked_by(setting: str) -> Iterator[None]:
    """Turn an `AttributionError` inside into an error that names this setting."""
    try:
        yield
    except AttributionError as error:
        raise GradtraceError(f"{setting}: {error}") from error


def check_needs(instrument: Instrument, settings: Any, cannot: Mapping[str, str], section: str) -> None:
    """An error if the host does not offer what these settings need. `section`: how the user writes their name."""
    for need, setting in instrument.needed(settings).items():
        if need in cannot:
            asked = section + (f".{setting}" if setting else "")
            raise GradtraceError(f"{asked}: {cannot[need]}")


class Reporters:
    """The reporters of a run, by name. `sections`: the configuration that has the instruments' settings. `folder`: that
    of the traces; None: another process writes them."""

    def __init__(
        self, run: TrainingRun, sections: Any, folder: Path | None, meta: dict[str, Any], truth: Truth = no_truth
    ) -> None:
        self.run = run
        self.sections = sections
        self.records: dict[str, Record] = {}
        self.reporters: dict[str, Reporter] = {}
        self.sampled: dict[str, RolloutBatch] = {}
        """What was sampled for each instrument in this step."""
        self.sampling: dict[str, float] = {}
        """Seconds that it took."""
        for name, one in enabled(sections).items():
            settings = self.settings(name)
            check_needs(one, settings, run.cannot, run.setting(one.key))
            writer = None
            if one.record is not None and folder is not None:
                files = {"fsync": settings.fsync, "on_error": settings.on_error}
                writer = TraceWriter(folder, one.record.name, on_report=run.report, **files)
            label = name.replace("_", " ")
            self.records[name] = Record(one.record, settings, writer, meta, truth, run.report, label)
            with asked_by(run.setting(one.key)):
                self.reporters[name] = one.reporter(self.records[name], run)

    def watch(self, run_dir: Path) -> Findings:
        """The detectors of the run, which say what is wrong with it."""
        from gradtrace.instruments.findings.watch import Findings

        return Findings.of(self, run_dir)

    def settings(self, name: str) -> Any:
        return getattr(self.sections, instruments()[name].key)

    def raising(self) -> list[str]:
        return [name for name in self.reporters if getattr(self.settings(name), "on_error", "warn") == "raise"]

    # ------------------------------------------------------------ the run

    @property
    def writers(self) -> list[TraceWriter]:
        return [record.writer for record in self.records.values() if record.writer is not None]

    def start(self, last_step: int) -> None:
        for writer in self.writers:
            writer.truncate_after(last_step)
        for reporter in self.reporters.values():
            reporter.start(last_step)

    def flush(self) -> None:
        for writer in self.writers:
            writer.flush()

    def state(self) -> dict[str, Tensor]:
        return {name: tensor for one in self.reporters.values() for name, tensor in one.state().items()}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        for reporter in self.reporters.values():
            reporter.load_state(tensors)

    def close(self) -> None:
        for reporter in self.reporters.values():
            reporter.close()
        for record in self.records.values():
            record.close()

    # ------------------------------------------------------------ a step

    def samples(self, step: int) -> dict[str, Samples]:
        """What is to be sampled beside this step's rollout."""
        self.sampled, self.sampling = {}, {}
        found = {name: reporter.samples(step) for name, reporter in self.reporters.items()}
        return {name: wanted for name, wanted in found.items() if wanted is not None}

    def sample(self, step: int, by: Callable[[Samples], RolloutBatch]) -> None:
        """Sample it. An error costs the instrument this step, or with `on_error=raise` the run."""
        for name, wanted in self.samples(step).items():
            begin = time.perf_counter()
            try:
                self.sampled[name] = by(wanted)
            except GradtraceError:
                raise
            except Exception as error:
                self.records[name].failed(step, f"its prompts could not be sampled: {type(error).__name__}: {error}")
            self.sampling[name] = time.perf_counter() - begin

    def more_rollouts(self, step: int) -> RolloutBatch | None:
        """Judged responses that this step also trains on."""
        found = [
            more
            for name, reporter in self.reporters.items()
            if (more := reporter.more_rollouts(step, self.sampled.get(name))) is not None
        ]
        return RolloutBatch.concat(found) if found else None

    def plan(self, batch: RolloutBatch, step: int) -> tuple[RolloutBatch, dict[str, Any]]:
        """The batch, perhaps with `kept` set, and the plans of the instruments that observe the step."""
        plans = {}
        for name, reporter in self.reporters.items():
            batch, plan = reporter.plan(batch, step, self.sampled.get(name))
            if plan is not None:
                plans[name] = plan
        return batch, plans

    def needs_entropies(self, step: int) -> bool:
        return any(reporter.needs_entropies(step) for reporter in self.reporters.values())

    def write(self, batch: RolloutBatch, step: int, tables: Mapping[str, Table]) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for name, reporter in self.reporters.items():
            own = reporter.write(batch, step, tables.get(name))
            generated = metrics.get(GENERATED, 0.0) + own.get(GENERATED, 0.0)
            metrics.update(own)
            if generated:
                metrics[GENERATED] = generated
        for name, seconds in self.sampling.items():
            metrics[f"timing_s/{name}_gen"] = seconds
            metrics[f"timing_s/{name}"] = metrics.get(f"timing_s/{name}", 0.0) + seconds
        self.sampling = {}
        return metrics


class InstrumentSteps(Reporters):
    """Reporters and observers in one process. The observers are made first: a reporter may ask them things."""

    def __init__(self, host: Host, run: TrainingRun, sections: Any, folder: Path | None, **more: Any) -> None:
        self.host = host
        found: dict[str, Observer] = {}
        for name, one in enabled(sections).items():
            settings = getattr(sections, one.key)
            check_needs(one, settings, {**host.cannot, **run.cannot}, run.setting(one.key))
            if one.observer is not None:
                with asked_by(run.setting(one.key)):
                    found[name] = one.observer(host, settings)
        super().__init__(run, sections, folder, **more)
        self.observers = Observers(host.ranks, found, self.raising())

    def add(self, name: str, reporter: Reporter | None = None, observer: Observer | None = None) -> None:
        """One more instrument, after the others, which no configuration knows. Its errors end the run."""
        self.reporters[name] = reporter or Reporter()
        if observer is not None:
            self.observers.observers[name] = observer
        self.observers.raising.add(name)

    def ask(self, name: str, question: Any) -> Table:
        return Table.joined(self.host.ranks.gather(self.observers.observers[name].answer(question)))

    def begin(self, batch: RolloutBatch, step: int) -> RolloutBatch:
        """The update of this step comes next."""
        batch, plans = self.plan(batch, step)
        self.observers.begin(plans)
        return batch

    def finish(self, batch: RolloutBatch, step: int) -> dict[str, float]:
        """The update is over: write the files. Returns metrics."""
        tables = self.host.ranks.gather(self.observers.end())
        return self.write(batch, step, {name: Table.joined(each[name] for each in tables) for name in tables[0]})

    def close(self) -> None:
        self.observers.close()
        super().close()
