"""What the driver and the ranks tell each other about a probe: E goes there with the update's data, what a rank has
found comes back as a file in RUN/entropy_probe/parts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gradtrace.batch import RolloutBatch
from gradtrace.instruments.entropy_probe import Prediction, Shares, Tokens
from gradtrace.instruments.entropy_probe.columns import Probed
from gradtrace.integrations.verl.rank_files import cut, put_ragged, read_rank_files, write_rank_file

PROBE = "gradtrace_entropy_probe"
"""Key of a `ProbeInputs` in the data of an update."""
SCALARS = ("momentum", "decay", "legacy", "rate", "seconds")
PAIRS = ("base", "derivative", "after")


@dataclass(frozen=True, eq=False)
class ProbeInputs:
    """E and where results go, on all ranks alike."""

    step: int
    prompts: list[list[int]]
    """The prompt of every sequence of E."""
    responses: list[list[int]]
    parts_dir: str


@dataclass(eq=False)
class ProbePart:
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
    seconds: float = 0.0
    failure: str = ""


def write_probe_part(folder: Path, step: int, rank: int, part: ProbePart) -> None:
    arrays: dict[str, np.ndarray] = {}
    for name in (*PAIRS, "shares"):
        found: dict[int, Tensor] = getattr(part, name)
        rows = sorted(found)
        arrays[f"{name}_row"] = np.array(rows, np.int64)
        put_ragged(arrays, name, [found[row].reshape(-1).numpy() for row in rows], "float64")
    about = {"failure": part.failure} | {name: getattr(part, name) for name in SCALARS}
    write_rank_file(folder, step, rank, arrays, about)


def join_probe_parts(folder: Path, step: int, ranks: int) -> ProbePart:
    """Join what all ranks have found. Parts that were joined are removed."""
    joined = ProbePart()
    for arrays, about in read_rank_files(folder, step, range(ranks), "entropy probe").values():
        for name in (*PAIRS, "shares"):
            for index, row in enumerate(arrays[f"{name}_row"].tolist()):
                values = torch.from_numpy(cut(arrays, name, index).copy())
                getattr(joined, name)[row] = values.view(2, -1) if name in PAIRS else values
        seconds = max(joined.seconds, about.pop("seconds"))
        failure = joined.failure or about.pop("failure", "")
        for name, value in about.items():
            setattr(joined, name, value)
        joined.seconds, joined.failure = seconds, failure
    return joined


def joined(part: ProbePart, evaluation: RolloutBatch, rows: Tensor) -> Probed:
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
