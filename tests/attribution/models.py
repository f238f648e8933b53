"""Tiny models in float64 and random batches of responses, for tests of the attribution engine."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

VOCAB = 13
FAMILIES = ("qwen2", "llama", "gpt2")


def tiny_model(family: str = "qwen2", tied: bool = False, seed: int = 0, layers: int = 2) -> nn.Module:
    torch.manual_seed(seed)
    common = {"vocab_size": VOCAB, "tie_word_embeddings": tied, "attn_implementation": "sdpa"}
    shape = {
        "hidden_size": 8,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 12,
        "max_position_embeddings": 64,
        "initializer_range": 0.4,
    }
    if family == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**common, **shape))
    elif family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**common, **shape))
    else:
        model = GPT2LMHeadModel(
            GPT2Config(
                **common,
                bos_token_id=0,
                eos_token_id=0,
                n_embd=8,
                n_layer=layers,
                n_head=2,
                n_positions=64,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                initializer_range=0.4,
            )
        )
    return _exact_norms(model.double()).eval()


def _exact_norms(model: nn.Module) -> nn.Module:
    """transformers' RMSNorms round to float32 inside, which would hide errors below 1e-7: use torch's."""
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            norm = nn.RMSNorm(module.weight.shape, eps=module.variance_epsilon, dtype=torch.float64)
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, norm)
    return model


@dataclass
class Responses:
    """R responses in groups, with per-token weights of the objective F = Σ w ℓ."""

    sequences: list[Tensor]
    prompt_lengths: list[int]
    weights: list[Tensor]
    group: Tensor
    accepted: Tensor
    advantages: Tensor
    masks: list[Tensor] | None = None
    """Which tokens after the prompt count (the policy wrote them), `weights` has one for each; None: all."""

    def __len__(self) -> int:
        return len(self.sequences)

    def lengths(self) -> list[int]:
        return [len(self.places(r)) for r in range(len(self))]

    def places(self, r: int) -> Tensor:
        """long[T_r]: where the sequence holds tokens that count."""
        after = torch.arange(self.prompt_lengths[r], len(self.sequences[r]))
        return after if self.masks is None else after[self.masks[r]]

    def padded(self, rows: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """input_ids, attention_mask, tokens mask, weights placed at the tokens: all [B, S]."""
        longest = max(len(self.sequences[r]) for r in rows)
        ids = torch.zeros(len(rows), longest, dtype=torch.long)
        attention = torch.zeros(len(rows), longest, dtype=torch.long)
        tokens = torch.zeros(len(rows), longest, dtype=torch.bool)
        weights = torch.zeros(len(rows), longest, dtype=torch.float64)
        for i, r in enumerate(rows):
            length = len(self.sequences[r])
            ids[i, :length] = self.sequences[r]
            attention[i, :length] = 1
            tokens[i, self.places(r)] = True
            weights[i, self.places(r)] = self.weights[r].to(weights)
        return ids, attention, tokens, weights

    def packed(self, rows: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """input_ids, position_ids, response ids, tokens mask, weights: all [1, S]."""
        ids = torch.cat([self.sequences[r] for r in rows])[None]
        positions = torch.cat([torch.arange(len(self.sequences[r])) for r in rows])[None]
        response = torch.cat([torch.full((len(self.sequences[r]),), r) for r in rows])[None]
        tokens = torch.cat([torch.isin(torch.arange(len(self.sequences[r])), self.places(r)) for r in rows])[None]
        weights = torch.zeros(ids.shape, dtype=torch.float64)
        weights[tokens] = torch.cat([self.weights[r] for r in rows]).to(weights)
        return ids, positions, response, tokens, weights


def random_responses(
    groups: int = 2, n: int = 3, seed: int = 0, longest_prompt: int = 4, longest: int = 5
) -> Responses:
    generator = torch.Generator().manual_seed(seed)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    sequences, prompt_lengths, weights, accepted = [], [], [], []
    for _ in range(groups):
        # Two tokens at least: at a single position attention has no gradient, and H⁻¹ with a relative λ would
        # blow its rounding error up to size one, in the engine and in the reference alike.
        prompt = torch.randint(0, VOCAB, (integer(2, longest_prompt),), generator=generator)
        prompt[1] = (prompt[1] + int(prompt[0] == prompt[1])) % VOCAB  # equal tokens are as one position
        for _ in range(n):
            response = torch.randint(0, VOCAB, (integer(1, longest),), generator=generator)
            sequences.append(torch.cat([prompt, response]))
            prompt_lengths.append(len(prompt))
            weights.append(torch.randn(len(response), generator=generator, dtype=torch.float64))
        labels = torch.rand(n, generator=generator) < 0.5
        labels[0], labels[1] = True, False
        accepted.append(labels)
    return Responses(
        sequences,
        prompt_lengths,
        weights,
        torch.arange(groups).repeat_interleave(n),
        torch.cat(accepted),
        torch.randn(groups * n, generator=generator, dtype=torch.float64),
    )


def with_holes(batch: Responses, seed: int = 0) -> Responses:
    """The same responses with tokens in them that do not count: in the middle, first or last, never all."""
    generator = torch.Generator().manual_seed(seed)
    masks = [torch.rand(n, generator=generator) < 0.6 for n in batch.lengths()]
    for mask in masks:
        mask[int(torch.randint(len(mask), (), generator=generator))] = True
    weights = [weight[mask] for weight, mask in zip(batch.weights, masks, strict=True)]
    return dataclasses.replace(batch, masks=masks, weights=weights)


def token_log_probs(logits: Tensor, ids: Tensor) -> Tensor:
    """[B, S]: log-prob of each input token given those before it; 0 at the first position."""
    scores = torch.log_softmax(logits[:, :-1], -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return torch.nn.functional.pad(scores, (1, 0))


def padded_objective(model: nn.Module, batch: Responses, rows: list[int]) -> Tensor:
    ids, attention, _, weights = batch.padded(rows)
    logits = model(input_ids=ids, attention_mask=attention).logits
    return (token_log_probs(logits, ids) * weights).sum()
