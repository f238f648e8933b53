"""The training reward rises while validation falls: what is learnt is not the task."""

from __future__ import annotations

from gradtrace.instruments.findings.base import Finding, Moment, sure


def detect(moment: Moment) -> Finding | None:
    names = [name for name in moment.metrics if name.startswith(("val-core/", "val/")) and "mean" in name]
    reward = moment.now("critic/rewards/mean")
    for name in names:
        rows = [row for row in moment.history if isinstance(row.get(name), int | float)]
        if not rows or reward is None:
            continue
        best = max(rows, key=lambda row: row[name])
        fall = float(best[name]) - float(moment.metrics[name])
        then = _around(moment, best)
        rise = reward - then
        if fall < moment.knobs.validation_fall or rise < -0.5 * moment.knobs.validation_fall:
            continue
        return Finding(
            f"Validation fell from {best[name]:.3f} to {moment.metrics[name]:.3f} ({name}) while the training reward "
            f"went from {then:.3f} to {reward:.3f}: the policy learns what pays, and that is no longer the task.",
            sure(fall, moment.knobs.validation_fall),
            {"validation": float(moment.metrics[name]), "best": float(best[name]), "reward": reward},
        )
    return None


def _around(moment: Moment, row: object) -> float:
    """The training reward when that validation was made: of that step, or of the one after it."""
    history = list(moment.history)
    later = history[history.index(row) :]  # type: ignore[arg-type]
    found = [float(one["critic/rewards/mean"]) for one in later if "critic/rewards/mean" in one]
    return found[0] if found else float(moment.metrics["critic/rewards/mean"])
