"""What a page asks every two seconds: is the run still going, and what has been written since last time.

The browser says how far it got (a byte offset into metrics.jsonl, the time of the newest manifest line of each
trace) and gets only what came after that.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradtrace.trace.lock import is_held
from gradtrace.trace.reader import Run, dig
from gradtrace.trace.schema import KINDS
from gradtrace.viewer.catalog import ABLATION, ServedRun, changed, last_activity


def run_news(served: ServedRun, metrics_from: int, metrics_file: int, newest: Mapping[str, float]) -> dict[str, Any]:
    """`metrics_file`: the inode that `metrics_from` counts in (a resumed run has a new file). `newest`: by kind of
    trace, the time of the last manifest line that the page knows."""
    run = served.run
    inode = _inode(run.path / "metrics.jsonl")
    rows, offset = run.metrics(metrics_from if metrics_file == inode else 0)
    is_continued = metrics_file == inode and metrics_from <= offset
    total = dig(served.config, "trainer.total_steps")
    return {
        "id": served.id,
        "name": served.name,
        "state": state_of(run),
        "total_steps": total if isinstance(total, int) else None,
        "written": last_activity(run.path),
        "metrics": {"rows": rows, "continued": is_continued, "to": offset, "file": inode},
        "traces": {kind: _trace_news(served, kind, newest.get(kind, 0.0)) for kind in KINDS},
        "description": describe(served.config),
        "enabled": {kind: _enabled(served.config, kind) for kind in KINDS},
        "findings": len(run.findings()),
        "ablation": changed(run.path / ABLATION),
        "problems": [str(problem) for problem in run.problems],
        "vocabulary_problem": served.vocabulary.problem,
    }


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return 0


def _trace_news(served: ServedRun, kind: str, after: float) -> dict[str, Any]:
    entries = served.entries(kind)
    return {
        "present": kind in served.run.kinds(),
        "steps": [
            {"step": entry.step, "groups": entry.groups, "responses": entry.responses, "tokens": entry.tokens}
            for entry in entries.values()
            if entry.time > after
        ],
        "count": len(entries),
        "newest": max((entry.time for entry in entries.values()), default=0.0),
    }


def state_of(run: Run) -> str:
    """finished, stopped (before its last step), live (a process holds its lock) or quiet (no end noted, and nobody
    writes). A summary older than the last metrics belongs to an earlier part of a run that was resumed."""
    if is_held(run.path):
        return "live"
    summary = run.summary
    if summary and changed(run.path / "summary.json") >= changed(run.path / "metrics.jsonl"):
        return "stopped" if summary.get("finished") is False else "finished"
    return "quiet"


def _enabled(config: Mapping[str, Any], kind: str) -> bool | None:
    """What the configuration says about the setting that turns the instrument on; None if it says nothing."""
    value = dig(config, KINDS[kind].switch.split("=")[0])
    return bool(value) if isinstance(value, bool | int) else None


def describe(config: Mapping[str, Any]) -> str:
    """One line about a run: model, algorithm, batch, learning rate, how influence is traced."""
    parts = []
    model = dig(config, "model.path") or dig(config, "task.name")
    if model:
        parts.append(str(model))
    algorithm = [dig(config, "algorithm.advantage"), dig(config, "algorithm.policy_loss")]
    if all(algorithm):
        parts.append(f"{str(algorithm[0]).upper()} with {algorithm[1]} loss")
    prompts, n = dig(config, "data.train_batch_size"), dig(config, "rollout.n")
    if prompts and n:
        parts.append(f"{prompts} prompts × {n} responses")
    rate = dig(config, "actor.optim.lr")
    if rate:
        parts.append(f"lr {rate:g}" if isinstance(rate, float) else f"lr {rate}")
    influence = dig(config, "trainer.influence_trace")
    if isinstance(influence, Mapping) and influence.get("enable"):
        credit = str(influence.get("credit", "position")).replace("_", "-")
        words = ["position and loss-term credit" if credit == "both" else f"{credit} credit"]
        source = influence.get("hessian_source", "response")
        geometries = {"inverse": f"{source} curvature", "optimizer": "the optimizer's geometry"}
        words.append(geometries.get(str(influence.get("hessian_mode")), ""))
        whole = influence.get("scope_pass") or not dig(config, "actor.mini_batch_size")
        wide = f"all selected responses of the {'step' if whole else 'mini-batch'}"
        scope = {"per_prompt": "own group", "all_selected": wide}
        words.append(scope.get(str(influence.get("accepted_rejected_scope")), ""))
        parts.append("influence: " + ", ".join(word for word in words if word))
    return " · ".join(parts)
