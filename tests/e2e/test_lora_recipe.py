"""A LoRA run of a chat recipe, from prepared data to an evaluation of its adapters, with a model of a few kilobytes."""

from __future__ import annotations

from pathlib import Path

from gradtrace import open_run
from gradtrace.commands.eval.evaluation import Settings, evaluate, load_prompts
from gradtrace.config.loader import load_config
from gradtrace.tasks.prepare.prepare import Request, prepare
from gradtrace.tasks.rewards import RewardFunction, named_reward
from gradtrace.training.run import train
from tests.tasks.byte_model import save_byte_model

REWARD = """
def longer(response, item):
    return float(len(response))
"""


def test_lora_step_is_traced_saved_and_evaluated(tmp_path: Path) -> None:
    data, model = tmp_path / "data", save_byte_model(tmp_path / "model")
    prepare(Request("countdown", data, numbers=(2,), count=12, largest=9, validation=2, shots=1, instruction=""))
    (tmp_path / "reward.py").write_text(REWARD)
    config = load_config(
        [
            "recipe=smollm2_countdown",
            f"model.path={model}",
            "model.lora.rank=4",
            f"data.train=[{data / 'train.parquet'}]",
            f"data.validation=[{data / 'validation.parquet'}]",
            # right answers are too rare for two groups of two; this reward differs within every group
            f"reward.path={tmp_path / 'reward.py'}:longer",
            "reward.name=task",
            "data.train_batch_size=2",
            "rollout.n=2",
            "rollout.max_new_tokens=12",
            "trainer.total_steps=1",
            f"trainer.runs_dir={tmp_path / 'runs'}",
        ]
    )
    outcome = train(config)
    run = open_run(outcome.run_dir)
    assert run.metrics()[0][-1]["influence_trace/rows_emitted"] > 0
    assert run.steps("entropy_trace") == run.steps("influence_trace") == [1]

    adapters = outcome.run_dir / "checkpoints" / "step_000001" / "policy"
    assert (adapters / "adapter_config.json").is_file()
    greedy = Settings("countdown", n=1, temperature=0.0, max_new_tokens=6)
    reward: RewardFunction = named_reward("countdown")
    texts = []
    for path in (outcome.run_dir, adapters.parent):  # merged weights, and adapters on their base
        loaded = open_run(path, ["model.attention=auto"])
        prompts = load_prompts("countdown", str(data / "validation.parquet"), loaded.tokenizer)
        assert loaded.tokenizer.decode(prompts[0].ids).startswith("<|user|>")
        texts.append([line["response"] for line in evaluate(loaded, prompts, reward, greedy).responses])
    assert texts[0] == texts[1]
