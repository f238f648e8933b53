"""verl's FSDP engine outside of Ray: batches as its V1 trainer hands them to a rank, and processes that run them."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gradtrace.batch import RolloutBatch
from gradtrace.instruments.contract import Table
from gradtrace.tasks.arithmetic import build_tokenizer
from tests.training import small

LEARNING_RATE = 1e-3

# By looking for it, not by importing it: that takes seconds, and test processes need not have it.
needs_verl = pytest.mark.skipif(
    importlib.util.find_spec("verl") is None, reason="needs pip install -c constraints.txt 'gradtrace[verl]'"
)


def model_folder(folder: Path, **options: Any) -> Path:
    """A transformers folder with a random model of two layers and the demo's tokenizer."""
    model = small.model(torch.float32, **options)
    if "pad_token_id" in options:
        # transformers begins with a row of zeros there, at which norms are as good as not differentiable
        torch.nn.init.normal_(model.get_input_embeddings().weight.data[options["pad_token_id"]], std=0.3)
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def rollout(groups: int = 4, n: int = 4, seed: int = 0) -> RolloutBatch:
    """Random responses with mixed rewards and group advantages, without old log-probs."""
    batch = small.random_batch(groups=groups, n=n, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    rewards = torch.rand(len(batch), generator=generator)
    advantages = rewards.clone()
    for group in range(groups):
        mine = batch.group == group
        advantages[mine] = (rewards[mine] - rewards[mine].mean()) / (rewards[mine].std() + 1e-6)
    return batch.replace(
        rewards=rewards,
        sampler_log_probs=batch.sampler_log_probs.float(),
        advantages=torch.where(batch.response_mask, advantages[:, None], 0.0),
        ref_log_probs=None,
    )


def in_turns(batch: RolloutBatch) -> RolloutBatch:
    """The same responses, of which the policy did not write every third token, nor the first where it has others."""
    written = (torch.arange(batch.responses.shape[1]) % 3 != 0).expand(batch.responses.shape)
    mask = batch.response_mask & (written | (batch.response_lengths == 1)[:, None])
    zeroed = {
        name: torch.where(mask, getattr(batch, name), 0.0) for name in ("advantages", "old_log_probs", "entropies")
    }
    return batch.replace(response_mask=mask, lengths=batch.response_lengths, **zeroed)


def correction(batch: RolloutBatch) -> Tensor:
    """[R, T]: weights of tokens as verl's rollout correction makes them, some cut at 2."""
    generator = torch.Generator().manual_seed(11)
    return (0.3 + 2.2 * torch.rand(batch.response_mask.shape, generator=generator)).clamp(max=2.0)


def sampled_log_probs(batch: RolloutBatch) -> Tensor:
    """[R, T]: of a sampler that disagrees with the trainer, by more than the loss clips at some tokens."""
    generator = torch.Generator().manual_seed(12)
    noise = 0.15 * torch.randn(batch.response_mask.shape, generator=generator)
    return batch.need("old_log_probs").float() + noise


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(**more: str) -> dict[str, str]:
    """Of a process that has verl on CPU with our plugin."""
    return {
        **os.environ,
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": "gradtrace.integrations.verl",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        **more,
    }


def run_worlds(module: str, folder: Path, work: dict[int, list[str]]) -> None:
    """`python -m module folder`, told of the work of each number of ranks; its output is shown if a rank fails."""
    done = subprocess.run(
        [sys.executable, "-m", module, str(folder), json.dumps(work)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:]


def table_of(folder: Path, world: int, instrument: str) -> Table:
    """What the driver reads of all ranks; their files stay for other tests."""
    from gradtrace.integrations.verl.tables import read_tables

    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        return read_tables(Path(copy), 1, world)[instrument]


# ---------------------------------------------------------------- inside such a process


def as_ranks(world: int, work: Callable[[], None]) -> None:
    """Do the work in `world` forks of this process: what it has imported, which takes seconds, is imported once."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "LOCAL_RANK": "0"}
    gc.freeze()  # what packages made: verl collects garbage often, and would look through it every time
    ranks = []
    for rank in range(world):
        ranks.append(os.fork())
        if ranks[-1] == 0:
            os.environ.update(address, RANK=str(rank), WORLD_SIZE=str(world))
            try:
                work()
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
    failed = [rank for rank, process in enumerate(ranks) if os.waitpid(process, 0)[1] != 0]
    if failed:
        sys.exit(f"ranks {failed} of {world} failed")


def make_engine(folder: str, packed: bool = True, checkpointing: bool = False, **options: Any) -> Any:
    """A fresh engine on the model in `folder`, float32 throughout."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.base import EngineRegistry

    lora = options.pop("lora_rank", 0)
    half_precision = options.pop("half_precision_attention", False)
    optim = options.pop("optim", {})
    model = HFModelConfig(
        path=folder,
        use_remove_padding=packed,
        enable_gradient_checkpointing=checkpointing,
        override_config={"attn_implementation": "sdpa"},
        lora_rank=lora,
    )
    settings = FSDPEngineConfig(
        **{
            "forward_only": False,
            "strategy": "fsdp2",
            "use_torch_compile": False,
            "mixed_precision": {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
            "use_dynamic_bsz": False,
            "use_remove_padding": packed,
            **options,
        }
    )
    optimizer = FSDPOptimizerConfig(
        **{
            "lr": LEARNING_RATE,
            "weight_decay": 0.0,
            "total_training_steps": 10,
            "clip_grad": 1e9,
            "lr_warmup_steps": 0,
            **optim,
        }
    )
    engine = EngineRegistry.new(
        model_type="language_model",
        backend=settings.strategy,
        model_config=model,
        engine_config=settings,
        optimizer_config=optimizer,
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    if half_precision:
        use_half_precision_attention(engine.module.config)
    return engine


def use_half_precision_attention(config: Any) -> None:
    """As flash attention: one that cannot compute in float32."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def attention(module: Any, query: Tensor, *arguments: Any, **options: Any) -> Any:
        assert query.dtype == torch.bfloat16, f"half precision only, not {query.dtype}"
        return sdpa_attention_forward(module, query, *arguments, **options)

    AttentionInterface.register("flash_stand_in", attention)
    AttentionMaskInterface.register("flash_stand_in", sdpa_mask)
    config._attn_implementation_internal = "flash_stand_in"


class PassCount:
    """Passes of an optimizer step that instruments ask an engine for, and the micro-batches that they are cut into,
    each of which gathers all weights."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.passes: list[int] = []
        """Of each optimizer step."""
        self.micro_batches: list[int] = []
        for name, counts in (
            ("optimizer_step", None),
            ("plain_passes", self.passes),
            ("forward_step", self.micro_batches),
        ):
            setattr(engine, name, self._counted(getattr(engine, name), counts))
        self._inside = False

    def _counted(self, method: Callable[..., Any], counts: list[int] | None) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            if counts is None:
                self._inside = True
                self.passes.append(0)
                self.micro_batches.append(0)
            elif self._inside:
                counts[-1] += 1
            try:
                return method(*args, **options)
            finally:
                self._inside = self._inside and counts is not None

        return counted


def actor_config(**options: Any) -> Any:
    from verl.workers.config import ActorConfig

    return ActorConfig(
        **{
            "strategy": "fsdp2",
            "rollout_n": 4,
            "ppo_micro_batch_size_per_gpu": 2,
            "clip_ratio_c": 3.0,
            **options,
        }
    )


def tensordict(
    batch: RolloutBatch,
    rows: list[int],
    message: Any,
    sequences: int,
    packed: bool = True,
    micro_batch: int = 2,
    dynamic: bool = False,
    entropies: bool = False,
    corrected: bool = False,
    sampled: bool = False,
) -> Any:
    """The mini-batch `rows` of one rank; `sequences` counts those of all ranks."""
    from verl.utils import tensordict_utils as tu

    from gradtrace.integrations.verl.tables import ROW, STEP

    def nested(values: list[Tensor]) -> Tensor:
        return torch.nested.as_nested_tensor(values, layout=torch.jagged)

    lengths = batch.response_lengths.tolist()
    prompts = [torch.tensor(batch.prompts[int(batch.group[row])]) for row in rows]
    responses = [batch.responses[row, : lengths[row]] for row in rows]
    inputs = [torch.cat(parts) for parts in zip(prompts, responses, strict=True)]

    def column(values: Tensor) -> Tensor:
        return nested([values[row, : lengths[row]].float() for row in rows])

    masks = nested([batch.response_mask[row, : lengths[row]].long() for row in rows])
    fields = {
        "prompts": nested(prompts),
        "responses": nested(responses),
        "input_ids": nested(inputs),
        "position_ids": nested([torch.arange(len(ids)) for ids in inputs]),
        "response_mask": masks,
        "loss_mask": masks,
        "old_log_probs": column(batch.old_log_probs),  # type: ignore[arg-type]
        "advantages": column(batch.advantages),  # type: ignore[arg-type]
        ROW: torch.tensor(rows),
    }
    optional = {
        "ref_log_prob": batch.ref_log_probs,
        "rollout_log_probs": sampled_log_probs(batch) if sampled else None,
        "rollout_is_weights": correction(batch) if corrected else None,
    }
    fields |= {name: column(values) for name, values in optional.items() if values is not None}
    data = tu.get_tensordict(fields)
    tu.assign_non_tensor(
        data,
        temperature=1.0,
        global_batch_size=sequences,
        use_remove_padding=packed,
        use_dynamic_bsz=dynamic,
        micro_batch_size_per_gpu=micro_batch,
        max_token_len_per_gpu=24,
        calculate_entropy=entropies,
        use_fused_kernels=False,
    )
    if message is not None:
        tu.assign_non_tensor_data(data, STEP, message)
    return data
