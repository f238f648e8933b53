"""Entropy-probe steps for the sample data: shares that sum to the prediction, and a measurement close to it."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradtrace.instruments.entropy_probe import ProbeBatch

ETAS = (0.03, 0.1, 0.3, 1.0, 3.0)


def probe_columns(
    layout: dict[str, Any], evaluation: int, predicted: float, measured: float, rng: np.random.Generator
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(columns, meta) for a layout whose first `evaluation` responses measure entropy and whose others make the
    update. `predicted`, `measured`: the entropy change of the step, nats per token."""
    offsets = layout["token_offsets"]
    cut = int(offsets[evaluation])
    entropy = layout["entropy"]
    is_update = np.arange(len(entropy)) >= cut
    advantage = np.repeat(layout["advantage"], np.diff(offsets))
    # Reinforcing an undecided token makes the policy surer of it: entropy falls. Punishing one raises it.
    pushes = np.where(is_update, -advantage * entropy * rng.lognormal(0, 0.5, len(entropy)), 0.0)
    decay = 0.04 * abs(predicted)
    momentum = 0.3 * predicted
    wanted = predicted - momentum - decay
    size = 2.2 * abs(wanted) + 1e-4
    token_share = pushes / (np.abs(pushes).sum() or 1.0) * size
    missing = wanted - token_share.sum()
    weight = np.where(is_update, entropy, 0.0)
    token_share = token_share + missing * weight / weight.sum()
    share = np.add.reduceat(token_share, offsets[:-1])
    change = np.where(is_update, np.nan, entropy * rng.normal(1.0, 0.9, len(entropy)))
    change = change * predicted / np.nanmean(change)
    after = np.where(is_update, np.nan, change * rng.normal(1.0, 0.12, len(entropy)))
    after = after * measured / np.nanmean(after)
    errors = {
        "predicted_stderr": 0.16 * abs(predicted) + 1e-4,
        "measured_stderr": 0.16 * abs(measured) + 1e-4,
    }
    columns = {
        **{
            name: layout[name]
            for name in ("group_id", "prompt_ids", "prompt_offsets", "group", "row", "reward", "finished")
        },
        **{name: layout[name] for name in ("accepted", "advantage", "token_id", "token_offsets")},
        "entropy": entropy,
        "log_prob": layout["log_prob"],
        "batch": np.where(np.arange(len(share)) < evaluation, int(ProbeBatch.EVALUATION), int(ProbeBatch.UPDATE)),
        "share": share,
        "token_share": token_share,
        "entropy_change": change,
        "entropy_change_measured": after,
    }
    bend = measured / predicted - 1.0 if predicted else 0.0
    meta = {
        "delta_h_predicted": predicted,
        "delta_h_measured": measured,
        **{f"delta_h_{name}": value for name, value in errors.items()},
        "delta_h_covariance": 1.7 * predicted,
        "delta_h_legacy": 0.9 * predicted,
        "ess": 0.97 * evaluation,
        "momentum_share": momentum,
        "decay_share": decay,
        "eta_sweep": [
            {
                "eta": eta,
                "predicted": eta * predicted,
                "measured": eta * predicted * (1 + bend * eta),
                **{name: eta * value for name, value in errors.items()},
                "ess": evaluation / (1 + 0.03 * eta**2),
            }
            for eta in ETAS
        ],
    }
    return columns, meta
