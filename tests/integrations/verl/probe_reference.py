"""The entropy probe of one optimizer step: what the ranks were given, the embedded loop's answer, and theirs."""

from __future__ import annotations

from pathlib import Path

import torch

from gradtrace.algorithms.settings import AlgorithmConfig
from gradtrace.batch import RolloutBatch
from gradtrace.instruments.entropy_probe import ENTROPY_PROBE
from gradtrace.instruments.entropy_probe.estimates import Measured, Prediction, Tokens
from gradtrace.instruments.entropy_probe.passes import evaluation_batch, update_batch
from gradtrace.instruments.entropy_probe.probe import EntropyProbe, Shares
from gradtrace.instruments.entropy_probe.reporter import Probed
from gradtrace.policy.load import load_policy
from gradtrace.policy.loss import PolicyLoss
from gradtrace.policy.settings import ModelConfig
from tests.integrations.verl import cases, harness
from tests.training import small

PAD = 0
"""Of the demo's tokenizer, which verl goes by."""


def with_padding_token(batch: RolloutBatch) -> RolloutBatch:
    """One of its tokens in every place is the padding token instead."""
    return batch.replace(responses=torch.where(batch.responses == 5, PAD, batch.responses))


def prepare(folder: Path, model: torch.nn.Module) -> None:
    """E, and moments of an optimizer that has made steps."""
    evaluation = with_padding_token(small.random_batch(groups=7, n=1, seed=5))
    torch.save(evaluation, folder / "evaluation.pt")
    generator = torch.Generator().manual_seed(3)
    moments = {
        name: {
            "exp_avg": 1e-3 * torch.randn(p.shape, generator=generator),
            "exp_avg_sq": (1e-3 + 1e-2 * torch.rand(p.shape, generator=generator)) ** 2,
        }
        for name, p in model.named_parameters()
    }
    torch.save(moments, folder / "moments.pt")


def of_ranks(folder: Path, name: str, world: int) -> tuple[Prediction, Shares, Measured, Tokens]:
    """As the driver joins it from the ranks' tables."""
    evaluation: RolloutBatch = torch.load(folder / "evaluation.pt", weights_only=False)
    table = harness.table_of(folder / f"{name}.{world}", world, ENTROPY_PROBE)
    assert not table.failure
    probed = Probed.of_table(evaluation, table)
    assert probed.rows.tolist() == [row for row, mini_batch in enumerate(cases.PLAN) if mini_batch == 0]
    return probed.prediction, probed.shares, probed.measured, probed.after


def embedded(folder: Path, name: str) -> tuple[Prediction, Shares, Measured, Tokens]:
    """(prediction, shares, measured, E's tokens after the update) of the embedded loop's probe, in float64."""
    case = cases.PROBES[name]
    batch: RolloutBatch = torch.load(folder / "batch.pt", weights_only=False)
    batch = batch.select((torch.tensor(cases.PLAN) == 0).nonzero().squeeze(-1))
    policy = load_policy(folder / "model", ModelConfig(device="cpu"), 1.0)
    policy.model.double()
    wanted = cases.PROBED_OPTIM
    # verl's optimizer has one group: decay of all parameters.
    adamw = torch.optim.AdamW(policy.model.parameters(), lr=wanted["lr"], weight_decay=wanted["weight_decay"])
    moments = torch.load(folder / "moments.pt")
    for name, parameter in policy.trainable().items():
        adamw.state[parameter] = {"step": torch.tensor(5.0), **moments[name]}
    mode = case.actor.get("loss_agg_mode", "token-mean")
    algorithm = AlgorithmConfig(
        policy_loss_options={"clip_low": 0.2, "clip_high": 0.2},
        aggregation={"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean"}[mode],
    )
    probe = EntropyProbe(policy.model, adamw, max_grad_norm=wanted["clip_grad"])
    U = update_batch(PolicyLoss(policy, algorithm, 16), batch)
    E = evaluation_batch(policy, torch.load(folder / "evaluation.pt", weights_only=False))
    update = probe.update(U)
    assert update.clip_factor < 0.9
    prediction = probe.predict(E, update)
    return prediction, probe.shares(prediction, E, update, U), *probe.measure(prediction, E, update)
