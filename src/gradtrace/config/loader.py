"""From a recipe and overrides to a checked `Config`, before anything heavy is loaded.

`load_config(["recipe=gsm8k", "model.path=…"])` composes with Hydra, merges into the typed schema and checks
types, choices, ranges and what only makes sense together. Every mistake is one sentence that names the key.
"""

from __future__ import annotations

import copy
import functools
from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gradtrace.config.keys import check_fields, check_key, closest, content_keys, schema_keys
from gradtrace.config.root import Config
from gradtrace.errors import GradtraceError
from gradtrace.instruments.registry import instruments

CONF = Path(__file__).parents[1] / "conf"
# Free-form dictionaries, checked by the registry that they belong to, and the keys that say whose options they are.
OPTION_DICTS = {
    "algorithm.advantage_options": "algorithm.advantage",
    "algorithm.policy_loss_options": "algorithm.policy_loss",
    "reward.options": "reward.name",
}
FREE = (*OPTION_DICTS, "reward.extra", "verl")


def recipes() -> list[str]:
    return sorted(path.stem for path in CONF.glob("*.yaml"))


def load_config(overrides: list[str]) -> Config:
    """The checked configuration of `recipe=… key=value …` (or of `resume=RUN`, whose config.yaml is the recipe)."""
    config = read_settings(overrides)
    if config.resume:
        refuse_code_of(config.resume, config, override_keys(overrides))
    return config


def read_settings(overrides: list[str]) -> Config:
    """`load_config` for a run whose code is not going to be executed: it may name any. Code that the words themselves
    or a recipe name registers losses and advantages before they are checked."""
    keys = override_keys(overrides)
    valid = set(schema_keys(Config))
    for key in keys:
        check_run_key(key, valid, f"override '{key}'")
    recipe_file = find_recipe(keys)
    check_file_keys(recipe_file, valid)
    recipe = (packaged_recipe if recipe_file.parent == CONF else compose)(recipe_file)
    config = finished(with_overrides(recipe, overrides), recipe, keys)
    if config.trainer.traces:  # what is said of one of them counts
        for one in instruments().values():
            if one.with_traces and f"trainer.{one.key}.enable" not in keys:
                getattr(config.trainer, one.key).enable = True
    if config.algorithm.path and (not config.resume or "algorithm.path" in keys):
        config.algorithm.import_own()
    check_fields(config)
    check_reward(config)
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
            raise GradtraceError(f"'{override}': {str(error).splitlines()[0]}. Quote special characters.") from None
        keys[key] = value
    return keys


def find_recipe(keys: dict[str, str]) -> Path:
    """The YAML file that `resume=` or `recipe=` names."""
    if resume := keys.get("resume"):
        saved = run_of(Path(resume)) / "config.yaml"
        if not saved.is_file():
            raise GradtraceError(f"resume={resume}: there is no {saved}. Give the folder of a run, e.g. runs/demo.")
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


def run_of(path: Path) -> Path:
    """The run of a checkpoint in RUN/checkpoints, or the path itself."""
    return path.parent.parent if path.absolute().parent.name == "checkpoints" else path


def refuse_code_of(run: str, config: Config, keys: dict[str, str]) -> None:
    """A run folder may come from somebody else: what its configuration would execute has to be asked for."""
    code = {
        "reward.path": (config.reward.path, "reward.name"),
        "algorithm.path": (config.algorithm.path, "algorithm.policy_loss"),
    }
    for key, (path, name) in code.items():
        if path and key not in keys:
            raise GradtraceError(
                f"The configuration in {run} names Python code to execute, {key}={path}. A run that you were given "
                f"could name anything: if you trust that file, add {key}={path} to the command; else another "
                f"{name}=… {key}=''."
            )


def check_run_key(key: str, valid: set[str], where: str) -> None:
    """A key of a run's configuration; what is inside of free-form dictionaries is not checked here."""
    if not any(key.startswith(f"{name}.") for name in FREE):
        check_key(key, sorted(valid), where, more=" `gradtrace train --cfg` lists every key.")


def check_file_keys(recipe: Path, valid: set[str]) -> None:
    try:
        content = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError, OSError) as error:
        raise GradtraceError(f"{recipe} is not valid YAML: {error}") from None
    if not isinstance(content, dict):
        raise GradtraceError(f"{recipe} holds no settings.")
    content.pop("defaults", None)

    for path in content_keys(content):
        check_run_key(path, valid, f"{recipe}, key '{path}'")


