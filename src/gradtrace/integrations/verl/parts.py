"""What ranks leave for the driver: one safetensors file per step and rank, in a folder of the run that all nodes see.

Ranks write without waiting for each other; the driver reads when the update has returned, and removes what it has read.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from safetensors.numpy import save
from safetensors.torch import load
from torch import Tensor

from gradtrace.batch import RolloutBatch
from gradtrace.errors import GradtraceError
from gradtrace.instruments.blame.shares import StepBlame
from gradtrace.instruments.entropy_probe import Prediction, Shares, Tokens
from gradtrace.instruments.entropy_probe.columns import Probed
from gradtrace.instruments.influence.capture import Scored
from gradtrace.instruments.influence.join import RankScores, joined
from gradtrace.trace.atomic import atomic_write

Tables = Mapping[str, dict[int, Tensor]]
"""Name → row of the batch → its numbers."""
Part = TypeVar("Part", bound="RankPart")


def write_rank_file(folder: Path, step: int, rank: int, tables: Tables, about: dict[str, Any]) -> None:
    """`about`: small values beside the tables, as JSON."""
    arrays = {"about": np.frombuffer(json.dumps(about).encode(), np.uint8)}
    for name, table in tables.items():
        arrays |= {f"{name}/{row}": values.contiguous().numpy() for row, values in table.items()}
    atomic_write(rank_file(folder, step, rank), save(arrays))


def read_rank_files(
    folder: Path, step: int, ranks: Iterable[int], what: str
) -> dict[int, tuple[Tables, dict[str, Any]]]:
    """Rank → the tables and values that it wrote; the files are removed. `what` names the instrument in an error."""
    found: dict[int, tuple[Tables, dict[str, Any]]] = {}
    for rank in ranks:
        path = rank_file(folder, step, rank)
        if not path.is_file():
            raise GradtraceError(
                f"rank {rank} left no part of the {what} of step {step} ({path}). Every node must see this folder; "
                "give a shared one with gradtrace.run_dir"
            )
        tensors = load(path.read_bytes())
        about = json.loads(tensors.pop("about").numpy().tobytes())
        tables: dict[str, dict[int, Tensor]] = defaultdict(dict)
        for key, values in tensors.items():
            name, row = key.split("/")
            tables[name][int(row)] = values
        found[rank] = tables, about
    for rank in found:
        rank_file(folder, step, rank).unlink()
    return found


def clear_rank_files(folder: Path) -> None:
    """Make the folder, and forget what ranks left of a step that was not finished."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in folder.glob("step_*"):
        file.unlink()


def rank_file(folder: Path, step: int, rank: int) -> Path:
    return folder / f"step_{step:06d}.rank_{rank:05d}.safetensors"


# ---------------------------------------------------------------- influence


def write_part(folder: Path, step: int, rank: int, scores: list[Scored], failure: str = "") -> None:
    """Scores of the responses that this rank trained on."""
    tables: dict[str, dict[int, Tensor]] = defaultdict(dict)
    mini_batches = {}
    for scored in scores:
        own = RankScores.of(scored)
        for row, entry in own.entries.items():
            for name, values in entry.items():
                tables[name][row] = values
        own.entries = {}
        mini_batches[int(scored.optimizer_step[0])] = asdict(own)
    write_rank_file(folder, step, rank, tables, {"failure": failure, "mini_batches": mini_batches})


@dataclass(eq=False)
class JoinedStep:
    scored: list[Scored]
    failures: dict[int, str]
    """Rank → why it has no part."""


def join_parts(folder: Path, step: int, ranks: list[int], rows_of: list[Tensor]) -> JoinedStep:
    """The step's scores from the parts of all `ranks`. `rows_of`: per mini-batch the rows that were to be scored.
    Parts that were joined are removed."""
    failures: dict[int, str] = {}
    found: dict[int, list[RankScores]] = defaultdict(list)
    for rank, (tables, about) in read_rank_files(folder, step, ranks, "influence trace").items():
        if about["failure"]:
            failures[rank] = about["failure"]
        for number, told in about["mini_batches"].items():
            told["skipped"] = {int(group): reason for group, reason in told["skipped"].items()}
            own = set(rows_of[int(number)].tolist()) & tables["position"].keys()
            told["entries"] = {row: {name: table[row] for name, table in tables.items()} for row in own}
            found[int(number)].append(RankScores(**told))
    scored = [joined(rows, found[number]) for number, rows in enumerate(rows_of) if len(rows)]
    return JoinedStep(scored, failures)


