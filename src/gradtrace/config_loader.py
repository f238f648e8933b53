"""From a recipe and overrides to a checked `Config`, before anything heavy is loaded.

`load_config(["recipe=gsm8k", "model.path=…"])` composes with Hydra, merges into the typed schema and checks
types, choices, ranges and what only makes sense together. Every mistake is one sentence that names the key.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gradtrace.attribution.errors import AttributionError
from gradtrace.config import ClusterConfig, Config
from gradtrace.errors import GradtraceError

CONF = Path(__file__).parent / "conf"
# Free-form dictionaries, checked by the registry that they belong to, and the keys that say whose options they are.
OPTION_DICTS = {
    "algorithm.advantage_options": "algorithm.advantage",
    "algorithm.policy_loss_options": "algorithm.policy_loss",
    "reward.options": "reward.name",
}


def recipes() -> list[str]:
    return sorted(path.stem for path in CONF.glob("*.yaml"))


def load_config(overrides: list[str]) -> Config:
    """The checked configuration of `recipe=… key=value …` (or of `resume=RUN`, whose config.yaml is the recipe)."""
    keys = override_keys(overrides)
    valid = set(schema_keys())
    for key in keys:
        check_key(key, valid, f"override '{key}'")
    recipe_file = find_recipe(keys)
    check_file_keys(recipe_file, valid)
    composed = compose(recipe_file, overrides)
    drop_foreign_options(composed, compose(recipe_file, []), keys)
    config: Config = OmegaConf.to_object(composed)  # type: ignore[assignment]
    if config.trainer.traces:
        config.trainer.entropy_trace.enable = config.trainer.influence_trace.enable = True
    check_fields(config)
    try:
        config.trainer.influence_trace.check()
    except AttributionError as error:
        raise GradtraceError(f"trainer.influence_trace: {error}.") from None
    check_together(config)
    return config


def override_keys(overrides: list[str]) -> dict[str, str]:
    """{key: raw value} of `key=value` words. Hydra's `+` and `~` are refused: every valid key exists already."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    keys = {}
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key or key[0] in "+~":
            raise GradtraceError(
                f"'{override}' is not an override. Write key=value, e.g. trainer.total_steps=100; "
                "`gradtrace train --cfg` lists every key."
            )
        try:
            parser.parse_override(override)
        except HydraException as error:
            raise GradtraceError(
                f"'{override}': {str(error).splitlines()[0]}. Quote special characters."
            ) from None
        keys[key] = value
    return keys


def find_recipe(keys: dict[str, str]) -> Path:
    """The YAML file that `resume=` or `recipe=` names."""
    if resume := keys.get("resume"):
        saved = Path(resume) / "config.yaml"
        if not saved.is_file():
            raise GradtraceError(
                f"resume={resume}: there is no {saved}. Give the folder of a run, e.g. runs/demo."
            )
        return saved
    recipe = keys.get("recipe", "demo")
    if recipe.endswith((".yaml", ".yml")):
        if not Path(recipe).is_file():
            raise GradtraceError(f"recipe={recipe}: there is no such file.")
        return Path(recipe)
    if recipe not in recipes():
        raise GradtraceError(
            f"There is no recipe '{recipe}'; did you mean '{closest(recipe, recipes())}'? "
            f"Valid: {', '.join(recipes())}, or the path of a YAML file."
        )
    return CONF / f"{recipe}.yaml"


def schema_keys(cls: type = Config, prefix: str = "") -> Iterator[str]:
    """Every dotted key of the schema, sections included."""
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        path = f"{prefix}{field.name}"
        yield path
        if dataclasses.is_dataclass(hints[field.name]):
            yield from schema_keys(hints[field.name], f"{path}.")


def check_key(key: str, valid: set[str], where: str) -> None:
    inside_options = any(key.startswith(f"{name}.") for name in (*OPTION_DICTS, "reward.extra", "verl"))
    if key not in valid and not inside_options:
        raise GradtraceError(
            f"{where}: there is no such key. Did you mean '{closest(key, sorted(valid))}'? "
            "`gradtrace train --cfg` lists every key."
        )


def closest(word: str, valid: list[str]) -> str:
    """The likeliest key: the last part counts as well, so that a right name in a wrong section is found."""

    def similarity(candidate: str) -> float:
        whole = difflib.SequenceMatcher(None, word, candidate).ratio()
        last = difflib.SequenceMatcher(None, word.split(".")[-1], candidate.split(".")[-1]).ratio()
        return whole + last

    return max(valid, key=similarity)


