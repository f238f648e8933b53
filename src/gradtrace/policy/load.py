"""Load models and tokenizers from a folder or the model hub: the policy, its adapters, the reference of a KL term."""

from __future__ import annotations

import copy
import json
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from huggingface_hub import constants
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from gradtrace.batch import RolloutBatch
from gradtrace.errors import GradtraceError, install
from gradtrace.policy.cpu import accelerate
from gradtrace.policy.microbatch import MicroBatch
from gradtrace.policy.policy import Policy
from gradtrace.policy.settings import ModelConfig


def choose_device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise GradtraceError("model.device=cuda, but torch sees no GPU. Use model.device=cpu, or check the driver.")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def load_model(path: str | Path, config: ModelConfig, key: str = "model.path") -> Any:
    """The causal LM in `path` in float32 on its device, without dropout, in eval mode."""
    options: dict[str, Any] = {} if config.attention == "auto" else {"attn_implementation": config.attention}
    options["local_files_only"] = is_out_of_reach(path)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, trust_remote_code=False, output_loading_info=True, **options
        )
    # Damaged weights and configurations fail in many libraries, each in its own way.
    except Exception as error:
        raise not_loaded(path, key, "model", error) from error
    model, info = loaded
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    if missing := sorted(set(info["missing_keys"]) - tied):
        raise GradtraceError(
            f"{key}={path}: {len(missing)} weights are not in its files, the first is {missing[0]}; they would be "
            "random numbers."
        )
    disable_dropout(model)
    model = nn.Module.to(model, choose_device(config.device)).eval()
    accelerate(model)
    return model


def load_with_adapters(folder: str | Path, config: ModelConfig, trainable: bool, key: str = "MODEL") -> Any:
    """The model in a folder; where that holds LoRA adapters, they and the model that they were made for."""
    adapter = Path(folder) / "adapter_config.json"
    if not adapter.is_file():
        return load_model(folder, config, key)
    try:
        import peft
    except ImportError:
        raise GradtraceError(f"{folder} holds LoRA adapters: {install('lora')}") from None
    try:
        name = str(json.loads(adapter.read_text())["base_model_name_or_path"])
        base = load_model(name, config, f"base model of {folder}")
        return peft.PeftModel.from_pretrained(base, folder, is_trainable=trainable)
    except GradtraceError:
        raise
    except Exception as error:  # damaged adapters fail in several libraries, each in its own way
        raise GradtraceError(f"{key}={folder}: the adapters cannot be loaded. {error}") from error


def load_policy(path: str | Path, config: ModelConfig, temperature: float, checkpoint: Path | None = None) -> Policy:
    """The policy to train: from `path`, or with the weights of a checkpoint's policy folder."""
    lora = config.lora.rank > 0
    base = path if lora or checkpoint is None else checkpoint
    model = load_model(base, config)
    if lora:
        model = add_adapters(model, config, checkpoint)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if lora:
            model.enable_input_require_grads()
    if config.gradient_checkpointing or config.lora.dropout > 0:
        model.train()
    return Policy(model, next(model.parameters()).device, temperature)


def add_adapters(model: Any, config: ModelConfig, checkpoint: Path | None) -> Any:
    try:
        import peft
    except ImportError:
        raise GradtraceError(f"model.lora.rank > 0 needs peft: {install('lora')}") from None
    if checkpoint is not None:
        return peft.PeftModel.from_pretrained(model, checkpoint, is_trainable=True)
    targets = config.lora.target_modules
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=config.lora.rank,
        lora_alpha=config.lora.alpha,  # type: ignore[arg-type]  # a float works, and is what people write
        lora_dropout=config.lora.dropout,
        target_modules=targets[0] if targets == ["all-linear"] else list(targets),
    )
    try:
        return peft.get_peft_model(model, settings)
    except ValueError as error:
        raise GradtraceError(f"model.lora.target_modules={targets}: {error}") from error


def disable_dropout(model: nn.Module) -> None:
    """The policy that is trained must be the policy that was sampled."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0  # type: ignore[assignment]


@dataclass(eq=False)
class Reference:
    """The frozen policy that a KL term holds the trained one to."""

    policy: Policy
    own: Policy | None
    """A model of its own; None: the policy with its LoRA adapters switched off."""

    @torch.no_grad()
    def add_log_probs(self, batch: RolloutBatch, micro_batches: Iterable[MicroBatch]) -> RolloutBatch:
        ref_log_probs = torch.zeros_like(batch.sampler_log_probs)
        for micro in micro_batches:
            ref_log_probs[micro.rows, : micro.mask.shape[1]] = micro.unflatten(self._log_probs(micro).cpu())
        return batch.replace(ref_log_probs=ref_log_probs)

    def _log_probs(self, micro: MicroBatch) -> Tensor:
        """float32[N]: log-probs of the response tokens."""
        if self.own is not None:
            return self.own.statistics(micro)[0]
        with self.policy.model.disable_adapter():
            return self.policy.statistics(micro)[0]


def load_reference(policy: Policy, path: str | Path, config: ModelConfig, own_path: str) -> Reference:
    """`own_path`: reference.path; empty: where the policy started, `path`."""
    if config.lora.rank > 0 and not own_path:
        return Reference(policy, None)
    model = load_model(own_path or path, config, "reference.path" if own_path else "model.path")
    model.requires_grad_(False)
    return Reference(policy, Policy(model, policy.device, policy.temperature))


def export_model(model: Any, folder: Path) -> None:
    """Save as a plain transformers model, LoRA adapters merged into the weights they adapt."""
    if hasattr(model, "merge_and_unload"):
        model = copy.deepcopy(model).merge_and_unload()
    model.save_pretrained(folder)


def load_tokenizer(path: str | Path, key: str = "model.path") -> PreTrainedTokenizerBase:
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=is_out_of_reach(path))
    except Exception as error:  # another library reads its files, in four formats; each fails in its own way
        raise not_loaded(path, key, "tokenizer", error) from error
    if not tokenizer("1 + 2 is three")["input_ids"]:
        raise GradtraceError(
            f"{key}={path}: there are no tokenizer files, and every text would be encoded to nothing. Copy "
            "tokenizer.json and tokenizer_config.json of the model that it was made from into the folder."
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def is_out_of_reach(path: str | Path) -> bool:
    """Whether this is no folder and the hub cannot be asked for it. What was downloaded before can still be loaded by
    `local_files_only`; without that, transformers would ask again and again for a minute."""
    return not Path(path).is_dir() and not _has_an_address(constants.ENDPOINT)


@cache
def _has_an_address(endpoint: str) -> bool:
    if getproxies():  # a proxy looks addresses up, not this machine
        return True
    try:
        socket.getaddrinfo(urlsplit(endpoint).hostname, 443)
    except OSError:
        return False
    return True


def not_loaded(path: str | Path, key: str, what: str, error: Exception) -> GradtraceError:
    """Why `what` of the model that `key` names cannot be loaded, and what to do."""
    if not is_out_of_reach(path):
        return GradtraceError(f"{key}={path}: the {what} cannot be loaded. {error}")
    return GradtraceError(
        f"{key}={path}: there is no such folder ({Path(path).absolute()}), the model hub ({constants.ENDPOINT}) cannot "
        "be reached from this machine, and nothing of that name was downloaded before. Give the folder of a model; "
        "scripts/get_smollm2 makes models/SmolLM2-135M-Instruct."
    )
