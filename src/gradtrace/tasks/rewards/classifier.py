"""A transformers sequence classifier as the reward: toxicity, sentiment, a learned reward model with one output."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradtrace.errors import GradtraceError
from gradtrace.tasks.rewards import batched, register_reward

if TYPE_CHECKING:
    from gradtrace.tasks.base import Item

VALUES = ("logit", "probability")


@register_reward("classifier")
@batched
def classifier(
    responses: list[str],
    items: list[Item],
    *,
    model: str = "",
    label: str = "",
    value: str = "logit",
    sign: float = 1.0,
    with_prompt: bool = False,
    batch_size: int = 64,
    device: str = "cpu",
) -> list[float]:
    """`sign` times the classifier's `value` of `label` for each response.

    `model` is a folder or a hub name; `label` a name or a number of its `id2label`, and needs no choosing where the
    model has one output. `logit` has contrast where probabilities are all next to 0 or 1. `sign=-1` punishes the label.
    `with_prompt` judges prompt and response together.
    """
    if value not in VALUES:
        raise GradtraceError(f"reward.options.value={value} is not possible. Valid: {', '.join(VALUES)}.")
    if not model:
        raise GradtraceError(
            "reward.name=classifier needs a sequence classifier: reward.options.model=FOLDER_OR_HUB_NAME."
        )
    tokenizer, network = load(str(model), device)
    column = label_column(network.config, str(label))
    texts = responses
    if with_prompt:
        texts = [str(item["prompt"]) + text for text, item in zip(responses, items, strict=True)]
    found: list[float] = []
    for start in range(0, len(texts), batch_size):
        found += scores(tokenizer, network, texts[start : start + batch_size], column, value)
    return [sign * number for number in found]


@cache
def load(model: str, device: str) -> tuple[Any, Any]:
    """Tokenizer and classifier, kept for the whole run."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
        network, report = AutoModelForSequenceClassification.from_pretrained(model, output_loading_info=True)
    except (OSError, ValueError) as error:
        where = "no such folder" if not Path(model).is_dir() else "not a classifier of transformers"
        raise GradtraceError(f"reward.options.model={model}: {where}: {error}") from error
    missing = sorted(report["missing_keys"])
    if missing:  # a language model without a trained head would give random rewards
        raise GradtraceError(
            f"reward.options.model={model} has no trained classification head ({missing[0]} is not in its weights)."
        )
    return tokenizer, network.to(device).eval()


def label_column(config: Any, label: str) -> int:
    """The output that a label names, by its name or its number."""
    names = {int(number): str(name) for number, name in config.id2label.items()}
    if len(names) == 1 and not label:
        return 0
    for number, name in names.items():
        if label in (name, str(number)):
            return number
    listed = ", ".join(f"{number}: {name}" for number, name in names.items())
    raise GradtraceError(f"reward.options.label={label or '(none)'}: choose one of {listed}.")


def scores(tokenizer: Any, network: Any, texts: list[str], column: int, value: str) -> list[float]:
    """The value of one label for each text; an empty text counts as a space."""
    import torch

    longest = getattr(network.config, "max_position_embeddings", None) or 512
    inputs = tokenizer(
        [text or " " for text in texts],
        padding=True,
        truncation=True,
        max_length=longest,
        return_tensors="pt",
    ).to(network.device)
    with torch.no_grad():
        logits = network(**inputs).logits.float()
    if value == "probability":
        single = network.config.problem_type == "multi_label_classification" or logits.shape[1] == 1
        logits = logits.sigmoid() if single else logits.softmax(-1)
    found: list[float] = logits[:, column].tolist()
    return found