# ---------------------------------------------------------------- blame, and the entropy probe


@dataclass(eq=False)
class RankPart:
    """What a rank, or all of them together, found of a step: tables, and single values that all ranks have alike."""

    instrument: ClassVar[str]
    """Its name in an error."""
    seconds: float = field(default=0.0, kw_only=True)
    """Of the slowest rank."""
    failure: str = field(default="", kw_only=True)
    """Of the first rank that has one."""

    def write(self, folder: Path, step: int, rank: int) -> None:
        tables = {name: value for name, value in vars(self).items() if isinstance(value, dict)}
        about = {name: value for name, value in vars(self).items() if name not in tables}
        write_rank_file(folder, step, rank, tables, about)

    @classmethod
    def joined(cls: type[Part], folder: Path, step: int, ranks: int) -> Part:
        """Of all ranks. Parts that were joined are removed."""
        joined = cls()
        for tables, about in read_rank_files(folder, step, range(ranks), cls.instrument).values():
            for name, table in tables.items():
                getattr(joined, name).update(table)
            seconds, failure = max(joined.seconds, about["seconds"]), joined.failure or about["failure"]
            vars(joined).update(about, seconds=seconds, failure=failure)
        return joined


@dataclass(eq=False)
class BlamePart(RankPart):
    instrument = "blame"
    tokens: dict[int, Tensor] = field(default_factory=dict)
    """Row of the batch → float64[3, t]: share, push and log-prob of each token that the policy wrote."""
    norms: dict[int, Tensor] = field(default_factory=dict)
    """Row → float64[]."""
    sketches: dict[int, Tensor] = field(default_factory=dict)
    updates: list[dict[str, float]] = field(default_factory=list)
    """One for each optimizer step that was shared out."""
    largest_norm: float = 0.0


def joined_blame(part: BlamePart, batch: RolloutBatch, mini_batch: Tensor) -> StepBlame:
    """The step's blame as one process would have made it. `mini_batch`: long[R], −1 for rows that did not train."""
    blame = StepBlame.of(batch)
    blame.optimizer_step[:] = mini_batch
    for row, values in part.tokens.items():
        blame.put((row, batch.response_mask[row]), values)
    for row, norm in part.norms.items():
        blame.norm[row] = norm
    blame.sketch, blame.updates = part.sketches, part.updates
    return blame


@dataclass(eq=False)
class ProbePart(RankPart):
    instrument = "entropy probe"
    base: dict[int, Tensor] = field(default_factory=dict)
    """Sequence of E → float64[2, t]: log-probs and entropies before the update."""
    derivative: dict[int, Tensor] = field(default_factory=dict)
    """Their change to first order."""
    after: dict[int, Tensor] = field(default_factory=dict)
    """Log-probs and entropies after the update."""
    shares: dict[int, Tensor] = field(default_factory=dict)
    """Row of U → float64[t]: its tokens' shares of the predicted change."""
    momentum: float = 0.0
    decay: float = 0.0
    legacy: float = 0.0
    """These three are of all ranks together, and the same on each."""
    rate: float = 0.0
    """Learning rate of the step."""


def joined_probe(part: ProbePart, evaluation: RolloutBatch, rows: Tensor) -> Probed:
    """The probe of the step from all ranks' findings, in the order of E and of `rows`."""
    sequences, lengths = range(len(evaluation)), evaluation.response_lengths

    def of(found: dict[int, Tensor]) -> Tensor:
        return torch.cat([found[row] for row in sequences], dim=1)

    base, derivative, after = of(part.base), of(part.derivative), of(part.after)
    responses = torch.stack([part.shares[row].sum() for row in rows.tolist()])
    tokens = torch.cat([part.shares[row] for row in rows.tolist()])
    return Probed(
        rows,
        evaluation,
        Prediction(Tokens(lengths, evaluation.group, *base), *derivative),
        Shares(tokens, responses, part.momentum, part.decay, part.legacy),
        Tokens(lengths, evaluation.group, *after),
        part.rate,
    )
