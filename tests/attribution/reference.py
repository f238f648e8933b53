"""The definitions of SCIENCE.md by brute force: explicit gradients, explicit H, one autograd call per token.

Written apart from the engine on purpose: it shares no code with it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.attribution.models import Responses, token_log_probs


def token_terms(model: nn.Module, batch: Responses, response: int) -> Tensor:
    ids = batch.sequences[response][None]
    scores = token_log_probs(model(input_ids=ids).logits, ids)[0, batch.places(response)]
    return scores * batch.weights[response]


def loss_term_gradients(model: nn.Module, batch: Responses, names: list[str]) -> list[dict[str, Tensor]]:
    """Per response {parameter: [T_r, ...]}: the gradient of each token's own term."""
    parameters = dict(model.named_parameters())
    result = []
    for response in range(len(batch)):
        terms = token_terms(model, batch, response)
        rows = [
            torch.autograd.grad(term, [parameters[n] for n in names], retain_graph=True, allow_unused=True)
            for term in terms
        ]
        result.append(
            {
                name: torch.stack([torch.zeros_like(parameters[name]) if r[i] is None else r[i] for r in rows])
                for i, name in enumerate(names)
            }
        )
    return result


def position_gradients(
    model: nn.Module, batch: Responses, modules: dict[str, nn.Module], names: dict[str, str]
) -> list[dict[str, Tensor]]:
    """Per response {parameter: [S_r, d_out, d_in]}: u vᵀ at *every* position, the prompt's included."""
    result = []
    for response in range(len(batch)):
        calls: list[tuple[str, Tensor, Tensor]] = []
        handles = [
            module.register_forward_hook(lambda m, a, y, name=name, calls=calls: calls.append((name, a[0], y)))
            for name, module in modules.items()
        ]
        total = token_terms(model, batch, response).sum()
        for handle in handles:
            handle.remove()
        us = torch.autograd.grad(total, [y for _, _, y in calls])
        found: dict[str, Tensor] = {}
        for (name, x, _), u in zip(calls, us, strict=True):
            if isinstance(modules[name], nn.Embedding):
                onehot = torch.nn.functional.one_hot(x[0], modules[name].num_embeddings).double()
                outer = torch.einsum("so,si->soi", onehot, u[0])
            else:
                rows, inputs = (side.reshape(-1, side.shape[-1]) for side in (u, x.detach()))
                outer = torch.einsum("so,si->soi", rows, inputs)
            key = names[name]
            found[key] = found.get(key, 0) + outer
        result.append(found)
    return result


def solve(rows: Tensor, whole: Tensor, reg_lambda: float) -> Tensor:
    """H⁻¹ of each gradient in `whole`, with the explicit H of `rows`."""
    dim = whole.shape[1]
    plain = rows.T @ rows
    damping = reg_lambda if reg_lambda > 0 else 0.1 * plain.diagonal().sum() / dim
    return torch.linalg.solve(plain + damping * torch.eye(dim, dtype=torch.float64), whole.T).T


def reference_scores(
    batch: Responses,
    position: list[dict[str, Tensor]],
    tokens: list[dict[str, Tensor]],
    *,
    hessian_mode: str = "inverse",
    hessian_source: str = "response",
    scope: str = "per_prompt",
    agg: str = "mean",
    exclude_self: bool = False,
    reduction: str = "mean",
    reg_lambda: float = 0.0,
    sign: Tensor | None = None,
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """(scores, pairwise, kernel). `position`: all positions (for g_r and token curvature), `tokens`: the gradients to
    score, one per response token."""
    count = len(batch)
    lengths = batch.lengths()
    pairwise = [torch.zeros(lengths[r], count, dtype=torch.float64) for r in range(count)]
    kernel = torch.zeros(count, count, dtype=torch.float64)
    same = (batch.group[:, None] == batch.group) if scope == "per_prompt" else torch.ones(count, count).bool()
    for name in position[0]:
        whole = torch.stack([position[r][name].sum(0).flatten() for r in range(count)])
        if reduction == "mean":
            whole = whole / torch.tensor(lengths, dtype=torch.float64)[:, None]
        if sign is not None:
            whole = whole * sign[:, None]
        own = [position[r][name][batch.places(r) - 1].flatten(1) for r in range(count)]
        known: dict[tuple[int, ...], Tensor] = {}  # responses with the same others have the same H
        for r in range(count):
            members = tuple(same[r].nonzero().squeeze(-1).tolist())
            if members not in known:
                rows = whole[list(members)] if hessian_source == "response" else torch.cat([own[m] for m in members])
                known[members] = whole if hessian_mode == "identity" else solve(rows, whole, reg_lambda)
            solved = known[members]
            pairwise[r] += (tokens[r][name].flatten(1) @ solved.T) * same[r]
            kernel[r] += (whole[r] @ solved.T) * same[r]
    scores = []
    for r in range(count):
        weight = torch.zeros(count, dtype=torch.float64)
        use = same[r].clone()
        if exclude_self:
            use[r] = False
        for s in use.nonzero().squeeze(-1).tolist():
            side = use & (batch.accepted == batch.accepted[s])
            sign = 1.0 if batch.accepted[s] else -1.0
            weight[s] = {
                "sum": sign,
                "mean": sign / int(side.sum()),
                "advantage": float(batch.advantages[s]),
            }[agg]
        scores.append(pairwise[r] @ weight)
    return scores, pairwise, kernel
