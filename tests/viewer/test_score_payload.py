"""What the TracIn and probe pages get agrees with the trace files."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import numpy as np
import pytest

from gradtrace import open_run
from gradtrace.instruments.entropy_probe import ENTROPY_PROBE, ProbeBatch
from gradtrace.instruments.tracin import TRACIN, TracinReason
from gradtrace.trace.step import Step
from gradtrace.viewer.group import json_bytes
from gradtrace.viewer.pages import REASONS, probe_payload, response_payload, tracin_payload
from gradtrace.viewer.vocabulary import Vocabulary, load_vocabulary
from tests.viewer.conftest import write_run


@pytest.fixture(scope="module")
def vocabulary(runs_dir: Path) -> Vocabulary:
    return load_vocabulary(open_run(runs_dir / "chains"))


@pytest.fixture(scope="module")
def tracin(runs_dir: Path) -> Step:
    return open_run(runs_dir / "chains").step(TRACIN, 2)


@pytest.fixture(scope="module")
def probe(runs_dir: Path) -> Step:
    return open_run(runs_dir / "chains").step(ENTROPY_PROBE, 2)


def test_candidates_and_validation_are_told_apart(tracin: Step, vocabulary: Vocabulary) -> None:
    page = tracin_payload(tracin, vocabulary, {})
    is_validation = tracin["reason"] == int(TracinReason.VALIDATION)
    assert [row["response"] for row in page["validation"]] == np.flatnonzero(is_validation).tolist()
    assert [row["response"] for row in page["candidates"]] == np.flatnonzero(~is_validation).tolist()
    for row in page["candidates"]:
        r = row["response"]
        assert row["score"] == tracin["score"][r] and row["kept"] == tracin["kept"][r]
        assert row["reason"] == REASONS[TracinReason(tracin["reason"][r])]
        assert row["reward"] == tracin["reward"][r]


def test_every_reason_has_words() -> None:
    assert set(REASONS) == set(TracinReason)


def test_groups_lead_to_the_group_page_only_where_it_has_them(tracin: Step, vocabulary: Vocabulary) -> None:
    page = tracin_payload(tracin, vocabulary, {0: 0, 3: 7})
    pages = {group["group_id"]: group["page"] for group in page["groups"]}
    assert pages[0] == 0 and pages[3] == 7 and pages[1] is None
    validation = {row["group"] for row in page["validation"]}
    assert all(page["groups"][group]["page"] is None for group in validation)


def test_a_score_that_is_not_finite_is_null_in_json(tracin: Step, vocabulary: Vocabulary) -> None:
    page = json.loads(json_bytes(tracin_payload(tracin, vocabulary, {})))
    assert all(row["score"] is None for row in page["validation"])


def test_a_response_comes_with_its_tokens_and_columns(tracin: Step, vocabulary: Vocabulary) -> None:
    whole = response_payload(tracin, 5, vocabulary)
    ids = [whole["vocabulary"]["ids"][index] for index in whole["tokens"]]
    assert ids == tracin.tokens(5)["token_id"].tolist()
    assert whole["channels"]["entropy"] == tracin.tokens(5)["entropy"].tolist()
    prompt = [whole["vocabulary"]["ids"][index] for index in whole["prompt"]]
    assert prompt == tracin.group(int(tracin["group"][5])).prompt_ids.tolist()


def test_parts_sum_to_the_predicted_change(probe: Step, vocabulary: Vocabulary) -> None:
    page = probe_payload(probe, vocabulary)
    total = sum(part["value"] for part in page["parts"])
    assert total == pytest.approx(page["meta"]["delta_h_predicted"], rel=1e-3)
    assert not any(part["name"] == "not attributed" for part in page["parts"])
    assert {part["name"] for part in page["parts"]} >= {"momentum of earlier batches", "weight decay"}


def test_token_shares_sum_to_the_response(probe: Step, vocabulary: Vocabulary) -> None:
    for row in probe_payload(probe, vocabulary)["update"]:
        assert probe.tokens(row["response"])["token_share"].sum() == pytest.approx(row["share"], abs=1e-8)


def test_what_the_parts_leave_over_is_shown(tmp_path: Path, vocabulary: Vocabulary) -> None:
    path = write_run(tmp_path / "run", groups=3, steps=1)
    step = open_run(path).step(ENTROPY_PROBE, 1)
    step.meta["momentum_share"] = step.meta["momentum_share"] + 0.01
    rest = next(part for part in probe_payload(step, vocabulary)["parts"] if part["name"] == "not attributed")
    assert rest["value"] == pytest.approx(-0.01, rel=1e-3)


def test_both_batches_of_the_probe_are_there(probe: Step, vocabulary: Vocabulary) -> None:
    page = probe_payload(probe, vocabulary)
    is_update = probe["batch"] == int(ProbeBatch.UPDATE)
    assert len(page["update"]) == is_update.sum() and len(page["evaluation"]) == (~is_update).sum()
    changes = np.concatenate([probe.tokens(r)["entropy_change"] for r in np.flatnonzero(~is_update).tolist()])
    assert page["scales"]["change"] == pytest.approx(np.quantile(np.abs(changes), 0.99), rel=0.2)
    row = page["evaluation"][0]
    own = probe.tokens(row["response"])["entropy_change_measured"]
    assert row["entropy_change_measured"] == pytest.approx(own.mean(), rel=1e-5)


def test_the_server_answers_and_says_what_is_not_there(origin: str) -> None:
    base = f"{origin}/api/runs/0/steps/2"
    with httpx.Client() as client:
        assert client.get(f"{base}/tracin").json()["step"] == 2
        assert client.get(f"{base}/probe/responses/0").json()["response"] == 0
        assert "no tracin of step 99" in client.get(f"{origin}/api/runs/0/steps/99/tracin").json()["error"]
        assert client.get(f"{base}/probe/responses/99999").status_code == 404


def test_a_damaged_step_is_told_and_the_others_stay(tmp_path: Path) -> None:
    from tests.viewer.serving import serving

    path = write_run(tmp_path / "run", groups=3, steps=2)
    file = next((path / TRACIN / "steps").glob("*1.npz"))
    file.write_bytes(file.read_bytes()[:-50])
    with serving([path]) as address, httpx.Client() as client:
        broken = client.get(f"{address}/api/runs/0/steps/1/tracin")
        assert broken.status_code == 422 and "left out" in broken.json()["error"]
        assert client.get(f"{address}/api/runs/0/steps/2/tracin").status_code == 200
