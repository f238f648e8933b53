"""A wrong setting is one sentence that names the key, before anything is loaded."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import get_type_hints

import pytest
import yaml

from gradtrace.cli import main
from gradtrace.config.keys import KNOWN_ELSEWHERE, schema_keys
from gradtrace.config.loader import load_config, recipes, to_yaml
from gradtrace.config.root import Config
from gradtrace.errors import GradtraceError


def error(*overrides: str) -> str:
    with pytest.raises(GradtraceError) as caught:
        load_config(list(overrides))
    return str(caught.value)


def test_no_arguments_are_the_demo() -> None:
    config = load_config([])
    assert config.recipe == "demo"
    assert config.task.name == "arithmetic"
    trace = config.trainer.influence_trace
    assert trace.enable and trace.is_parts
    assert (trace.hessian_mode, trace.credit, trace.about) == ("optimizer", "loss_term", "output_function")


def test_overrides_win_over_the_recipe_and_keep_their_types() -> None:
    config = load_config(["trainer.total_steps=7", "actor.optim.lr=1e-5", "trainer.logger=[tensorboard]"])
    assert config.trainer.total_steps == 7
    assert config.actor.optim.lr == 1e-5
    assert config.trainer.logger == ["tensorboard"]


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("model.pth=x", "model.path"),
        ("trainer.influence_trace.hesian_mode=inverse", "trainer.influence_trace.hessian_mode"),
        ("reg_lambda=1", "trainer.influence_trace.reg_lambda"),
        ("actor.lr=1", "actor.optim.lr"),
        ("trainer.total_step=5", "trainer.total_steps"),
        ("algorithm.adv_estimator=grpo", "algorithm.advantage"),  # as verl calls it
        ("trainer.save_freq=5", "trainer.checkpoint.every"),
        ("learning_rate=1e-5", "actor.optim.lr"),  # as TRL does
        ("beta=0.1", "algorithm.kl_coef"),
    ],
)
def test_unknown_key_names_the_nearest_valid_key_with_its_path(override: str, nearest: str) -> None:
    assert f"'{nearest}'" in error(override)


def test_names_of_verl_and_trl_lead_to_keys_that_exist() -> None:
    assert set(KNOWN_ELSEWHERE.values()) <= set(schema_keys(Config))


def test_unknown_key_in_a_recipe_file_is_found_too(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("rollout: {nn: 4}\n")
    message = error(f"recipe={recipe}")
    assert "mine.yaml" in message and "'rollout.n'" in message


def test_own_recipe_with_the_name_of_the_one_it_builds_on_is_an_error(tmp_path: Path) -> None:
    recipe = tmp_path / "demo.yaml"
    recipe.write_text("defaults: [demo, _self_]\nrollout: {n: 5}\n")
    message = error(f"recipe={recipe}")
    assert str(recipe) in message and "rename" in message


def test_own_recipe_can_build_on_a_packaged_one(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("defaults: [demo, _self_]\nrollout: {n: 5}\n")
    config = load_config([f"recipe={recipe}", "actor.epochs=2"])
    assert config.rollout.n == 5 and config.actor.epochs == 2
    assert config.actor.optim.lr == load_config([]).actor.optim.lr


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["trainer.total_steps=abc"], ["trainer.total_steps", "abc"]),
        (["trainer.total_steps=0"], ["trainer.total_steps=0", "at least 1"]),
        (["rollout.top_p=1.5"], ["rollout.top_p", "at most 1"]),
        (["actor.optim.schedule=cosin"], ["actor.optim.schedule", "cosine"]),
        (["rollout.n=1"], ["rollout.n=1", "grpo", "n ≥ 2"]),
        (["recipe=dmo"], ["'demo'"]),
        (["recipe=/no/such.yaml"], ["/no/such.yaml"]),
        (["algorithm.policy_loss_options.clip_hihg=0.3"], ["clip_high"]),
        (["algorithm.policy_loss=pppo"], ["ppo"]),
        (["trainer.logger=[wandbb]"], ["wandbb", "wandb"]),
        (["task.name=dataset"], ["data.train"]),
        (["task.name=dataset", "data.train=[x.jsonl]"], ["model.path"]),
        (["model.path=/no/such/model"], ["model.path", "/no/such/model"]),
        (["actor.mini_batch_size=64"], ["actor.mini_batch_size", "data.train_batch_size"]),
        (["trainer.validation.pass_k=[8]"], ["pass@8"]),
        (["actor.optim.betas=[0.9]"], ["actor.optim.betas"]),
        (["rollout.temperature=0"], ["rollout.temperature"]),
        (["algorithm.overlong.enable=true"], ["algorithm.overlong.buffer"]),
        (["resume=/no/such/run"], ["resume", "config.yaml"]),
        (["total_steps"], ["key=value"]),
        (["rollout.n=[1"], ["rollout.n"]),
    ],
)
def test_mistakes_are_named(overrides: list[str], words: list[str]) -> None:
    message = error(*overrides)
    for word in words:
        assert word in message


def test_estimators_without_siblings_accept_one_response() -> None:
    assert (
        load_config(
            ["rollout.n=1", "trainer.influence_trace.enable=false", "algorithm.advantage=reinforce_plus_plus"]
        ).rollout.n
        == 1
    )


def test_recipe_options_of_one_loss_do_not_reach_another() -> None:
    config = load_config(["algorithm.policy_loss=cispo", "algorithm.policy_loss_options.clip_high=0.5"])
    assert config.algorithm.policy_loss_options["clip_high"] == 0.5
    assert "dual_clip" not in config.algorithm.policy_loss_options


def test_resolved_config_shows_the_options_that_hold() -> None:
    options = load_config([]).algorithm.policy_loss_options
    assert options["clip_high"] == 0.28 and "dual_clip" in options


def test_saved_config_is_a_recipe_that_gives_the_same_config(tmp_path: Path) -> None:
    config = load_config(["rollout.n=4", "algorithm.policy_loss=gspo"])
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    resumed = load_config([f"resume={tmp_path}"])
    assert dataclasses.replace(resumed, resume="") == config


@pytest.mark.parametrize("recipe", recipes())
def test_every_recipe_is_valid(recipe: str, tmp_path: Path) -> None:
    needed = [] if recipe == "demo" else [f"model.path={tmp_path}"]
    assert load_config([f"recipe={recipe}", *needed]).recipe == recipe


def test_cfg_prints_the_resolved_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--cfg", "rollout.n=4"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["rollout"]["n"] == 4 and printed["trainer"]["influence_trace"]["hessian_mode"] == "optimizer"


def sections(schema: type) -> Iterator[type]:
    """The dataclass and those of its sections."""
    yield schema
    for hint in get_type_hints(schema).values():
        if dataclasses.is_dataclass(hint):
            yield from sections(hint)  # type: ignore[arg-type]


@pytest.mark.parametrize("section", sorted(set(sections(Config)), key=lambda section: section.__name__))
def test_every_setting_is_documented(section: type) -> None:
    """A docstring stands under each field that is not a section."""
    for owner in [kind for kind in section.__mro__ if dataclasses.is_dataclass(kind)]:
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        hints = get_type_hints(owner)
        for line, following in zip(node.body, [*node.body[1:], None], strict=True):
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                name = line.target.id
                documented = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
                assert documented or dataclasses.is_dataclass(hints[name]), f"{owner.__name__}.{name}"


def test_influence_knobs_have_the_promised_names() -> None:
    promised = (
        "enable hessian_mode output_function accepted_rejected_scope contrastive_agg hessian_source module_name_filter"
        " max_modules projection_dim_factor max_proj_vector_sum max_hessian_dim max_tokens_per_response"
        " grad_offload_to_cpu force_gpu_compute profile_timing max_prompts_per_step reg_lambda exclude_self_response"
        " credit write_every fsync"
    )
    keys = set(schema_keys(Config))
    assert {f"trainer.influence_trace.{name}" for name in promised.split()} <= keys
