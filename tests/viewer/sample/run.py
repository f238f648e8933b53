"""A sample run on disk: drawn numbers, made to agree with one another as those of a real trace do.

In a measured group the effects of a token on the responses add up to its influence on its own prompt, and the books of
the group balance but for a little curvature. With `factors` scores are those of captured factors: a token's score is
the contrast of its effects, and position scores plus the prompt's part sum to the loss-term scores.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from gradtrace.instruments.entropy_probe import ENTROPY_PROBE
from gradtrace.instruments.entropy_trace import ENTROPY_TRACE
from gradtrace.instruments.influence import INFLUENCE_TRACE
from gradtrace.instruments.tracin import TRACIN
from gradtrace.trace.columns import SIGN_OF_PARTS, SIGN_STATEMENT, GroupStatus, Selection, ragged
from gradtrace.trace.run_files import RunFiles
from gradtrace.trace.token_text import Flag, Rules, TokenBytes
from gradtrace.trace.writer import TraceWriter
from tests.viewer.sample import prose
from tests.viewer.sample.groups import (
    SYMBOLS,
    SampleGroup,
    arithmetic_group,
    full_prose_vocabulary,
    prose_group,
)
from tests.viewer.sample.probe import probe_columns
from tests.viewer.sample.tracin import tracin_columns

VALIDATION = (16, 4)
"""Validation prompts of a TracIn step, and responses to each."""
PROBE_GROUPS = 3
"""Groups in the probe's update batch."""

CONFIG = """\
recipe: demo
model: {{path: ''}}
task: {{name: {task}}}
data: {{train_batch_size: {prompts}}}
rollout: {{n: {responses}, temperature: 1.0}}
algorithm: {{advantage: grpo, policy_loss: ppo}}
actor: {{optim: {{lr: 0.0002}}}}
trainer:
  total_steps: {steps}
  entropy_trace: {{enable: true}}
  tracin: {{enable: {tracin}}}
  entropy_probe: {{every: {probe}}}
  influence_trace: {{enable: {influence}{knobs}}}
"""
FACTOR_KNOBS = """, credit: both, hessian_mode: inverse, hessian_source: response,
    accepted_rejected_scope: per_prompt, contrastive_agg: mean"""
NATS = 0.02
"""Nats per unit of the drawn scores."""


def influence_of(group: SampleGroup, rng: np.random.Generator) -> dict[str, Any]:
    """Scores and effects that agree: position [T], loss_term [T], pairwise [T, n] per response, prompt's part [R]."""
    accepted = accepted_of(group)
    scores: dict[str, Any] = {"position": [], "loss_term": [], "pairwise": [], "prompt": []}
    for index, response in enumerate(group.responses):
        length = len(response.own)
        later = np.zeros(length)
        weight = 0.10
        for shift in range(1, 24):  # what flows through a position also serves the tokens after it
            later[: max(0, length - shift)] += weight * response.own[shift:]
            weight *= 0.72
        wanted = 0.62 * response.own + later + rng.normal(size=length) * 0.006
        effects = _effects(wanted, accepted, index, rng)
        position = effects[:, accepted].mean(1) - effects[:, ~accepted].mean(1)
        scores["position"].append(position)
        scores["loss_term"].append(response.own)
        scores["pairwise"].append(effects)
        scores["prompt"].append(float(response.own.sum() - position.sum()))
    return scores


def _effects(wanted: np.ndarray, accepted: np.ndarray, own: int, rng: np.random.Generator) -> np.ndarray:
    """float32[T, n]: effects on each response whose contrast (mean of accepted minus mean of rejected) is `wanted`."""
    n = len(accepted)
    size = wanted[:, None]
    share = 0.25 + 0.9 * rng.random((len(wanted), n))
    share[:, own] += 0.9
    effects = np.where(accepted, 0.5, -0.5) * size * share + rng.normal(size=(len(wanted), n)) * (
        0.004 + 0.12 * np.abs(size)
    )
    missing = (wanted - (effects[:, accepted].mean(1) - effects[:, ~accepted].mean(1))) / 2
    return (effects + np.where(accepted, 1, -1) * missing[:, None]).astype(np.float32)