def compose(recipe: Path) -> DictConfig:
    """The recipe with Hydra's `defaults`, merged into the schema (which checks types)."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException

    try:
        # The package's recipes stay reachable from a user's file: `defaults: [gsm8k, _self_]`.
        with initialize_config_dir(str(recipe.resolve().parent), version_base="1.3"):
            composed = hydra_compose(recipe.stem, [f"hydra.searchpath=[file://{CONF}]"])
        return OmegaConf.merge(OmegaConf.structured(Config), composed)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        raise in_words(error) from None
    except HydraException as error:
        raise GradtraceError(f"{recipe.name}: {str(error.__cause__ or error).strip()}") from None
    except RecursionError:
        raise GradtraceError(
            f"{recipe}: its `defaults` lead back to itself. A recipe that builds on a packaged one needs a name of its "
            "own: rename the file."
        ) from None


packaged_recipe = functools.lru_cache(compose)
"""Those of the package do not change."""


def with_overrides(recipe: DictConfig, overrides: list[str]) -> DictConfig:
    """A copy of the recipe with the words of the command line in it, as Hydra reads them."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    config = copy.deepcopy(recipe)
    for word in OverridesParser.create().parse_overrides(overrides):
        if word.is_sweep_override():
            raise GradtraceError(
                f"'{word.input_line}': one value is needed; a list is written [a,b], a text with a comma 'a,b'."
            )
        key, value = word.key_or_group, word.value()
        try:
            # One word for a list of words: module_name_filter=mlp.
            single = isinstance(value, bool | int | float | str) and "${" not in str(value)
            if single and OmegaConf.is_list(OmegaConf.select(config, key)):
                value = [value]
            OmegaConf.update(config, key, value, merge=True, force_add=True)
        except OmegaConfBaseException as error:
            raise in_words(error, key) from None
    return config


def finished(composed: DictConfig, recipe: DictConfig, keys: dict[str, str]) -> Config:
    """The typed configuration, with its `${…}` resolved and their values checked as well."""
    try:
        drop_foreign_options(composed, recipe, keys)
        if "${" in OmegaConf.to_yaml(composed):
            plain = OmegaConf.to_container(composed, resolve=True)
            composed = OmegaConf.merge(OmegaConf.structured(Config), plain)  # type: ignore[assignment]
        return OmegaConf.to_object(composed)  # type: ignore[return-value]
    except (OmegaConfBaseException, RecursionError, ValueError, TypeError, AttributeError) as error:
        raise in_words(error) from None


def in_words(error: Exception, key: str = "") -> GradtraceError:
    """One line of OmegaConf's, with the key it is about."""
    first = (str(getattr(error, "msg", "") or error).strip().splitlines() or [type(error).__name__])[0]
    return GradtraceError(f"{getattr(error, 'full_key', '') or key}: {first}")


def drop_foreign_options(composed: DictConfig, recipe: DictConfig, keys: dict[str, str]) -> None:
    """A recipe's options of one loss must not reach the other loss that an override chose."""
    for options, choice in OPTION_DICTS.items():
        if OmegaConf.select(composed, choice) == OmegaConf.select(recipe, choice) or options in keys:
            continue
        given = {key.removeprefix(f"{options}.") for key in keys if key.startswith(f"{options}.")}
        kept = {k: v for k, v in OmegaConf.select(composed, options).items() if k in given}
        OmegaConf.update(composed, options, kept, merge=False, force_add=True)


def check_reward(config: Config) -> None:
    """A built-in reward and its options exist. One from the user's file is looked up when the file is loaded."""
    from gradtrace.tasks.rewards import named_reward

    reward = config.reward
    if reward.name == "task" and not reward.path and reward.options:
        raise GradtraceError(f"reward.options={reward.options}: the task's own reward has no options.")
    if reward.name != "task" and not reward.path:
        named_reward(reward.name, reward.options)
    if reward.extra and reward.name == "task" and not reward.path:
        raise GradtraceError("reward.extra adds to a reward by name or path, not to the task's own: set reward.name.")
    for name in reward.extra if not reward.path else ():
        named_reward(name)


def to_yaml(config: Config) -> str:
    return OmegaConf.to_yaml(OmegaConf.structured(config))
