"""Whichever test of this folder imports verl first in a process, our plugin is loaded with it, on CPU."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session", autouse=True)
def plugin_is_named() -> None:
    os.environ |= {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "gradtrace.integrations.verl"}
