"""An independent check: per-token pairwise scores of kronfluence with the identity strategy on the same model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.attribution.models import random_responses, tiny_model
from tests.attribution.scoring import engine_scores, exact_config


@pytest.mark.slow
def test_exact_token_scores_equal_kronfluence(tmp_path: Path) -> None:
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments, ScoreArguments
    from kronfluence.task import Task

    # One layer and a module above the last attention only: there position credit and kronfluence's per-token
    # gradients (rows of one backward pass) are the same thing without any convention to agree on.
    model = tiny_model(layers=1).float()
    batch = random_responses(groups=1, n=4, longest_prompt=3, longest=4)
    longest = max(len(s) for s in batch.sequences)
    names = ["model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"]

    class ObjectiveTask(Task):
        """Sum of w ℓ per batch, the objective the engine is shown."""

        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> torch.Tensor:
            ids, attention, weights = batch
            logits = model(input_ids=ids, attention_mask=attention).logits
            scores = torch.log_softmax(logits[:, :-1].float(), -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
            return (scores * weights[:, 1:]).sum()

        def compute_measurement(self, batch: Any, model: nn.Module) -> torch.Tensor:
            return self.compute_train_loss(batch, model)

        def get_influence_tracked_modules(self) -> list[str]:
            return names

        def get_attention_mask(self, batch: Any) -> torch.Tensor:
            return batch[1]

    ids, attention, _, weights = batch.padded([0, 1, 2, 3])
    data = torch.utils.data.TensorDataset(ids, attention, weights.float())
    task = ObjectiveTask()
    analyzer = Analyzer("gradtrace", prepare_model(model, task), task, cpu=True, output_dir=str(tmp_path))
    analyzer.fit_all_factors("identity", data, factor_args=FactorArguments(strategy="identity"))
    analyzer.compute_pairwise_scores(
        "scores",
        "identity",
        query_dataset=data,
        train_dataset=data,
        per_device_query_batch_size=4,
        per_device_train_batch_size=4,
        score_args=ScoreArguments(compute_per_token_scores=True),
    )
    theirs = analyzer.load_pairwise_scores("scores")["all_modules"]  # [query, train, position]
    assert theirs.shape == (4, 4, longest)

    plain = tiny_model(layers=1).float()
    config = exact_config(module_name_filter=tuple(names), hessian_mode="identity", response_reduction="sum")
    batch.weights = [w.float() for w in batch.weights]
    trace = engine_scores(plain, batch, config)
    for r, length in enumerate(batch.lengths()):
        start = batch.prompt_lengths[r] - 1
        expected = theirs[:, r, start : start + length].T
        ours = trace.pairwise[r]
        assert float((ours - expected).norm() / expected.norm()) < 1e-4
