"""Every recipe composes, says what its paper says, and makes a real step with a model of a few kilobytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gradtrace import open_run
from gradtrace.config.loader import load_config, recipes
from gradtrace.config.root import Config
from gradtrace.tasks.prepare.prepare import Request, prepare
from gradtrace.tasks.prepare.recipes import PREPARATIONS
from gradtrace.training.run import train
from tests.tasks.byte_model import save_byte_model

ON_DATA = [name for name in recipes() if name not in ("demo", "calculator", "detox")]
"""Judge answers; detox, which a classifier judges, has a test of its own in e2e/."""
READY = [name for name in ON_DATA if name not in ("gsm8k", "code")]
"""Start as they are: model and prepared data are named. The other two are given them."""
REWARD = """
def length(response, item):
    return len(response) + (item["answer"] is None)
"""


def compose(recipe: str, tmp_path: Path, *more: str) -> Config:
    return load_config([f"recipe={recipe}", f"model.path={tmp_path}", *more])


@pytest.mark.parametrize("recipe", recipes())
def test_one_flag_turns_both_traces_on(recipe: str, tmp_path: Path) -> None:
    trainer = compose(recipe, tmp_path, "trainer.traces=true").trainer
    assert trainer.entropy_trace.enable and trainer.influence_trace.enable
    if recipe in ON_DATA and not recipe.startswith("smollm2"):
        off = compose(recipe, tmp_path).trainer
        assert not off.entropy_trace.enable and not off.influence_trace.enable


@pytest.mark.parametrize("recipe", READY)
def test_recipe_names_data_that_prepare_writes_and_the_reward_for_it(recipe: str, tmp_path: Path) -> None:
    config = compose(recipe, tmp_path)
    (train_file,), (validation_file,) = config.data.train, config.data.validation
    folder = Path(train_file).parent
    assert (Path(train_file).name, Path(validation_file).name) == ("train.parquet", "validation.parquet")
    assert folder == Path(validation_file).parent and folder.parent == Path("data")
    name = folder.name.removesuffix("_easy")
    assert config.reward.name.removesuffix("_plain").removesuffix("_calculation") == PREPARATIONS[name].reward
    assert config.data.instruction == ""  # prepared prompts have theirs


# The turns of calculator are the embedded loop's; integrations/verl/test_translate.py has its refusal.
@pytest.mark.parametrize("recipe", [name for name in recipes() if name != "calculator"])
def test_recipe_can_be_carried_over_to_verl(recipe: str, tmp_path: Path) -> None:
    pytest.importorskip("verl", reason="verl is not installed")
    from gradtrace.integrations.verl.launch.translate import translate

    config = compose(recipe, tmp_path, "engine=verl", "trainer.traces=true")
    assert translate(config, tmp_path / "run", "model", on_cpu=False)


def test_archer_is_archer(tmp_path: Path) -> None:
    for recipe in (name for name in recipes() if name.startswith("archer")):
        config = compose(recipe, tmp_path)
        assert config.data.train_batch_size == 64 and config.rollout.n == 16 and config.actor.epochs == 3
        assert config.actor.optim.lr == 1e-6 and config.algorithm.policy_loss == "archer"
        options = config.algorithm.policy_loss_options
        assert (options["clip_low_entropy"], options["clip_high_entropy"]) == (0.2, 0.4)
        assert (options["kl_low_entropy"], options["kl_high_entropy"]) == (0.001, 0.0)
    assert load_config(["recipe=archer_math"]).model.path == "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"


def test_dapo_is_dapo() -> None:
    config = load_config(["recipe=dapo_math"])
    assert config.algorithm.dynamic_sampling.enable and config.algorithm.overlong.enable
    assert config.algorithm.policy_loss_options["clip_high"] == 0.28
    assert config.algorithm.aggregation == "token_mean" and config.algorithm.kl_coef == 0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_byte_model(tmp_path_factory.mktemp("model"))


def write_data(recipe: str, folder: Path) -> list[str]:
    """Real rows of the recipe's data set, a handful, as overrides."""
    config = compose(recipe, folder)
    if recipe not in READY:
        row: dict[str, Any] = {"gsm8k": {"question": "1+1?", "answer": "#### 2"}}.get(
            recipe, {"prompt": "Write f.", "code": "def f(): pass", "test_list": ["assert f() is None"]}
        )
        (folder / "raw.jsonl").write_text(json.dumps(row) + "\n")
        return [f"data.train=[{folder / 'raw.jsonl'}]", "data.validation_fraction=0"]
    name = Path(config.data.train[0]).parent.name.removesuffix("_easy")
    rows: dict[str, list[dict[str, Any]]] = {
        "gsm8k": [{"question": f"{i}+1?", "answer": f"<<1>> #### {i + 1}"} for i in range(6)],
        "dapo_math": [{"prompt": f"{i}+1?", "answer": str(i + 1)} for i in range(6)],
        "mbpp": [{"prompt": f"Write f{i}.", "test_list": [f"assert f{i}() == {i}"]} for i in range(6)],
        "countdown": [{"nums": [i + 1, i + 2], "target": 2 * i + 3} for i in range(6)],
    }
    source = folder / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
    prepare(Request(name, folder / "data", str(source), validation=2))
    return [
        f"data.train=[{folder / 'data/train.parquet'}]",
        f"data.validation=[{folder / 'data/validation.parquet'}]",
    ]


@pytest.mark.parametrize("recipe", ON_DATA)
def test_recipe_makes_a_real_step_with_traces(recipe: str, model: Path, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    smaller = [
        f"recipe={recipe}",
        f"model.path={model}",
        *write_data(recipe, tmp_path),
        # A random model answers nothing right; its groups must be mixed for there to be something to trace.
        f"reward.path={tmp_path / 'reward.py'}:length",
        "reward.name=task",
        "data.train_batch_size=2",
        "data.max_prompt_length=2048",  # bytes are many tokens
        "rollout.n=3",
        "rollout.max_new_tokens=12",
        "algorithm.overlong.buffer=4",
        "actor.mini_batch_size=1",
        "actor.optim.warmup_steps=0",
        "trainer.total_steps=1",
        "trainer.validation.prompts=2",
        "trainer.validation.every=1",
        "trainer.traces=true",
        f"trainer.runs_dir={tmp_path / 'runs'}",
        "trainer.cpu_threads=1",
    ]
    outcome = train(load_config(smaller))
    assert outcome.finished
    run = open_run(outcome.run_dir)
    records, _ = run.metrics()
    assert records[-1]["actor/grad_norm"] > 0
    assert {"entropy_trace", "influence_trace"} <= {path.name for path in outcome.run_dir.iterdir()}
    assert records[-1]["influence_trace/rows_emitted"] > 0
