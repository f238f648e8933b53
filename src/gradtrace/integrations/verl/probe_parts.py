"""What the driver and the ranks tell each other about a probe: E goes there with the update's data, what a rank has
found comes back as a file in RUN/entropy_probe/parts."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gradtrace.batch import RolloutBatch
from gradtrace.errors import GradtraceError
from gradtrace.instruments.entropy_probe import Prediction, Shares, Tokens
from gradtrace.instruments.entropy_probe.columns import Probed
from gradtrace.integrations.verl.influence_parts import part_file
from gradtrace.trace.atomic import atomic_write
from gradtrace.trace.safe_npz import dump_npz
from gradtrace.trace.schema import ragged

PROBE = "gradtrace_entropy_probe"
"""Key of a `ProbeInputs` in the data of an update."""
SCALARS = ("momentum", "decay", "legacy", "rate", "seconds")
PAIRS = ("base", "derivative", "after")


@dataclass(frozen=True, eq=False)
class ProbeInputs:
    """E and where results go, on all ranks alike."""

    step: int
    prompts: list[list[int]]
    """Of every sequence of E."""
    responses: list[list[int]]
    parts_dir: str


@dataclass(eq=False)
class ProbePart:
    base: dict[int, Tensor] = field(default_factory=dict)
    """Sequence of E → float64[2, t]: log-probs and entropies before the update,"""
    derivative: dict[int, Tensor] = field(default_factory=dict)
    """their change to first order,"""
    after: dict[int, Tensor] = field(default_factory=dict)
    """and what they are after it."""
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
        values = [found[row].reshape(-1).numpy() for row in rows]
        arrays[name], arrays[f"{name}_offsets"] = ragged(values, "float64")
    about = {"failure": part.failure} | {name: getattr(part, name) for name in SCALARS}
    arrays["about_json"] = np.frombuffer(json.dumps(about).encode(), np.uint8)
    atomic_write(part_file(folder, step, rank), dump_npz(arrays))


def join_probe_parts(folder: Path, step: int, ranks: int) -> ProbePart:
    """Of all ranks. Parts that were joined are removed."""
    joined = ProbePart()
    for rank in range(ranks):
        path = part_file(folder, step, rank)
        if not path.is_file():
            raise GradtraceError(
                f"rank {rank} left no part of the entropy probe of step {step} ({path}). Every node must see this "
                "folder; give a shared one with gradtrace.run_dir"
            )
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        for name in (*PAIRS, "shares"):
            offsets = arrays[f"{name}_offsets"]
            for index, row in enumerate(arrays[f"{name}_row"].tolist()):
                values = torch.from_numpy(arrays[name][offsets[index] : offsets[index + 1]].copy())
                getattr(joined, name)[row] = values.view(2, -1) if name in PAIRS else values
        about = json.loads(arrays["about_json"].tobytes())
        seconds = max(joined.seconds, about.pop("seconds"))
        failure = joined.failure or about.pop("failure", "")
        for name, value in about.items():
            setattr(joined, name, value)
        joined.seconds, joined.failure = seconds, failure
    for rank in range(ranks):
        part_file(folder, step, rank).unlink()
    return joined


def joined(part: ProbePart, evaluation: RolloutBatch, rows: Tensor) -> Probed:
    """What all ranks together have found, in the order of E and of `rows`."""
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
