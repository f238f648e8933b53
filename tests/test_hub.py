"""A model's name that nobody knows is told at once where the hub cannot be asked, and what is there is loaded."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from gradtrace.errors import GradtraceError
from gradtrace.policy import load as hub
from gradtrace.policy.load import load_model, load_tokenizer
from gradtrace.policy.settings import ModelConfig


@pytest.fixture
def without_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unknown(*_: Any, **__: Any) -> Any:
        raise socket.gaierror("Name or service not known")

    hub._has_an_address.cache_clear()
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr(hub, "getproxies", dict)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("without_network")
@pytest.mark.parametrize("load", [load_tokenizer, lambda name: load_model(name, ModelConfig())])
def test_a_name_that_cannot_be_asked_for_is_told_at_once(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("nobody waits for a hub without an address"))
    with pytest.raises(GradtraceError, match=r"model.path=smolm2: there is no such folder .*get_smollm2"):
        load("smolm2")


@pytest.mark.usefixtures("without_network")
def test_a_folder_needs_no_hub(tmp_path: Path) -> None:
    assert not hub.is_out_of_reach(tmp_path)
    with pytest.raises(GradtraceError, match="the tokenizer cannot be loaded"):
        load_tokenizer(tmp_path)


@pytest.mark.usefixtures("without_network")
def test_a_proxy_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hub.is_out_of_reach("someone/something")
    hub._has_an_address.cache_clear()
    monkeypatch.setattr(hub, "getproxies", lambda: {"https": "http://proxy:3128"})
    assert not hub.is_out_of_reach("someone/something")
    hub._has_an_address.cache_clear()