def check_file_keys(recipe: Path, valid: set[str]) -> None:
    try:
        content = yaml.safe_load(recipe.read_text())
    except yaml.YAMLError as error:
        raise GradtraceError(f"{recipe} is not valid YAML: {error}") from None
    if not isinstance(content, dict):
        raise GradtraceError(f"{recipe} holds no settings.")
    content.pop("defaults", None)

    def walk(node: dict[str, Any], prefix: str) -> None:
        for name, value in node.items():
            path = f"{prefix}{name}"
            check_key(path, valid, f"{recipe}, key '{path}'")
            if isinstance(value, dict):
                walk(value, f"{path}.")

    walk(content, "")


def compose(recipe: Path, overrides: list[str]) -> DictConfig:
    """The recipe with Hydra's `defaults` and the overrides applied, merged into the schema (which checks types)."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException

    # `++` because a recipe need not name every key; keys were checked against the schema already.
    # The package's recipes stay reachable from a user's file: `defaults: [gsm8k, _self_]`.
    words = [f"++{override}" for override in overrides] + [f"hydra.searchpath=[file://{CONF}]"]
    try:
        with initialize_config_dir(str(recipe.resolve().parent), version_base="1.3"):
            composed = hydra_compose(recipe.stem, words)
        return OmegaConf.merge(OmegaConf.structured(Config), composed)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        raise GradtraceError(f"{error.full_key}: {str(error.msg or error).splitlines()[0]}") from None
    except HydraException as error:
        raise GradtraceError(f"{recipe.name}: {str(error.__cause__ or error).strip()}") from None
    except RecursionError:
        raise GradtraceError(
            f"{recipe}: its `defaults` lead back to itself. A recipe that builds on a packaged one needs a name of its "
            "own: rename the file."
        ) from None


def drop_foreign_options(composed: DictConfig, recipe: DictConfig, keys: dict[str, str]) -> None:
    """A recipe's options of one loss must not reach the other loss that an override chose."""
    for options, choice in OPTION_DICTS.items():
        if OmegaConf.select(composed, choice) == OmegaConf.select(recipe, choice) or options in keys:
            continue
        given = {key.removeprefix(f"{options}.") for key in keys if key.startswith(f"{options}.")}
        kept = {k: v for k, v in OmegaConf.select(composed, options).items() if k in given}
        OmegaConf.update(composed, options, kept, merge=False, force_add=True)


