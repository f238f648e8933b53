"""What the browser gets agrees with what the trace holds."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from gradtrace import open_run
from gradtrace.trace.columns import GroupStatus
from gradtrace.trace.reader import StepUnreadableError
from gradtrace.viewer import group as payload
from gradtrace.viewer.catalog import RunCatalog, describe, latest_run, state_of
from gradtrace.viewer.scores import ScoredStep, load_step
from gradtrace.viewer.vocabulary import Vocabulary, load_vocabulary
from tests.viewer.sample import SampleRun
from tests.viewer.sample.run import factor_columns


@pytest.fixture(scope="module")
def chains(runs_dir: Path) -> tuple[ScoredStep, Vocabulary]:
    run = open_run(runs_dir / "chains")
    view = load_step(run, 2)
    assert view is not None
    return view, load_vocabulary(run)


def is_measured(view: ScoredStep, g: int) -> bool:
    books = view.books(g)
    return books is not None and books.is_measured


def scored(view: ScoredStep, measured: bool = True) -> int:
    groups = [g for g in range(view.n_groups) if view.status(g) == GroupStatus.SCORED]
    return next(g for g in groups if is_measured(view, g) == measured)


def measured(view: ScoredStep) -> int:
    return scored(view, measured=True)


def skipped(view: ScoredStep) -> int:
    return next(g for g in range(view.n_groups) if view.status(g) == GroupStatus.CONSTANT_REWARD)


def decode(view: ScoredStep, g: int, vocabulary: Vocabulary) -> dict[str, np.ndarray]:
    structure = payload.group_payload(view, g, vocabulary)
    floats = np.frombuffer(payload.group_tokens(view, g, vocabulary), "<f4")
    channels = structure["channels"]
    return dict(zip(channels, floats.reshape(len(channels), -1), strict=True))


def test_token_channels_are_the_columns_of_the_trace(chains: tuple[ScoredStep, Vocabulary]) -> None:
    view, vocabulary = chains
    g = scored(view)
    channels = decode(view, g, vocabulary)
    entries = payload.group_payload(view, g, vocabulary)["vocabulary"]
    rows = np.concatenate([np.arange(*view.offsets[[r, r + 1]]) for r in view.members(g)])
    ids = np.array(entries["ids"])[channels["token"].astype(int)]
    assert np.array_equal(ids, view.token_id[rows])
    assert np.array_equal(channels["entropy"], view.need("entropy")[rows])
    theirs = view.responses_in("influence_trace")[view.members(g)].tolist()
    expected = np.concatenate([view.parts["influence_trace"].tokens(s)["influence"] for s in theirs])
    assert np.array_equal(channels["influence"], expected)


def test_a_skipped_group_has_no_influence_and_says_why(chains: tuple[ScoredStep, Vocabulary]) -> None:
    view, vocabulary = chains
    g = skipped(view)
    structure = payload.group_payload(view, g, vocabulary)
    assert structure["status"] == "constant_reward" and structure["scores"] == []
    assert structure["pairwise"] is None
    assert "influence" not in decode(view, g, vocabulary)
    assert len(structure["responses"]) == 8


def test_effects_add_up_to_the_influence_on_the_own_prompt(chains: tuple[ScoredStep, Vocabulary]) -> None:
    view, vocabulary = chains
    g = measured(view)
    structure = payload.group_payload(view, g, vocabulary)
    assert structure["pairwise"]["score"] == "influence_own"
    assert [member["response"] for member in structure["pairwise"]["members"]] == list(range(8))
    scores = decode(view, g, vocabulary)["influence_own"]
    start = 0
    for r, response in enumerate(structure["responses"]):
        block = np.frombuffer(payload.pairwise_block(view, g, r) or b"", "<f4").reshape(response["length"], -1)
        np.testing.assert_allclose(block.sum(1), scores[start : start + response["length"]], atol=1e-6)
        start += response["length"]
    unmeasured = payload.group_payload(view, scored(view, measured=False), vocabulary)
    assert unmeasured["pairwise"] is None and "influence_own" not in unmeasured["channels"]


def test_a_column_is_the_same_numbers_as_the_blocks(chains: tuple[ScoredStep, Vocabulary]) -> None:
    view, _ = chains
    g = measured(view)
    blocks = [np.frombuffer(payload.pairwise_block(view, g, r) or b"", "<f4").reshape(-1, 8) for r in range(8)]
    for target in (0, 5):
        column = np.frombuffer(payload.pairwise_column(view, g, target) or b"", "<f4")
        assert np.array_equal(column, np.concatenate([block[:, target] for block in blocks]))


def test_sums_of_the_table_are_sums_over_tokens(chains: tuple[ScoredStep, Vocabulary]) -> None:
    view, vocabulary = chains
    table = payload.step_payload(view, vocabulary)
    g = scored(view)
    scores = decode(view, g, vocabulary)["influence"]
    sums = table["groups"][g]["influence"]
    assert sums["positive"] == pytest.approx(scores[scores > 0].sum(), rel=1e-5)
    assert sums["negative"] == pytest.approx(-scores[scores < 0].sum(), rel=1e-5)
    assert "influence" not in table["groups"][skipped(view)]
    books = view.books(g)
    assert books is not None and table["groups"][g]["change"] == pytest.approx(books.change)
    assert [group["group"] for group in table["groups"] if "change" in group] == [g]


def test_miniatures_keep_the_strongest_value(chains: tuple[ScoredStep, Vocabulary]) -> None:
    view, _ = chains
    floats = np.frombuffer(payload.miniatures(view, "influence"), "<f4")
    sizes = [len(view.members(g)) * payload.miniature_columns(view, g) for g in range(view.n_groups)]
    assert len(floats) == sum(sizes)
    g = scored(view)
    picture = floats[sum(sizes[:g]) : sum(sizes[: g + 1])]
    values = view.column("influence")
    assert values is not None
    mine = np.concatenate([values[view.tokens(r)] for r in view.members(g)])
    assert np.abs(picture).max() == np.abs(mine).max()


def test_long_responses_are_folded_without_losing_peaks() -> None:
    values = np.zeros(1000, np.float32)
    values[617] = -5.0
    line = payload._strongest(values, 180, 1000)
    assert line.min() == -5.0 and np.isfinite(line).all()


def test_points_cover_every_traced_token_once(chains: tuple[ScoredStep, Vocabulary]) -> None:
    view, vocabulary = chains
    structure = payload.points_payload(view, vocabulary)
    floats = np.frombuffer(payload.points(view, "influence", vocabulary), "<f4").reshape(3, -1)
    assert floats.shape[1] == structure["total"] == view.parts["influence_trace"].n_tokens
    assert sum(response["length"] for response in structure["responses"]) == structure["total"]


def test_a_large_step_is_sampled_and_says_so(
    chains: tuple[ScoredStep, Vocabulary], monkeypatch: pytest.MonkeyPatch
) -> None:
    view, vocabulary = chains
    monkeypatch.setattr(payload, "MOST_POINTS", 100)
    structure = payload.points_payload(view, vocabulary)
    points = len(payload.points(view, "influence", vocabulary)) // 12
    assert structure["stride"] > 1 and points <= 100


def test_responses_are_matched_by_row_not_by_order(tmp_path: Path) -> None:
    """The influence trace may hold responses in another order than the rollout."""
    run = SampleRun(tmp_path / "run", groups=3, total_steps=1, factors=True)
    groups = run.sample_groups(1)
    run.write_step(1, groups)
    columns = factor_columns(groups, np.random.default_rng(0))
    assert run.influence_writer is not None
    for name in ("pairwise", "pairwise_member", "pairwise_offsets", "pairwise_member_offsets"):
        del columns[name]
    lengths = np.diff(columns["token_offsets"])
    order = np.random.default_rng(1).permutation(len(lengths))
    starts = columns["token_offsets"][:-1]
    tokens = np.concatenate([np.arange(starts[r], starts[r] + lengths[r]) for r in order])
    for name in list(columns):
        if name.startswith(("token_id", "entropy", "log_prob", "influence_", "captured")):
            columns[name] = columns[name][tokens]
        elif name in ("group", "row", "reward", "finished", "first_wrong", "advantage", "accepted",
                      "optimizer_step", "selection", "prompt_influence"):  # fmt: skip
            columns[name] = columns[name][order]
    columns["token_offsets"] = np.concatenate([[0], np.cumsum(lengths[order])])
    before = load_step(open_run(run.path), 1)
    run.influence_writer.write(1, columns)
    run.close()
    after = load_step(open_run(run.path), 1)
    assert before is not None and after is not None
    own = np.concatenate([response.own for group in groups for response in group.responses if group.mixed])
    found = after.column("influence_loss_term")
    assert found is not None
    np.testing.assert_allclose(found[np.isfinite(found)], own, rtol=1e-5)


def test_a_run_without_influence_is_shown_with_entropy(tmp_path: Path) -> None:
    run = SampleRun(tmp_path / "run", groups=2, total_steps=1, influence=False)
    run.write_step(1)
    run.finish()
    view = load_step(open_run(run.path), 1)
    assert view is not None
    structure = payload.group_payload(view, 0, load_vocabulary(open_run(run.path)))
    assert structure["scores"] == [] and "entropy" in structure["channels"]


def test_a_damaged_trace_leaves_the_other_one(tmp_path: Path) -> None:
    run = SampleRun(tmp_path / "run", groups=2, total_steps=1)
    run.write_step(1)
    run.finish()
    file = next((run.path / "influence_trace/steps").iterdir())
    file.write_bytes(file.read_bytes()[:-100])
    view = load_step(open_run(run.path), 1)
    assert view is not None and "entropy_trace" in view.parts and "influence_trace" not in view.parts
    assert "left out" in view.problems[0]
    other = next((run.path / "entropy_trace/steps").iterdir())
    other.write_bytes(b"")
    with pytest.raises(StepUnreadableError):
        load_step(open_run(run.path), 1)


def test_without_token_bytes_ids_are_shown(tmp_path: Path) -> None:
    run = SampleRun(tmp_path / "run", groups=1, total_steps=1)
    run.write_step(1)
    run.finish()
    (run.path / "token_bytes.npz").unlink()
    vocabulary = load_vocabulary(open_run(run.path))
    assert vocabulary.problem is not None and "missing" in vocabulary.problem
    assert vocabulary.entries([3]) == {"ids": [3], "bytes": [None], "special": []}
    assert vocabulary.text([3, 4]) == "⟨3⟩ ⟨4⟩"


def test_json_has_no_nan() -> None:
    text = payload.json_bytes({"a": [float("nan"), float("inf"), 1.5], "b": {"c": float("-inf")}})
    assert json.loads(text) == {"a": [None, None, 1.5], "b": {"c": None}}


def test_the_latest_run_is_the_one_written_last(tmp_path: Path) -> None:
    for name, age in (("old", 200), ("new", 10), ("middle", 100)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "metrics.jsonl").write_text("")
        os.utime(folder / "metrics.jsonl", (1e9 - age, 1e9 - age))
    (tmp_path / "no-run").mkdir()
    found = latest_run(tmp_path)
    assert found is not None and found.name == "new"
    assert latest_run(tmp_path / "nowhere") is None


def test_steps_in_memory_are_bounded(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradtrace.viewer.catalog.STEPS_IN_MEMORY", 2)
    catalog = RunCatalog([runs_dir / "chains"], None)
    served = catalog.get(0)
    assert served is not None
    for step in (1, 2, 3, 4):
        assert catalog.step_view(served, step) is not None
    assert len(catalog._steps) == 2
    assert catalog.step_view(served, 4) is catalog.step_view(served, 4)


def test_the_state_of_a_run_is_told(tmp_path: Path) -> None:
    run = SampleRun(tmp_path / "run", groups=1, total_steps=2)
    opened = open_run(run.path)
    metrics, summary = run.path / "metrics.jsonl", run.path / "summary.json"

    def written_at(path: Path, time: float) -> None:
        os.utime(path, (time, time))

    run.write_step(1)
    for path in run.path.rglob("*"):
        written_at(path, 1e9)
    assert state_of(opened) == "live"  # however long ago it wrote: its process lives
    run.files.close(finished=False)
    assert state_of(opened) == "stopped"
    written_at(summary, metrics.stat().st_mtime - 100)  # resumed after that summary, and killed
    assert state_of(opened) == "quiet"
    run.files.write_summary({"finished": True})
    assert state_of(opened) == "finished"
    summary.unlink()
    assert state_of(opened) == "quiet"


def test_a_strange_configuration_is_no_problem() -> None:
    assert describe({}) == ""
    assert describe({"model": None, "rollout": 3, "trainer": [1]}) == ""
    assert "lr 1e-06" in describe({"actor": {"optim": {"lr": 1e-6}}})


def test_a_run_says_which_scores_it_has() -> None:
    def described(**knobs: str) -> str:
        return describe({"trainer": {"influence_trace": {"enable": True, **knobs}}})

    assert described() == "influence: what each step does to every token, in nats"
    factors = described(credit="both", hessian_mode="inverse", accepted_rejected_scope="per_prompt")
    assert factors == "influence from captured factors: position and loss-term credit, response curvature, own group"