def accepted_of(group: SampleGroup) -> np.ndarray:
    rewards = np.array([response.reward for response in group.responses])
    return (rewards == rewards.max(initial=-np.inf)) & group.mixed


def advantages_of(group: SampleGroup) -> np.ndarray:
    rewards = np.array([response.reward for response in group.responses])
    if not group.mixed:
        return np.zeros(len(rewards))
    return (rewards - rewards.mean()) / (rewards.std() + 1e-4)


def layout_columns(groups: list[SampleGroup], rows: list[int]) -> dict[str, Any]:
    """The columns that all traces share."""
    responses = [response for group in groups for response in group.responses]
    prompt_ids, prompt_offsets = ragged([group.prompt for group in groups])
    expected_ids, expected_offsets = ragged([group.expected for group in groups])
    token_id, token_offsets = ragged([response.ids for response in responses])
    empty = np.empty(0)
    return {
        "group_id": np.arange(len(groups)),
        "prompt_ids": prompt_ids, "prompt_offsets": prompt_offsets,
        "expected_ids": expected_ids, "expected_offsets": expected_offsets,
        "group": np.repeat(np.arange(len(groups)), [len(group.responses) for group in groups]),
        "row": np.array(rows, dtype=np.int64),
        "reward": np.array([response.reward for response in responses]),
        "finished": np.ones(len(responses), bool),
        "first_wrong": np.array([response.first_wrong for response in responses], dtype=np.int64),
        "advantage": np.concatenate([advantages_of(group) for group in groups]) if responses else empty,
        "accepted": np.concatenate([accepted_of(group) for group in groups]) if responses else empty.astype(bool),
        "optimizer_step": np.zeros(len(responses), np.int64),
        "token_id": token_id, "token_offsets": token_offsets,
        "entropy": np.concatenate([r.entropy for r in responses]) if responses else empty,
        "log_prob": np.concatenate([r.log_prob for r in responses]) if responses else empty,
    }  # fmt: skip


