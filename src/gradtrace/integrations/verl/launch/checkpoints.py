"""verl's sharded checkpoints: which is the last complete one, opening it on another number of workers, and as a plain
transformers folder."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gradtrace.errors import GradtraceError
from gradtrace.trace.files import atomic_directory, seal

PLAIN = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
TRACKER = "latest_checkpointed_iteration.txt"
"""verl writes it last, when a checkpoint is complete."""


def latest_step(run_dir: Path) -> int | None:
    tracker = run_dir / "checkpoints" / TRACKER
    return int(tracker.read_text()) if tracker.is_file() and tracker.read_text().strip() else None


def saved_world_size(folder: Path) -> int:
    sizes = {int(m[1]) for f in folder.glob("model_world_size_*_rank_0.pt") if (m := re.search(r"size_(\d+)_", f.name))}
    if len(sizes) != 1:
        raise GradtraceError(f"{folder} holds shards of {sorted(sizes) or 'no'} world sizes; one is expected.")
    return sizes.pop()


def full_states(folder: Path, kind: str) -> list[Any]:
    """The saved objects of all ranks (`kind`: model, optim or extra_state), on the CPU.

    Tensors, arrays and plain data alone: a pickle that would call anything else is refused.
    """
    import torch

    world = saved_world_size(folder)
    files = [folder / f"{kind}_world_size_{world}_rank_{rank}.pt" for rank in range(world)]
    # No process group is needed to join them.
    logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)
    with plain_tensors_only():
        try:
            return [torch.load(file, map_location="cpu", weights_only=True) for file in files]
        except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError) as error:
            named = next((file for file in files if file.name in str(error)), files[0])
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise GradtraceError(f"{named} cannot be read as plain tensors: {first}") from error


@contextlib.contextmanager
def plain_tensors_only() -> Iterator[None]:
    """Inside, `torch.load` reads tensors, arrays and plain data alone, whatever its caller (verl) asks for: a pickle in
    a run that one was given could call anything."""
    import torch
    import torch.distributed.tensor  # shards are DTensors; it lists its classes as harmless

    before = os.environ.get(PLAIN)
    os.environ[PLAIN] = "1"
    try:
        with torch.serialization.safe_globals(arrays_of_numpy()):
            yield
    finally:
        os.environ.pop(PLAIN)
        if before is not None:
            os.environ[PLAIN] = before


def arrays_of_numpy() -> list[Any]:
    """What a pickled state of a random generator consists of."""
    import numpy
    from numpy._core.multiarray import _reconstruct

    return [
        _reconstruct,
        numpy.ndarray,
        numpy.dtype,
        *(type(numpy.dtype(name)) for name in ("u4", "i8", "f8")),
    ]


def joined(shards: list[Any]) -> Any:
    """One tensor from the shards of all ranks: cut along a dimension, or the same everywhere."""
    import torch
    from torch.distributed.tensor import DTensor

    first = shards[0]
    if not isinstance(first, DTensor):
        return first
    placement: Any = first.placements[-1]
    local = [shard._local_tensor for shard in shards]
    if not placement.is_shard():
        return local[0]
    return torch.cat(local, dim=placement.dim)


def full_model(folder: Path) -> dict[str, Any]:
    parts = full_states(folder, "model")
    return {name: joined([part[name] for part in parts]) for name in parts[0]}


def export_policy(run_dir: Path) -> Path:
    """The last checkpoint as RUN/policy, a plain transformers folder, adapters merged."""
    step, target = latest_step(run_dir), run_dir / "policy"
    if step is None:
        raise GradtraceError(f"{run_dir} has no complete checkpoint.")
    source = run_dir / "checkpoints" / f"global_step_{step}" / "actor"
    model = plain_model(source)
    shutil.rmtree(target, ignore_errors=True)
    with atomic_directory(target) as folder:
        save_plain(model, source, folder)
    return target


def plain_model(source: Path) -> Any:
    """The model of a checkpoint's actor folder, in float32, adapters merged."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    weights = full_model(source)
    config = AutoConfig.from_pretrained(source / "huggingface", trust_remote_code=False)
    with torch.device("cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    if any("lora_" in name for name in weights):
        weights = merge_lora(weights, source)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    if unexpected or set(missing) - tied:
        raise GradtraceError(f"{source} does not fit its own configuration: {[*missing, *unexpected][:3]}")
    model.tie_weights()
    return model


def save_plain(model: Any, source: Path, folder: Path) -> None:
    model.save_pretrained(folder)
    for file in (source / "huggingface").iterdir():
        if "token" in file.name or file.name in ("vocab.json", "merges.txt", "chat_template.jinja"):
            shutil.copy(file, folder)


def steps_of(run_dir: Path) -> list[int]:
    """The steps that verl has complete checkpoints of."""
    names = (folder.parent.name for folder in run_dir.glob("checkpoints/global_step_*/actor"))
    found = {int(number) for name in names if (number := name.removeprefix("global_step_")).isdigit()}
    return sorted(step for step in found if step <= (latest_step(run_dir) or 0))


def converted(run_dir: Path, step: int) -> Path:
    """verl's checkpoint of a step as RUN/checkpoints/step_N, weights and optimizer state in the form of the embedded
    loop's; made once."""
    from safetensors.torch import save_file

    from gradtrace.training.checkpoint import OPTIMIZER, STATE, write_marker

    target = run_dir / "checkpoints" / f"step_{step:06d}"
    if target.is_dir():
        return target
    source = run_dir / "checkpoints" / f"global_step_{step}" / "actor"
    model = plain_model(source)
    names = [name for name, _ in model.named_parameters()]
    parts = full_states(source, "optim")
    states = parts[0]["state"]
    if len(states) != len(names):
        raise GradtraceError(
            f"{source} has optimizer state of {len(states)} parameters, the model has {len(names)} (LoRA adapters are "
            f"merged into it): use {run_dir / 'policy'} with optimizer=adamw"
        )
    with atomic_directory(target) as folder:
        save_plain(model, source, folder / "policy")
        moments = {
            f"{key}/{name}": joined([part["state"][index][key] for part in parts]).contiguous()
            for index, name in enumerate(names)
            for key in states[index]
        }
        save_file(moments, folder / OPTIMIZER)
        (folder / STATE).write_bytes(seal({"step": step}))
        write_marker(folder)
    return target


def merge_lora(weights: dict[str, Any], source: Path) -> dict[str, Any]:
    """W + (alpha / rank)·B·A, under the names of the plain model."""
    import json

    meta = json.loads((source / "lora_train_meta.json").read_text())
    scale = float(meta["lora_alpha"]) / float(meta["r"])
    plain = {}
    for name, weight in weights.items():
        if "lora_" in name:
            continue
        clean = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
        stem = name.removesuffix(".base_layer.weight")
        if f"{stem}.lora_A.default.weight" in weights:
            a, b = (weights[f"{stem}.lora_{side}.default.weight"].float() for side in "AB")
            weight = (weight.float() + scale * b @ a).to(weight.dtype)
        plain[clean] = weight
    return plain


def load_any_world_size(engine: Any, local_path: str) -> bool:
    """Load a checkpoint of another number of workers into `engine`. False: it is of this number, verl can do it."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, distribute_tensor

    folder = Path(local_path)
    if not folder.is_dir() or saved_world_size(folder) == dist.get_world_size():
        return False

    def shard(full: Any, like: Any) -> Any:
        if not isinstance(like, DTensor) or not isinstance(full, torch.Tensor) or full.shape != like.shape:
            return full
        return distribute_tensor(full.to(like.device), like.device_mesh, like.placements, src_data_rank=None)

    weights = full_model(folder)
    current = engine.module.state_dict()
    engine.module.load_state_dict({name: shard(weights[name], current[name]) for name in current})
    parts = full_states(folder, "optim")
    parameters = [p for group in engine.optimizer.param_groups for p in group["params"]]
    states = {}
    for index, first in parts[0]["state"].items():
        columns = {key: joined([part["state"][index][key] for part in parts]) for key in first}
        states[index] = {key: shard(value, parameters[index]) for key, value in columns.items()}
    engine.optimizer.load_state_dict({"state": states, "param_groups": parts[0]["param_groups"]})
    extra = full_states(folder, "extra_state")[0]
    if extra["lr_scheduler"] is not None:
        engine.lr_scheduler.load_state_dict(extra["lr_scheduler"])
    print(
        f"gradtrace: opened {folder}, saved on {saved_world_size(folder)} workers, on {dist.get_world_size()}",
        flush=True,
    )
    dist.barrier()
    return True
