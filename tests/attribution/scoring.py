"""Runs the engine on `Responses` the way a training loop would, and compares it with the reference."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from gradtrace.attribution import InfluenceConfig, InfluenceTrace, InfluenceTracer
from tests.attribution.models import Responses, padded_objective, token_log_probs
from tests.attribution.reference import loss_term_gradients, position_gradients, reference_scores, token_terms

REFERENCE_NAMES = {
    "accepted_rejected_scope": "scope",
    "contrastive_agg": "agg",
    "exclude_self_response": "exclude_self",
    "response_reduction": "reduction",
}


def exact_config(**knobs: object) -> InfluenceConfig:
    """Everything traced, nothing projected, and the form of the score in which step and target are one."""
    return InfluenceConfig.older(**{"projection_dim_factor": 0, "module_name_filter": ".*", **knobs})


def engine_scores(
    model: nn.Module,
    batch: Responses,
    config: InfluenceConfig,
    splits: Iterable[list[int]] | None = None,
    labels_at_capture: bool = False,
    packed: bool = False,
    sign: Tensor | None = None,
    optimizer: object = None,
) -> InfluenceTrace:
    """`splits`: the responses of each micro-batch."""
    splits = [list(range(len(batch)))] if splits is None else splits
    with InfluenceTracer(model, config=config, optimizer=optimizer) as tracer:
        for rows in splits:
            capture(tracer, model, batch, rows, labels_at_capture, packed, sign)
        return tracer.score(
            accepted=batch.accepted,
            group=batch.group,
            advantages=batch.advantages,
            sign=sign,
            terms=lambda responses: torch.cat([token_terms(model, batch, r) for r in responses]),
        )


def capture(
    tracer: InfluenceTracer,
    model: nn.Module,
    batch: Responses,
    rows: list[int],
    labels_at_capture: bool = False,
    packed: bool = False,
    sign: Tensor | None = None,
) -> None:
    labels = {}
    if labels_at_capture:
        labels = {"accepted": batch.accepted, "group": batch.group, "advantages": batch.advantages}
        labels |= {"sign": sign}
    if packed:
        ids, positions, response, tokens, weights = batch.packed(rows)
        log_probs = token_log_probs(model(input_ids=ids, position_ids=positions, use_cache=False).logits, ids)
        objective = (log_probs * weights).sum()
    else:
        _, _, tokens, _ = batch.padded(rows)
        response = torch.tensor(rows)
        objective = padded_objective(model, batch, rows)
    with tracer.capture(response=response, tokens=tokens, **labels):
        objective.backward()


def brute_force(
    model: nn.Module,
    batch: Responses,
    config: InfluenceConfig,
    credit: str = "position",
    sign: Tensor | None = None,
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Scores, pairwise influences and kernel from explicit gradients and an explicit Hessian."""
    with InfluenceTracer(model, config=config) as tracer:  # only for which modules are meant
        sites = [(site, block) for block in tracer.blocks for site in block.sites]
    modules = {site.name: site.module for site, _ in sites}
    names = {site.name: block.parameter_name for site, block in sites}
    transposed = {block.parameter_name for site, block in sites if site.kind == "conv1d"}
    positions = position_gradients(model, batch, modules, names)
    if credit == "position":
        tokens = []
        for r, found in enumerate(positions):
            tokens.append({name: g[batch.places(r) - 1] for name, g in found.items()})
    else:
        tokens = loss_term_gradients(model, batch, list(dict.fromkeys(names.values())))
        tokens = [
            {name: g.transpose(1, 2) if name in transposed else g for name, g in found.items()} for found in tokens
        ]
    knobs = {}
    for knob in ("hessian_mode", "hessian_source", "reg_lambda", *REFERENCE_NAMES):
        knobs[REFERENCE_NAMES.get(knob, knob)] = getattr(config, knob)
    return reference_scores(batch, positions, tokens, sign=sign, **knobs)


def assert_close(ours: Iterable[Tensor], theirs: Iterable[Tensor], tolerance: float = 1e-8) -> None:
    ours, theirs = list(ours), list(theirs)
    assert len(ours) == len(theirs)
    scale = max(float(t.abs().max()) for t in theirs if t.numel()) or 1.0
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert a.shape == b.shape, f"response {index}: {tuple(a.shape)} is not {tuple(b.shape)}"
        error = float((a - b).abs().max()) / scale if a.numel() else 0.0
        assert error <= tolerance, f"response {index} is off by {error:.1e} of the largest score"
