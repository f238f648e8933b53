"""`recipe=detox`: a tiny sequence classifier, built here, is the reward of a run with LoRA and TracIn selection."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForSequenceClassification

from gradtrace import open_run
from gradtrace.config.loader import load_config
from gradtrace.errors import GradtraceError
from gradtrace.instruments.tracin import TracinReason
from gradtrace.tasks.rewards import named_reward
from gradtrace.training.run import train
from tests.tasks.byte_model import byte_tokenizer, save_byte_model


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two labels, by random weights: what matters is that the run gets these numbers."""
    folder = tmp_path_factory.mktemp("classifier")
    tokenizer = byte_tokenizer()
    torch.manual_seed(1)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.3,
        id2label={0: "kind", 1: "toxic"},
        label2id={"kind": 0, "toxic": 1},
    )
    Qwen2ForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def expected(folder: Path, text: str) -> torch.Tensor:
    model = Qwen2ForSequenceClassification.from_pretrained(folder).eval()
    ids = byte_tokenizer()(text, return_tensors="pt", truncation=True, max_length=64)
    with torch.no_grad():
        return model(**ids).logits[0]


@pytest.mark.parametrize("advantage", ["grpo", "gae"])
def test_a_run_learns_from_a_classifier_and_keeps_its_numbers(tmp_path: Path, classifier: Path, advantage: str) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"say {n}"}) + "\n" for n in range(24)))
    config = load_config(
        [
            "recipe=detox",
            f"model.path={save_byte_model(tmp_path / 'model')}",
            f"data.train=[{prompts}]",
            f"reward.options.model={classifier}",
            "reward.options.label=toxic",
            "reward.options.sign=-1",
            f"algorithm.advantage={advantage}",
            "data.train_batch_size=3",
            "rollout.n=3",
            "rollout.max_new_tokens=8",
            "trainer.total_steps=2",
            "trainer.tracin.val_batch_size=2",
            f"trainer.runs_dir={tmp_path / 'runs'}",
        ]
    )
    run = open_run(train(config).run_dir)
    step = run.step("tracin", 1)
    validation = step["reason"] == int(TracinReason.VALIDATION)
    # 2 candidates for each of 2 × 3 responses: half of the twelve, the three lowest and the three highest.
    assert validation.sum() == 6 and (step["advantage"][validation] > 0).sum() == 3
    assert step["kept"][~validation].sum() < (~validation).sum()
    tokens = step.tokens(0)["token_id"].tolist()
    text = byte_tokenizer().decode(tokens, skip_special_tokens=True)
    assert step["reward"][0] == pytest.approx(-float(expected(classifier, text)[1]), abs=1e-4)


def test_labels_values_and_batches(classifier: Path) -> None:
    texts = ["good", "a much longer response than the first one", ""]
    items = [{"prompt": "p: "}] * 3
    model = str(classifier)
    logits = named_reward("classifier", {"model": model, "label": "kind", "batch_size": 2})(texts, items)
    assert logits[0] == pytest.approx(float(expected(classifier, "good")[0]), abs=1e-4)
    assert logits[1] == pytest.approx(float(expected(classifier, texts[1])[0]), abs=1e-4)
    shares = [
        named_reward("classifier", {"model": model, "label": label, "value": "probability"})(texts, items)
        for label in ("0", "toxic")
    ]
    assert [sum(pair) for pair in zip(*shares, strict=True)] == pytest.approx([1, 1, 1])
    both = named_reward("classifier", {"model": model, "label": "kind", "with_prompt": True})(texts, items)
    assert both[0] == pytest.approx(float(expected(classifier, "p: good")[0]), abs=1e-4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "needs a sequence classifier"),
        ({"model": "CLASSIFIER"}, "choose one of 0: kind, 1: toxic"),
        ({"model": "CLASSIFIER", "label": "rude"}, "label=rude: choose one of"),
        ({"model": "CLASSIFIER", "label": "kind", "value": "odds"}, "Valid: logit, probability"),
        ({"model": "/nowhere/at/all", "label": "kind"}, "no such folder"),
        ({"model": "POLICY", "label": "0"}, "no trained classification head"),
    ],
)
def test_what_cannot_judge_says_why(tmp_path: Path, classifier: Path, options: dict, words: str) -> None:
    if options.get("model") == "CLASSIFIER":
        options = options | {"model": str(classifier)}
    if options.get("model") == "POLICY":
        options = options | {"model": str(save_byte_model(tmp_path / "policy"))}
    with pytest.raises(GradtraceError, match=words):
        named_reward("classifier", options)(["text"], [{"prompt": ""}])
