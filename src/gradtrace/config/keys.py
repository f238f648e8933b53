"""Keys and values of a configuration against its schema, for every command that reads one."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar, get_type_hints

from gradtrace.errors import GradtraceError

T = TypeVar("T")

KNOWN_ELSEWHERE = {
    "adv_estimator": "algorithm.advantage",
    "kl_loss_coef": "algorithm.kl_coef",
    "entropy_coeff": "algorithm.entropy_coef",
    "ppo_epochs": "actor.epochs",
    "max_response_length": "rollout.max_new_tokens",
    "save_freq": "trainer.checkpoint.every",
    "test_freq": "trainer.validation.every",
    "learning_rate": "actor.optim.lr",
    "num_generations": "rollout.n",
    "max_completion_length": "rollout.max_new_tokens",
    "num_iterations": "actor.epochs",
    "beta": "algorithm.kl_coef",
    "loss_type": "algorithm.policy_loss",
    "save_steps": "trainer.checkpoint.every",
    "eval_steps": "trainer.validation.every",
    "output_dir": "trainer.runs_dir",
    "model_name_or_path": "model.path",
    "reward_funcs": "reward.path",
}
"""What verl and TRL call a key whose name here is too different to be found by likeness: theirs, ours."""


def schema_keys(cls: type, prefix: str = "") -> Iterator[str]:
    """Every dotted key of a schema, sections included."""
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        path = f"{prefix}{field.name}"
        yield path
        if dataclasses.is_dataclass(hints[field.name]):
            yield from schema_keys(hints[field.name], f"{path}.")


def content_keys(content: Mapping[str, Any], free: Sequence[str] = (), prefix: str = "") -> Iterator[str]:
    """Every dotted key of nested settings, but those inside of the sections `free`, whose keys are not ours."""
    for name, value in content.items():
        path = f"{prefix}{name}"
        yield path
        if isinstance(value, Mapping) and path not in free:
            yield from content_keys(value, free, f"{path}.")


def check_key(key: str, valid: Sequence[str], where: str, prefix: str = "", more: str = "") -> None:
    """An error that names the nearest valid key, written with `prefix`, if `key` is none of them."""
    if key not in valid:
        near = f"{prefix}{closest(key, valid)}"
        raise GradtraceError(f"{where}: there is no such key. Did you mean '{near}'?{more}")


def closest(word: str, valid: Sequence[str]) -> str:
    """The likeliest key: the last part counts as well, so that a right name in a wrong section is found."""
    known = KNOWN_ELSEWHERE.get(word.split(".")[-1], "")
    if known in valid:
        return known

    def similarity(candidate: str) -> float:
        whole = difflib.SequenceMatcher(None, word, candidate).ratio()
        last = difflib.SequenceMatcher(None, word.split(".")[-1], candidate.split(".")[-1]).ratio()
        return whole + last

    return max(sorted(valid), key=similarity)


def typed(schema: type[T], *parts: Any, prefix: str = "") -> T:
    """The settings in `parts`, each on top of the ones before it and all on the defaults of `schema`, checked."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        found: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), *parts))
    except OmegaConfBaseException as error:
        raise GradtraceError(f"{prefix}{error.full_key}: {str(error.msg or error).splitlines()[0]}") from None
    check_fields(found, prefix)
    return found


def check_fields(node: Any, prefix: str = "") -> None:
    """Choices and bounds from the fields' metadata, and what a class says of its fields together (`validate`).

    `prefix` is the path of the node, with a dot at its end, for messages.
    """
    for field in dataclasses.fields(node):
        value, path = getattr(node, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            check_fields(value, f"{path}.")
        choices = field.metadata.get("choices")
        if choices and value not in choices:
            raise GradtraceError(f"{path}={value} is not possible. Valid: {', '.join(choices)}.")
        minimum, maximum = field.metadata.get("minimum"), field.metadata.get("maximum")
        if value is None:
            continue
        if minimum is not None and not value >= minimum:
            raise GradtraceError(f"{path}={value} is too small: at least {minimum:g}.")
        if maximum is not None and not value <= maximum:
            raise GradtraceError(f"{path}={value} is too large: at most {maximum:g}.")
    if hasattr(node, "validate"):
        node.validate(prefix)
