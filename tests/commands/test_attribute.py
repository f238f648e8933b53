"""`gradtrace attribute`: stored rollouts get the scores that training would give them, at any weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import gradtrace
from gradtrace.cli import main
from gradtrace.trace.columns import GroupStatus
from gradtrace.trace.step import Step
from gradtrace.training.run import train
from tests.commands.test_import import imported, plain_rows, write
from tests.tasks.byte_model import save_byte_model
from tests.training import small

SCORES = {"parts": ("influence",), "factors": ("influence_position", "influence_loss_term")}
KNOBS = {"parts": (), "factors": ("trainer.influence_trace.credit=both",)}


@pytest.fixture(scope="module", params=list(KNOBS))
def kind(request: pytest.FixtureRequest) -> str:
    """What the scores are made of."""
    return str(request.param)


@pytest.fixture(scope="module")
def trained(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps, with a checkpoint after each and an influence trace of each; one mini-batch a step."""
    folder = tmp_path_factory.mktemp("trained")
    knobs = (
        "actor.mini_batch_size=0",
        "trainer.total_steps=3",
        "trainer.checkpoint.every=1",
        "trainer.checkpoint.keep_last=0",
    )
    traced = ("trainer.influence_trace.enable=true", "trainer.entropy_trace.enable=true")
    return train(small.config(folder, *knobs, *traced, *KNOBS[kind])).run_dir


def attribute(*words: object) -> int:
    return main(["attribute", *map(str, words)])


def step_of(run: Path, step: int, kind: str = "influence_trace") -> Step:
    return gradtrace.open_run(run).step(kind, step)


