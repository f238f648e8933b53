"""Resample from here: a real server, a real model of a few thousand parameters, and who may ask for it."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gradtrace.cli import main
from gradtrace.commands.view import LiveSampling
from gradtrace.errors import GradtraceError
from gradtrace.instruments.counterfactual.columns import stored_groups
from gradtrace.training.run import train
from gradtrace.viewer.counterfactual import MOST_K, ResampleJob
from gradtrace.viewer.security import access_for
from tests.training import small
from tests.viewer.serving import serving

GROUP = "/api/runs/0/steps/3/groups/0"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resample")
    return train(small.config(folder, "trainer.entropy_trace.enable=true", "trainer.checkpoint.every=2")).run_dir


def reward_of(made: Path) -> str:
    return f"reward.path={made.parents[1] / 'reward.py'}:count_ones"


@pytest.fixture
def run_dir(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "runs" / "copy"))


@pytest.fixture
def client(made: Path, run_dir: Path) -> Iterator[httpx.Client]:
    with (
        serving([run_dir], sampling=LiveSampling([run_dir], [reward_of(made)])) as origin,
        httpx.Client(base_url=origin, headers={"origin": origin}) as client,
    ):
        yield client


def ended(client: httpx.Client) -> dict[str, Any]:
    """The state of the job when it is over."""
    for _ in range(600):
        state = client.get("/api/resample").json()
        if state["state"] != "running":
            return dict(state)
        time.sleep(0.05)
    raise AssertionError("the job does not end")


def test_a_token_is_resampled_and_stored_like_the_command_does(client: httpx.Client, made: Path, run_dir: Path) -> None:
    before = client.get(f"{GROUP}/counterfactual").json()
    assert before["measured"] is None and before["resample"] is True
    assert client.get(f"{GROUP}/counterfactual/1/2").status_code == 404
    answer = client.post(f"{GROUP}/resample/1/2?k=24")
    assert answer.status_code == 200 and answer.json()["state"] == "running"
    assert ended(client)["state"] == "done"
    (group,) = stored_groups(run_dir, 3)
    tree = group.measurement.tree
    stretches = group.measurement.stretches()
    for length in (2, 3):
        assert stretches.count[tree.node(1, length)] >= 24
    found = client.get(f"{GROUP}/counterfactual").json()["measured"]
    start = len(group.measurement.responses[0])
    assert found["delta_v"][start + 2] is not None and found["delta_v"][start + 1] is None
    sides = client.get(f"{GROUP}/counterfactual/1/2").json()
    for side in sides.values():
        assert sum(answer["share"] for answer in side["answers"]) == pytest.approx(1, abs=1e-3)
        mean = sum(answer["share"] * answer["reward"] for answer in side["answers"])
        assert mean == pytest.approx(side["value"], abs=1e-3)
    words = ["counterfactual", str(run_dir), "--step", "3", "--group", "0", "--k", "2", reward_of(made)]
    assert main(words) == 0
    (more,) = stored_groups(run_dir, 3)
    first = group.measurement.samples
    assert more.measurement.samples[: len(first)] == first, "the command goes on from what the page sampled"


@pytest.mark.parametrize(
    "headers",
    [{"origin": "http://evil.example"}, {"origin": "null"}, {"origin": ""}, {"sec-fetch-site": "cross-site"}],
)
def test_a_page_of_another_site_cannot_start_or_cancel(client: httpx.Client, headers: dict[str, str]) -> None:
    for path in (f"{GROUP}/resample/0/0?k=1", "/api/resample/cancel"):
        assert client.post(path, headers=headers).status_code == 403
    assert client.get("/api/resample").json()["state"] == "idle"


def test_a_post_names_its_origin_and_has_no_body(client: httpx.Client) -> None:
    path = f"{GROUP}/resample/0/0?k=1"
    assert httpx.post(f"{client.headers['origin']}{path}").status_code == 403
    assert client.post(path, content=b"x").status_code == 413
    assert client.put(path).status_code == 405


def test_a_viewer_on_another_address_needs_the_token_for_posts(made: Path, run_dir: Path) -> None:
    access = access_for("0.0.0.0", 1, "secret", posts=True)
    sampling = LiveSampling([run_dir], [reward_of(made)])
    with serving([run_dir], access=access, sampling=sampling) as origin:
        path = f"{origin}{GROUP}/resample/0/0?k=1"
        assert httpx.post(path, headers={"origin": origin}).status_code == 401
        token = {"authorization": "Bearer secret"}
        assert httpx.post(path, headers={"origin": origin, **token}).status_code == 200


@pytest.mark.parametrize(("path", "status"), [("0/0?k=0", 400), (f"0/0?k={MOST_K + 1}", 400), ("9/0?k=1", 404),
                                              ("0/99?k=1", 404), ("0/0?k=-1", 400)])  # fmt: skip
def test_limits(client: httpx.Client, path: str, status: int) -> None:
    assert client.post(f"{GROUP}/resample/{path}").status_code == status


def test_lengths_are_limited_too(made: Path, run_dir: Path) -> None:
    from gradtrace.viewer.counterfactual import Request

    request = Request(run_dir, 3, 0, 0, 0, k=100)
    with pytest.raises(GradtraceError, match="too many for a page"):
        LiveSampling([run_dir], [reward_of(made)]).resample(request, 799, lambda done, total: None)


def test_without_the_option_the_viewer_only_reads(run_dir: Path) -> None:
    with serving([run_dir]) as origin:
        answer = httpx.post(f"{origin}{GROUP}/resample/0/0?k=1", headers={"origin": origin})
        assert answer.status_code == 405
        assert httpx.get(f"{origin}{GROUP}/counterfactual").json()["resample"] is False
        assert httpx.get(f"{origin}/api/resample").json() == {"state": "off"}


def test_other_runs_of_the_folder_are_not_sampled_from(made: Path, run_dir: Path) -> None:
    other = Path(shutil.copytree(made, run_dir.parent / "other"))
    with serving([run_dir], run_dir.parent, sampling=LiveSampling([run_dir], [reward_of(made)])) as origin:
        runs = {run["name"]: run["id"] for run in httpx.get(f"{origin}/api/runs").json()["runs"]}
        path = f"{origin}/api/runs/{runs[other.name]}/steps/3/groups/0/resample/0/0?k=1"
        answer = httpx.post(path, headers={"origin": origin})
        assert answer.status_code == 403 and "--resample" in answer.json()["error"]


class Slow:
    """Samples until it is told to stop."""

    def __init__(self) -> None:
        self.going = threading.Event()

    def runs(self) -> list[Path]:
        return []

    def resample(self, request: Any, most_tokens: int, progress: Any) -> None:
        for done in range(100_000):
            progress(done, 100_000)
            self.going.set()
            time.sleep(0.001)


def test_one_job_at_a_time_and_it_can_be_cancelled() -> None:
    from gradtrace.viewer.counterfactual import Request

    sampling = Slow()
    job, request = ResampleJob(sampling), Request(Path("."), 1, 0, 0, 0, 1)
    assert job.start(request, 0) == ""
    sampling.going.wait(10)
    assert "another job" in job.start(request, 0)
    job.cancel()
    assert job._thread is not None
    job._thread.join(10)
    assert job.state()["state"] == "cancelled"
    assert job.start(request, 0) == ""
    job.cancel()


def test_code_of_a_run_has_to_be_named_for_the_page_as_well(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", str(run_dir), "--resample", "--no-open"]) == 2
    assert "reward.path" in capsys.readouterr().err
    assert main(["view", str(run_dir), "--no-open", "reward.name=task"]) == 2
    assert "--resample" in capsys.readouterr().err