class SampleRun:
    """A run folder that grows by one step with every `write_step`."""

    def __init__(
        self, path: Path, task: str = "arithmetic", *, seed: int = 0, groups: int = 32, responses: int = 8,
        total_steps: int = 40, influence: bool = True, tracin: bool = True, probe: bool = True, at_least: int = 0,
        factors: bool = False, measured: int = 1, learning_rate: float = 2e-4, early: bool = False,
    ) -> None:  # fmt: skip
        self.path = path
        self.task = task
        self.seed = seed
        self.groups = groups
        self.responses = responses
        self.total_steps = total_steps
        self.influence = influence
        self.tracin = tracin
        self.probe = probe
        self.at_least = at_least
        self.factors = factors
        """Scores of captured factors, in their old unit, instead of nats."""
        self.measured = measured
        self.learning_rate = learning_rate
        self.early = early
        """Every optimizer step starts from an empty Adam state."""
        self.vocabulary = full_prose_vocabulary()
        self.files = RunFiles(path)
        self.files.write_config(
            CONFIG.format(
                task=task,
                prompts=groups,
                responses=responses,
                steps=total_steps,
                influence=str(influence).lower(),
                knobs=FACTOR_KNOBS if factors else "",
                tracin=str(tracin).lower(),
                probe=int(probe),
            )
        )
        if task == "arithmetic":
            flags = [Flag.SPECIAL if symbol.startswith("<") else 0 for symbol in SYMBOLS]
            self.files.write_token_bytes(TokenBytes([symbol.encode() for symbol in SYMBOLS], flags, Rules()))
        else:
            self.files.write_token_bytes(self.vocabulary.token_bytes())
        self.entropy_writer = TraceWriter(path, ENTROPY_TRACE, on_error="raise")
        self.influence_writer = TraceWriter(path, INFLUENCE_TRACE, on_error="raise") if influence else None
        self.tracin_writer = TraceWriter(path, TRACIN, on_error="raise") if tracin else None
        self.probe_writer = TraceWriter(path, ENTROPY_PROBE, on_error="raise") if probe else None
        self.last_entropy: float | None = None

    def sample_groups(self, step: int) -> list[SampleGroup]:
        """The rollout of a step."""
        return self._groups(np.random.default_rng([self.seed, step]), step, self.groups, self.responses)

    def held_out_groups(self, step: int, stream: int, groups: int, responses: int) -> list[SampleGroup]:
        """Other groups of the same kind; `stream` tells one held-out set from another."""
        return self._groups(np.random.default_rng([self.seed, step, stream]), step, groups, responses)

    def _groups(self, rng: np.random.Generator, step: int, groups: int, responses: int) -> list[SampleGroup]:
        progress = min(1.0, (step - 1) / max(1, self.total_steps - 1))
        if self.task == "arithmetic":
            return [arithmetic_group(rng, progress, responses) for _ in range(groups)]
        prompts = [prose.PROMPT, *prose.OTHER_PROMPTS]
        rates = rng.permutation([0.45, 0.8, 0.3, 0.55, 0.0, 1.0, 0.15, 0.7])
        rates[0] = 0.4
        return [
            prose_group(rng, self.vocabulary, responses, prompts[g % 8], float(rates[g % 8]), self.at_least)
            for g in range(groups)
        ]

    def write_step(self, step: int, groups: list[SampleGroup] | None = None) -> None:
        """One more step of metrics and traces; returns when it is on disk."""
        rng = np.random.default_rng([self.seed, step, 1])
        groups = self.sample_groups(step) if groups is None else groups
        rows = list(range(sum(len(group.responses) for group in groups)))
        meta = {"task": self.task, "temperature": 1.0}
        self.entropy_writer.write(step, layout_columns(groups, rows), meta)
        self.entropy_writer.flush()
        if self.influence_writer is not None:
            columns, more = self.influence_of_step(groups, rng)
            self.influence_writer.write(step, columns, {**meta, **more})
            self.influence_writer.flush()
        metrics = self.metrics(groups, rng)
        if self.tracin_writer is not None:
            metrics |= self._write_tracin(step, groups, meta, rng)
        if self.probe_writer is not None:
            self._write_probe(step, groups, meta, metrics, rng)
        self.files.log(step, metrics)

    def influence_of_step(
        self, groups: list[SampleGroup], rng: np.random.Generator
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Columns of the influence trace and what it says about them."""
        if self.factors:
            return factor_columns(groups, rng), FACTOR_META
        columns, alternatives = parts_columns(groups, rng, self.measured)
        update = {
            "optimizer_step": 0,
            "part": float(np.nansum(columns["influence"])),
            "second_moment": "batch_gradient" if self.early else "state_with_batch",
            "learning_rate": self.learning_rate,
        }
        more = {"unit": "nats", "updates": [update], "alternatives": alternatives, "sign": SIGN_OF_PARTS}
        return columns, more

    def _write_tracin(
        self, step: int, groups: list[SampleGroup], meta: dict[str, Any], rng: np.random.Generator
    ) -> dict[str, float]:
        assert self.tracin_writer is not None
        held_out = self.held_out_groups(step, 2, *VALIDATION)
        candidates = sum(len(group.responses) for group in groups)
        layout = layout_columns(
            [*groups, *held_out], list(range(candidates)) + [-1] * sum(len(g.responses) for g in held_out)
        )
        columns, more, metrics = tracin_columns(layout, candidates, rng)
        self.tracin_writer.write(step, columns, {**meta, **more})
        self.tracin_writer.flush()
        return metrics

    def _write_probe(
        self,
        step: int,
        groups: list[SampleGroup],
        meta: dict[str, Any],
        metrics: dict[str, float],
        rng: np.random.Generator,
    ) -> None:
        assert self.probe_writer is not None
        evaluation = self.held_out_groups(step, 3, self.groups, 1)
        starts = np.cumsum([0, *(len(group.responses) for group in groups)]).tolist()
        spans = [(group, range(*starts[g : g + 2])) for g, group in enumerate(groups)]
        chosen = [(group, span) for group, span in spans if group.mixed][:PROBE_GROUPS] or spans[:PROBE_GROUPS]
        update = [group for group, _ in chosen]
        rows = [-1] * len(evaluation) + [row for _, span in chosen for row in span]
        layout = layout_columns([*evaluation, *update], rows)
        columns, more = probe_columns(
            layout,
            len(evaluation),
            metrics["entropy_probe/delta_h_predicted"],
            metrics["entropy_probe/delta_h_measured"],
            rng,
        )
        self.probe_writer.write(step, columns, {**meta, **more})
        self.probe_writer.flush()
        metrics["entropy_probe/stderr"] = more["delta_h_measured_stderr"]
        metrics["entropy_probe/stderr_predicted"] = more["delta_h_predicted_stderr"]
        metrics["entropy_probe/ess"] = more["ess"]

    def metrics(self, groups: list[SampleGroup], rng: np.random.Generator) -> dict[str, float]:
        responses = [response for group in groups for response in group.responses]
        mixed = [group for group in groups if group.mixed]
        entropy = float(np.mean(np.concatenate([response.entropy for response in responses])))
        measured = entropy - self.last_entropy if self.last_entropy is not None else -0.003
        self.last_entropy = entropy
        tracing = 0.02 + 0.06 * len(mixed) / len(groups) + 0.004 * abs(rng.normal()) if self.influence else 0.0
        rest = 0.46 + 0.02 * abs(rng.normal())
        numbers = {
            "critic/rewards/mean": float(np.mean([response.reward for response in responses])),
            "actor/entropy": entropy,
            "actor/grad_norm": float(0.4 + 0.3 * rng.random()),
            "response_length/mean": float(np.mean([len(response.ids) for response in responses])),
            "timing_s/step": rest + tracing,
            "timing_s/gen": 0.6 * rest,
            "timing_s/update_actor": 0.3 * rest + tracing,
            "entropy_probe/delta_h_measured": measured,
            "entropy_probe/delta_h_predicted": 0.85 * measured + 0.0008 * rng.normal(),
        }
        if self.influence:
            traced = sum(len(group.responses) for group in mixed)
            numbers |= {
                "timing_s/influence_total": tracing,
                "influence_trace/selected_responses": traced,
                "influence_trace/selected_prompts": len(mixed),
                "influence_trace/uid_total": len(groups),
                "influence_trace/uid_mixed": len(mixed),
                "influence_trace/uid_constant": len(groups) - len(mixed),
                "influence_trace/rows_emitted": sum(len(r.ids) for group in mixed for r in group.responses),
            }
            if not self.factors and self.measured:
                numbers["influence_trace/predicted_over_measured"] = 1 + 0.02 * float(rng.normal())
        return numbers

    def finish(self) -> None:
        self.close()
        self.files.write_summary({"finished": True, "steps": self.total_steps})
        self.files.close()

    def close(self) -> None:
        writers = (self.entropy_writer, self.influence_writer, self.tracin_writer, self.probe_writer)
        for writer in writers:
            if writer is not None:
                writer.close()


FACTOR_META = {
    "unit": "influence",
    "credit": ["position", "loss_term"],
    "pairwise_credit": "position",
    "hessian_mode": "inverse",
    "hessian_source": "response",
    "contrastive_agg": "mean",
    "accepted_rejected_scope": "per_prompt",
    "output_function": "training_loss",
    "exclude_self_response": False,
    "sign": SIGN_STATEMENT,
}


def traced_columns(groups: list[SampleGroup]) -> tuple[list[int], dict[str, Any]]:
    """The groups that are scored, and what every influence trace of a step holds: responses of mixed groups only, all
    groups with their status."""
    traced = [g for g, group in enumerate(groups) if group.mixed]
    firsts = np.cumsum([0, *(len(group.responses) for group in groups)])
    rows = [int(firsts[g]) + i for g in traced for i in range(len(groups[g].responses))]
    kept = [group if group.mixed else SampleGroup(group.prompt, [], group.expected) for group in groups]
    columns = layout_columns(kept, rows)
    return traced, columns | {
        "group_status": np.array([GroupStatus.SCORED if g.mixed else GroupStatus.CONSTANT_REWARD for g in groups]),
        "selection": np.full(len(rows), int(Selection.SELECTED)),
        "captured": np.ones(len(columns["token_id"]), bool),
    }


def pairwise_columns(blocks: list[np.ndarray], members: list[np.ndarray]) -> dict[str, Any]:
    """Of every response: its effects [T, n] on these members; an empty list where none are stored."""
    member_list, member_offsets = ragged(members)
    flat, offsets = ragged([block.reshape(-1) for block in blocks], dtype="float32")
    return {
        "pairwise_member": member_list, "pairwise_member_offsets": member_offsets,
        "pairwise": flat, "pairwise_offsets": offsets,
    }  # fmt: skip


def parts_columns(
    groups: list[SampleGroup], rng: np.random.Generator, measured: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Scores in nats, with books and effects of the first `measured` groups that are scored; and the alternatives of
    the strongest token of each of these."""
    traced, columns = traced_columns(groups)
    books = {name: np.full(len(groups), np.nan, np.float32) for name in BOOKS}
    tokens: dict[str, list[np.ndarray]] = {
        name: [] for name in ("influence", "influence_own", "log_prob_before", "log_prob_after")
    }
    blocks, members, alternatives, start = [], [], [], 0
    for place, g in enumerate(traced):
        group, n = groups[g], len(groups[g].responses)
        is_measured = place < measured
        of_group: dict[str, list[np.ndarray]] = {name: [] for name in tokens}
        for response in group.responses:
            length = len(response.own)
            own = NATS * response.own
            gap = np.full(length, np.nan)
            effects = _shared(own, n, rng) if is_measured else np.empty((length, 0), np.float32)
            blocks.append(effects)
            members.append(np.arange(start, start + n) if is_measured else np.empty(0, np.int64))
            of_group["influence"].append(own + 0.3 * NATS * rng.normal(size=length) * np.abs(response.own).mean())
            of_group["influence_own"].append(effects.sum(1) if is_measured else gap)
            of_group["log_prob_before"].append(response.log_prob if is_measured else gap)
            after = np.minimum(response.log_prob + 2 * own, -1e-6)
            of_group["log_prob_after"].append(after if is_measured else gap)
        sums = {name: float(np.concatenate(values).sum()) for name, values in of_group.items()}
        books["change_by_batch"][g] = sums["influence"]
        if is_measured:
            books["change_by_own"][g] = sums["influence_own"]
            books["change_by_momentum"][g] = 0.15 * sums["influence"]
            books["objective_change"][g] = 1.18 * sums["influence"]
            index = int(np.argmax([np.abs(values).max() for values in of_group["influence"]]))
            position = int(np.abs(of_group["influence"][index]).argmax())
            other = int(group.responses[index - 1].ids[0])
            row = int(columns["row"][start + index])
            alternatives.append({"row": row, "token": position, "gained": [[other, 0.55, 0.63]]})
        for name, values in of_group.items():
            tokens[name] += values
        start += n
    flat = {name: np.concatenate(values or [np.empty(0)]) for name, values in tokens.items()}
    stored = pairwise_columns(blocks, members) if measured and traced else {}
    weights = np.full(len(columns["row"]), 1 / max(1, len(columns["token_id"])))
    return columns | books | flat | stored | {"loss_weight": weights}, alternatives


BOOKS = ("objective_change", "change_by_batch", "change_by_own", "change_by_momentum")


def _shared(total: np.ndarray, n: int, rng: np.random.Generator) -> np.ndarray:
    """float32[T, n]: effects that add up to `total`."""
    noise = rng.normal(size=(len(total), n)) * np.abs(total)[:, None]
    return (total[:, None] / n + noise - noise.mean(1, keepdims=True)).astype(np.float32)


def factor_columns(groups: list[SampleGroup], rng: np.random.Generator) -> dict[str, Any]:
    """Scores of captured factors, by both credits, with the effects of every token on every response of its group."""
    traced, columns = traced_columns(groups)
    scores = [influence_of(groups[g], rng) for g in traced]
    blocks = [block for score in scores for block in score["pairwise"]]
    starts = np.cumsum([0, *(len(groups[g].responses) for g in traced)])
    members = [
        np.arange(starts[k], starts[k + 1]) for k, g in enumerate(traced) for _ in range(len(groups[g].responses))
    ]

    def joined(name: str) -> np.ndarray:
        return np.concatenate([v for score in scores for v in score[name]] or [np.empty(0)])

    return (
        columns
        | pairwise_columns(blocks, members)
        | {
            "prompt_influence": np.array([p for score in scores for p in score["prompt"]]),
            "influence_position": joined("position"),
            "influence_loss_term": joined("loss_term"),
        }
    )
