"""Read config.yaml of a run that may come from elsewhere."""

from __future__ import annotations

from typing import Any

import yaml

from gradtrace.trace.atomic import DamagedError


class _PlainLoader(yaml.SafeLoader):
    """A YAML loader without aliases: ten lines of them grow to gigabytes as soon as they are written out as JSON."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are refused")
        return super().compose_node(parent, index)


def load_config(data: bytes) -> dict[str, Any]:
    """Plain dictionaries, lists, strings and numbers; empty for an empty file."""
    try:
        loaded = yaml.load(data, Loader=_PlainLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise DamagedError(f"not YAML that we read ({error})") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise DamagedError("not a YAML mapping")
    return loaded
