"""The policy being trained: a causal language model, its tokenizer, and log-probs of given responses."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from gradtrace.algorithms.logits import log_probs_and_entropies
from gradtrace.batch import RolloutBatch
from gradtrace.config import ModelConfig
from gradtrace.errors import GradtraceError, install
from gradtrace.hub import is_out_of_reach, not_loaded
from gradtrace.policy.cpu import accelerate
from gradtrace.policy.microbatch import Layout, MicroBatch
from gradtrace.policy.packed_attention import is_supported, packed_attention


@dataclass
class Policy:
    model: Any
    """A transformers causal LM, or peft's wrapper around one. Weights are float32."""
    device: torch.device
    temperature: float
    """Log-probs and entropies are those of softmax(logits / temperature), the distribution that is sampled."""

    def statistics(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-probs of the response tokens and entropies of their distributions, both float32[N], in order."""
        micro = micro.to(self.device)
        with self.autocast(), logits_only_at(self.model, micro.logit_positions):
            output = run_model(self.model, micro)
        return log_probs_and_entropies(output.logits[0], micro.targets, self.temperature)

    def own_pass(self) -> contextlib.AbstractContextManager[list[Tensor]]:
        """Around a pass whose gradients nobody wants but our hooks. Gives the tensors that it is to be differentiated
        by, so that no gradient of a weight is computed; they are known after the forward pass."""
        return embedding_output(self.model)

    def best_layout(self) -> Layout:
        """The layout with the fewest tokens, for passes that nobody listens to layer by layer: prompts computed once
        per group, where the model's attention allows it."""
        # Gradient checkpointing runs the layers again in the backward pass, outside of our attention function.
        sdpa = self.model.config._attn_implementation == "sdpa" and not self.model.is_gradient_checkpointing
        return "shared" if sdpa and is_supported(self.model) else "padded"

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """bf16 matrix products on a GPU; float32 on a CPU."""
        return torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda")

    def seen_by_head(self, micro: MicroBatch) -> dict[str, Tensor]:
        """Name of the output head → the flat positions that it runs on, for hooks: it does not see all."""
        head = self.model.get_output_embeddings()
        names = [name for name, module in self.model.named_modules() if module is head]
        return dict.fromkeys(names, micro.logit_positions)

    def trainable(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}


def run_model(model: Any, micro: MicroBatch) -> Any:
    """The model's forward pass on the inputs of a micro-batch, in whatever layout they are."""
    if micro.packing is None:
        return model(input_ids=micro.input_ids, use_cache=False)
    if micro.packing.prefixes is None and model.config._attn_implementation.startswith("flash"):
        # Flash attention reads the borders of packed sequences from the position ids itself.
        return model(input_ids=micro.input_ids, position_ids=micro.position_ids, use_cache=False)
    with packed_attention(model):
        return model(
            input_ids=micro.input_ids,
            position_ids=micro.position_ids,
            packing=micro.packing,
            use_cache=False,
        )


@contextlib.contextmanager
def embedding_output(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collects the outputs of the input embeddings of forward passes inside, made differentiable: where a backward
    pass that wants no weight gradients may end."""
    outputs: list[Tensor] = []
    getter = getattr(model, "get_input_embeddings", None)
    module = getter() if callable(getter) else None
    if module is None:
        yield outputs
        return

    def remember(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        if not output.requires_grad:
            output.requires_grad_()
        outputs.append(output)
        return output

    handle = module.register_forward_hook(remember)
    try:
        yield outputs
    finally:
        handle.remove()


@contextlib.contextmanager
def logits_only_at(model: Any, flat_positions: Tensor) -> Iterator[None]:
    """Inside, lm_head sees hidden states [1, N, H] of these flat positions instead of [B, S, H].

    A vocabulary is many times wider than the model, so logits of prompts and padding would be most of the work.
    The gathering happens before lm_head and not instead of it: what a model does to its logits (scaling,
    soft caps) still happens.
    """

    def gather(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden = inputs[0]
        return (hidden.reshape(-1, hidden.shape[-1]).index_select(0, flat_positions)[None], *inputs[1:])

    handle = model.get_output_embeddings().register_forward_pre_hook(gather)
    try:
        yield
    finally:
        handle.remove()


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
