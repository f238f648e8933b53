"""What the TRL integration refuses, it refuses by name, before anything starts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from torch import nn
from trl import GRPOTrainer

from gradtrace.attribution import InfluenceConfig
from gradtrace.errors import GradtraceError
from gradtrace.instruments.tracin import TracinConfig
from gradtrace.integrations.trl import TracedGRPOTrainer, attach
from tests.integrations.trl_runs import grpo_trainer

VALIDATION = {"eval_dataset": Dataset.from_dict({"prompt": ["5+5="]})}


def a_tool(text: str) -> str:
    return text


# Set on a trainer that is whole: making a real one of each kind needs several GPUs or processes, or a model that sees
# images. (of the trainer | of its args, name, value, what the message names)
UNTRACEABLE = [
    ("trainer", "is_deepspeed_enabled", True, "DeepSpeed"),
    ("trainer", "is_fsdp_enabled", True, "FSDP"),
    ("trainer", "_is_vlm", True, "images"),
    ("trainer", "loss_type", "of_next_year", "loss_type='of_next_year'"),
    ("args", "fp16", True, "fp16"),
    ("args", "torch_compile", True, r"torch\.compile"),
    ("args", "_n_gpu", 2, r"2 GPUs in one process \(DataParallel\)"),
]


@pytest.mark.parametrize(("where", "name", "value", "message"), UNTRACEABLE, ids=[case[1] for case in UNTRACEABLE])
def test_what_cannot_be_traced_is_refused_by_name(
    where: str, name: str, value: Any, message: str, tmp_path: Path
) -> None:
    trainer = grpo_trainer(tmp_path)
    setattr(trainer if where == "trainer" else trainer.args, name, value)
    with pytest.raises(GradtraceError, match=f"cannot trace this GRPOTrainer: it uses {message}"):
        attach(trainer, tmp_path / "run")
    assert type(trainer) is GRPOTrainer and not (tmp_path / "run").exists()


def test_selection_with_tools_is_refused_with_what_works(tmp_path: Path) -> None:
    trainer = grpo_trainer(tmp_path, more=VALIDATION)
    trainer.tools = [a_tool]
    attach(trainer, tmp_path / "run", selection=TracinConfig())
    with pytest.raises(GradtraceError, match=r"leave `selection` out .* the traces work with them"):
        trainer.train()


def test_another_kind_of_trainer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GradtraceError, match="needs TRL's GRPOTrainer or a subclass, not Linear"):
        attach(nn.Linear(1, 1), tmp_path / "run")  # type: ignore[arg-type]


def test_attaching_twice_is_refused(tmp_path: Path) -> None:
    trainer = grpo_trainer(tmp_path)
    attach(trainer, tmp_path / "run")
    with pytest.raises(GradtraceError, match="traced already"):
        attach(trainer, tmp_path / "other")


def test_a_traced_trainer_without_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GradtraceError, match="needs run_dir"):
        grpo_trainer(tmp_path, cls=TracedGRPOTrainer)


def test_without_trl_the_import_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("gradtrace.integrations.trl")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "trl", None)  # as if it were not installed
    with pytest.raises(GradtraceError, match=r"pip install .*\[trl\]'"):
        import gradtrace.integrations.trl  # noqa: F401


# These depend on what exists when training begins.
AT_THE_START = {
    "no_validation_prompts": ({"selection": TracinConfig()}, {}, "give GRPOTrainer one eval_dataset"),
    "several_validation_sets": (
        {"selection": TracinConfig()},
        {"more": {"eval_dataset": {"a": VALIDATION["eval_dataset"]}}},
        "give GRPOTrainer one eval_dataset",
    ),
    "files_instead_of_prompts": (
        {"selection": TracinConfig(val_files=["validation.parquet"])},
        {"more": VALIDATION},
        "val_files is not read here",
    ),
    "trusted_completions_beyond_the_rollout": (
        {"selection": TracinConfig(train_on_validation=True)},
        {"more": VALIDATION},
        "train_on_validation=True cannot run in TRL: GRPOTrainer splits a rollout of fixed size",
    ),
    "a_method_that_does_not_exist": (
        {"selection": TracinConfig(method="by_hand")},
        {"more": VALIDATION},
        "selection: method is 'by_hand'",
    ),
    "modules_of_the_trace_that_do_not_exist": (
        {"influence": InfluenceConfig.older(module_name_filter=["no_such_module"])},
        {},
        "influence trace: .*no_such_module",
    ),
    "adam_weights_without_adam": (
        {"selection": TracinConfig(preconditioner="adam")},
        {"more": VALIDATION, "optim": "sgd"},
        "needs Adam's moments, the optimizer is SGD",
    ),
}


@pytest.mark.parametrize("case", AT_THE_START)
def test_settings_that_contradict_the_trainer_are_refused_when_training_begins(case: str, tmp_path: Path) -> None:
    settings, options, message = AT_THE_START[case]
    trainer = grpo_trainer(tmp_path, **{"max_steps": 1, **options})
    attach(trainer, tmp_path / "run", **{"influence": None, **settings})
    with pytest.raises(GradtraceError, match=message):
        trainer.train()