def test_scores_at_a_checkpoint_are_those_of_the_training_step_after_it(
    kind: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = trained / "checkpoints" / "step_000002"
    assert attribute(trained, "--model", checkpoint, "--step", 3, "--output", tmp_path / "anew") == 0
    said = capsys.readouterr().out.replace("\n", "")
    assert "Optimizer: the optimizer's state in" in said and "1 steps scored" in said
    theirs, ours = step_of(trained, 3), step_of(tmp_path / "anew", 3)
    assert ours["group"].tolist() == theirs["group"].tolist() and ours.n_tokens > 0
    for name in (*SCORES[kind], "log_prob", "entropy"):
        largest = np.abs(theirs[name]).max()
        np.testing.assert_allclose(ours[name], theirs[name], atol=2e-4 * largest, err_msg=name)
    if kind == "parts":
        (update,), (in_training,) = ours.meta["updates"], theirs.meta["updates"]
        assert update["second_moment"] == in_training["second_moment"] == "state_with_batch"
        assert update["learning_rate"] == in_training["learning_rate"] > 0
        assert update["part"] == pytest.approx(in_training["part"], rel=1e-3)
    assert ours["first_wrong"].tolist() == theirs["first_wrong"].tolist(), "what the task knew is kept"
    assert ours.meta["optimizer_state"].endswith("step_000002") and ours.meta["model"] == str(checkpoint)
    stored = step_of(trained, 3, "entropy_trace")
    np.testing.assert_allclose(step_of(tmp_path / "anew", 3, "entropy_trace")["entropy"], stored["entropy"], atol=1e-5)


def test_without_a_state_the_geometry_is_the_steps_own_gradient_and_it_is_said(
    kind: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first step of a run has no state either: its loss terms are scored with the gradient that is coming."""
    (start,) = {path.parent for path in (trained.parent / ".cache").rglob("config.json")}
    assert attribute(trained, "--model", start, "--step", 1, "--output", tmp_path / "anew") == 0
    said = capsys.readouterr().out.replace("\n", " ")
    assert "the step's own gradient" in said and "means over a response" not in said
    theirs, ours = step_of(trained, 1), step_of(tmp_path / "anew", 1)
    about = theirs.meta["updates"][0]["second_moment"] if kind == "parts" else theirs.meta["second_moment_loss_term"]
    assert about == "batch_gradient"
    name = SCORES[kind][-1]  # of the factors, backward passes came before there was a gradient
    np.testing.assert_allclose(ours[name], theirs[name], atol=2e-3 * np.abs(theirs[name]).max())
    factors = ("trainer.influence_trace.credit=both", "trainer.influence_trace.projection_dim_factor=2")
    others = (*factors, "algorithm.advantage=turn_rloo")
    assert attribute(trained, "--model", start, "--step", 1, *others, "--output", tmp_path / "projected") == 0
    assert "Stored advantages are means over a response" in capsys.readouterr().out
    meta = step_of(tmp_path / "projected", 1).meta
    assert "none" not in (meta["second_moment_backward"], meta["second_moment_loss_term"]), "nor where projected"


def test_some_groups_have_the_scores_that_they_have_among_all(kind: str, trained: Path, tmp_path: Path) -> None:
    words = (trained, "--model", trained / "checkpoints" / "step_000002", "--step", 3, "--output")
    assert attribute(*words, tmp_path / "all") == 0
    every = step_of(tmp_path / "all", 3)
    scored = sorted(set(every["group"].tolist()))
    for group in (scored[-1], scored[0]):  # the second call keeps what the first one scored
        assert attribute(*words, tmp_path / "some", "--group", group) == 0
    some = step_of(tmp_path / "some", 3)
    assert sorted(set(some["group"].tolist())) == sorted({scored[0], scored[-1]})
    skipped = [g for g in scored if g not in (scored[0], scored[-1])]
    assert all(some["group_status"][g] == int(GroupStatus.NOT_ASKED) for g in skipped)
    for r in range(some.n_responses):
        place = every["row"].tolist().index(int(some["row"][r]))
        for name in SCORES[kind]:
            found, scores = some.tokens(r)[name], every.tokens(place)[name]
            np.testing.assert_allclose(found, scores, atol=2e-4 * np.abs(every[name]).max(), err_msg=name)


def test_what_training_wrote_is_kept_unless_asked_for(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = trained / "policy"
    assert attribute(trained, "--model", model, "--step", 3) == 2
    assert "has scores of its training" in capsys.readouterr().err
    for words, why in (
        (("--step", 9), "no rollouts of step 9"),
        (("--group", 99, "--output", tmp_path / "x"), "no group 99"),
        (("--output", trained), "--output is the run itself"),
        (("--budget", "soon"), "--budget"),
        (("algorithm.policy_los=ppo",), "algorithm.policy_loss"),
    ):
        assert attribute(trained, "--model", model, *words) == 2
        assert why in capsys.readouterr().err, why
    assert attribute(trained, "--model", tmp_path / "nowhere") == 2
    assert "there is no such folder" in capsys.readouterr().err


def test_imported_rollouts_are_scored_in_parts_and_then_verified_and_sampled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_byte_model(tmp_path / "model")
    run = imported(write(tmp_path / "rows.jsonl", plain_rows()), model)
    words = (run.path, "--model", model)
    assert attribute(*words, "--budget", "0.001s") == 0
    assert "1 steps are left" in capsys.readouterr().out
    assert attribute(*words) == 0
    assert "1 steps scored" in (said := capsys.readouterr().out) and "1 were scored before" in said
    trace, entropies = step_of(run.path, 4), step_of(run.path, 4, "entropy_trace")
    assert trace.n_responses == 4 and np.abs(trace["influence"]).max() > 0
    assert np.isfinite(entropies["entropy"]).all() and entropies.meta["imported_from"].endswith("rows.jsonl")
    np.testing.assert_array_equal(entropies["sampler_log_prob"], np.full(6, -0.5, np.float32))
    assert main(["doctor", str(run.path)]) == 0
    capsys.readouterr()

    assert (
        main(
            [
                "counterfactual",
                str(run.path),
                "--model",
                str(model),
                "--step",
                "4",
                "--k",
                "2",
                "--tokens",
                "0",
            ]
        )
        == 0
    )
    assert "continuations; V(prompt)" in capsys.readouterr().out, "judged by the answers of the rows"
    verify = ["verify", str(run.path), "--budget", "20s", "--groups", "2", "--tokens", "2", "--halves", "2"]
    assert main([*verify, "--model", str(model), "lr=1e-4"]) in (0, 1, 3)
    assert "on the rollouts of step 4" in capsys.readouterr().out.replace("\n", " ")
    assert main(verify) == 2
    assert "--model" in capsys.readouterr().err, "the error says what to pass"


def test_without_answers_the_error_says_what_judges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_byte_model(tmp_path / "model")
    rows = [{key: value for key, value in row.items() if key != "answer"} for row in plain_rows()]
    run = imported(write(tmp_path / "rows.jsonl", rows), model)
    words = ["counterfactual", str(run.path), "--model", str(model), "--k", "2", "--tokens", "0"]
    assert main(words) == 2
    assert "reward.name=" in (said := capsys.readouterr().err) and "reward.path=" in said
    (tmp_path / "mine.py").write_text("def ones(response, item):\n    return float('1' in response)\n")
    assert main([*words, f"reward.path={tmp_path / 'mine.py'}:ones"]) == 0
    assert main(["counterfactual", str(run.path), "--k", "2"]) == 2
    assert "--model" in capsys.readouterr().err