def check_fields(node: Any, prefix: str = "") -> None:
    """Choices and bounds, from the fields' metadata."""
    for field in dataclasses.fields(node):
        value, path = getattr(node, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            check_fields(value, f"{path}.")
        choices = field.metadata.get("choices")
        if choices and value not in choices:
            raise GradtraceError(f"{path}={value} is not possible. Valid: {', '.join(choices)}.")
        minimum, maximum = field.metadata.get("minimum"), field.metadata.get("maximum")
        if minimum is not None and not value >= minimum:
            raise GradtraceError(f"{path}={value} is too small: at least {minimum:g}.")
        if maximum is not None and not value <= maximum:
            raise GradtraceError(f"{path}={value} is too large: at most {maximum:g}.")


def check_together(config: Config) -> None:
    """What is wrong only in combination."""
    if config.engine != "verl" and (config.verl or config.cluster != ClusterConfig()):
        raise GradtraceError("cluster.… and verl.… are settings of engine=verl; add it, or leave them out.")
    check_algorithm(config)
    check_reward(config)
    if len(config.actor.optim.betas) != 2 or not all(0 <= beta < 1 for beta in config.actor.optim.betas):
        raise GradtraceError(
            f"actor.optim.betas={config.actor.optim.betas}: two numbers in [0, 1) are needed."
        )
    if config.task.name == "dataset":
        if not config.data.train:
            raise GradtraceError("task.name=dataset needs files with prompts: data.train=[train.jsonl].")
        if not config.model.path:
            raise GradtraceError("task.name=dataset needs a model: model.path=FOLDER or a hub name.")
    for key, path in (
        ("model.path", config.model.path),
        ("reference.path", config.reference.path),
        ("critic.path", config.critic.path),
    ):
        if path and looks_local(path) and not Path(path).is_dir():
            raise GradtraceError(
                f"{key}={path}: there is no such folder ({Path(path).absolute()}). Give a model's folder, or a hub "
                "name like Qwen/Qwen2.5-0.5B-Instruct; scripts/get_smollm2 makes models/SmolLM2-135M-Instruct."
            )
    if config.actor.mini_batch_size > config.data.train_batch_size:
        raise GradtraceError(
            f"actor.mini_batch_size={config.actor.mini_batch_size} is more than "
            f"data.train_batch_size={config.data.train_batch_size}: a mini-batch is a part of the batch."
        )
    if config.actor.share_prompts and config.trainer.influence_trace.enable:
        raise GradtraceError(
            "actor.share_prompts=true computes a prompt once for all its responses, so that the prompt's part of one "
            "response's gradient cannot be told apart: turn it or trainer.influence_trace.enable off."
        )
    own_packing = config.actor.packing == "always" and not config.model.attention.startswith("flash")
    if config.model.gradient_checkpointing and (own_packing or config.actor.share_prompts):
        raise GradtraceError(
            "model.gradient_checkpointing=true runs the model again inside the backward pass, where our attention for "
            "packed rows is not in force: set actor.packing=never and actor.share_prompts=false, or use flash."
        )
    tracin = config.trainer.tracin
    if tracin.enable and (tracin.val_n or config.rollout.n) < 2:
        raise GradtraceError(
            "trainer.tracin needs at least 2 responses per validation prompt, whose rewards it compares: set "
            "trainer.tracin.val_n=8."
        )
    if tracin.enable and tracin.method == "ghost" and tracin.parameters == "all":
        raise GradtraceError(
            "trainer.tracin.method=ghost sees linear layers only: set trainer.tracin.parameters=linear or "
            "trainer.tracin.method=tangent."
        )
    validation = config.trainer.validation
    if too_many := [k for k in validation.pass_k if k > validation.n or k < 1]:
        raise GradtraceError(
            f"trainer.validation.pass_k={validation.pass_k}: pass@{too_many[0]} cannot be estimated from "
            f"trainer.validation.n={validation.n} responses."
        )
    overlong = config.algorithm.overlong
    if overlong.enable and overlong.buffer > config.rollout.max_new_tokens:
        raise GradtraceError(
            f"algorithm.overlong.buffer={overlong.buffer} is more than "
            f"rollout.max_new_tokens={config.rollout.max_new_tokens}: even an empty response would be penalised."
        )
    if config.rollout.temperature == 0:
        raise GradtraceError(
            "rollout.temperature=0 samples the same response n times: nothing to learn from. Use 1."
        )
    known = {"wandb", "tensorboard", "trackio"}
    if unknown := set(config.trainer.logger) - known:
        raise GradtraceError(
            f"trainer.logger: there is no tracker '{min(unknown)}'. Valid: {', '.join(sorted(known))}."
        )


def looks_local(path: str) -> bool:
    """Not of the form `name` or `owner/name`, which may be on the hub."""
    return path.startswith((".", "/", "~", "models/", "runs/")) or path.count("/") > 1


def check_algorithm(config: Config) -> None:
    """Names and options exist, and the estimator accepts groups of `rollout.n`: it is asked with a dry run."""
    import torch

    from gradtrace.algorithms import AdvantageInputs, advantage, policy_loss

    algorithm = config.algorithm
    estimator = advantage(algorithm.advantage, **algorithm.advantage_options)
    loss = policy_loss(algorithm.policy_loss, **algorithm.policy_loss_options)
    n = config.rollout.n
    mask = torch.ones(2 * n, 1, dtype=torch.bool)
    columns = {name: torch.zeros(2 * n, 1) for name in estimator.needs}
    rewards = torch.arange(2 * n, dtype=torch.float32)
    try:
        estimator(AdvantageInputs(rewards, torch.arange(2).repeat_interleave(n), mask, **columns))
    except GradtraceError as error:
        raise GradtraceError(f"rollout.n={n}, algorithm.advantage={algorithm.advantage}: {error}") from None
    # Show the options that hold, defaults included, in --cfg and in the run's config.yaml.
    algorithm.advantage_options = dict(estimator.options)
    algorithm.policy_loss_options = dict(loss.options)


def check_reward(config: Config) -> None:
    """A built-in reward and its options exist. One from the user's file is looked up when the file is loaded."""
    from gradtrace.tasks.rewards import named_reward

    reward = config.reward
    if reward.name == "task" and not reward.path and reward.options:
        raise GradtraceError(f"reward.options={reward.options}: the task's own reward has no options.")
    if reward.name != "task" and not reward.path:
        named_reward(reward.name, reward.options)
    if reward.extra and reward.name == "task" and not reward.path:
        raise GradtraceError(
            "reward.extra adds to a reward by name or path, not to the task's own: set reward.name."
        )
    for name in reward.extra if not reward.path else ():
        named_reward(name)


def to_yaml(config: Config) -> str:
    return OmegaConf.to_yaml(OmegaConf.structured(config))
