"""`gradtrace ablate`: a grid of settings on one rollout, resumable, and what its table says."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from gradtrace.cli import main
from gradtrace.commands.ablate.cell import score_cell
from gradtrace.commands.ablate.results import collect, first_wrong_ranks, label_r2, separation, spearman
from gradtrace.commands.ablate.session import ablate, parse_grid, parse_rollout, weights_digest
from gradtrace.config.loader import load_config
from gradtrace.errors import GradtraceError
from gradtrace.training.components import build_components
from gradtrace.training.run import train
from gradtrace.viewer.pages import ablation_payload
from tests.training.small import overrides

SWEEP = ["sweep.influence.hessian_mode=inverse,identity", "sweep.influence.projection_dim_factor=0,4"]


def words(folder: Path, *more: str) -> list[str]:
    return [*overrides(folder), "trainer.influence_trace.output_function=log_prob", *SWEEP, *more]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ablate")
    assert main(["ablate", *words(folder), "--out", str(folder / "out"), "--repeat", "1"]) == 0
    return folder


def scores(file: Path) -> np.ndarray:
    with np.load(file, allow_pickle=False) as columns:
        return columns["influence_loss_term"]


def test_every_cell_has_a_row_and_the_files_say_the_same(done: Path) -> None:
    table = json.loads((done / "out" / "ablation.json").read_text())
    assert table["sweep"] == {"hessian_mode": ["inverse", "identity"], "projection_dim_factor": ["0", "4"]}
    assert [cell["status"] for cell in table["cells"]] == ["done"] * 4
    for cell in table["cells"]:
        assert cell["overhead"] > 0, "timed in turn with the pass without a trace"
        assert cell["rows"] > 0 and cell["time_s"] > 0 and cell["peak_bytes"] >= 0 and 0 <= cell["auc"] <= 1
    assert table["baseline"]["time_s"] > 0 and table["rollout"]["groups_mixed"] > 0
    matrix = np.array(table["agreement"]["matrix"])
    np.testing.assert_allclose(np.diag(matrix), 1.0)
    np.testing.assert_allclose(matrix, matrix.T)
    with (done / "out" / "ablation.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["time_s"]) for row in rows] == [cell["time_s"] for cell in table["cells"]]
    shown = ablation_payload(done / "out")
    assert shown is not None and len(shown["cells"]) == 4
    markdown = (done / "out" / "ablation.md").read_text()
    assert "| 4 | identity | 4 |" in markdown and "| **4** | " in markdown


def test_scores_in_nats_and_those_of_captured_factors_stand_in_one_table_by_their_names(tmp_path: Path) -> None:
    settings = [*overrides(tmp_path), "sweep.influence.hessian_mode=optimizer,identity"]
    assert main(["ablate", *settings, "--out", str(tmp_path / "out"), "--repeat", "1"]) == 0
    table = json.loads((tmp_path / "out" / "ablation.json").read_text())
    assert [cell["status"] for cell in table["cells"]] == ["done", "done"]
    assert [cell["score"] for cell in table["cells"]] == ["influence", "influence_loss_term"]
    assert table["agreement"]["score"] == "mixed" and table["agreement"]["matrix"][0][1] is not None


def test_cells_differ_by_their_settings_alone(done: Path) -> None:
    """A cell computed again, alone and later, has the same scores to the last bit; other settings have others."""
    grid = parse_grid(words(done))
    parts = build_components(grid.base)
    batch, _ = parse_rollout((done / "out" / "rollout.npz").read_bytes())
    before = weights_digest(parts)
    for cell in grid.cells[:2]:
        (done / "again.npz").write_bytes(score_cell(parts, batch, cell.config, 1))
        np.testing.assert_array_equal(scores(done / "again.npz"), scores(done / "out" / "cells" / f"{cell.name}.npz"))
    assert weights_digest(parts) == before, "an ablation must not train"
    files = [scores(done / "out" / "cells" / f"{cell.name}.npz") for cell in grid.cells]
    assert all(not np.array_equal(files[0], other) for other in files[1:])


def test_a_stopped_ablation_goes_on_and_a_grown_grid_keeps_what_it_has(done: Path) -> None:
    out = done / "out"
    cells = sorted((out / "cells").glob("*.npz"))
    kept = {file.name: file.stat().st_mtime_ns for file in cells[1:]}
    removed = scores(cells[0])
    cells[0].unlink()
    assert [cell["status"] for cell in collect(out)["cells"]].count("missing") == 1
    assert "missing" in (out / "ablation.md").read_text()
    grid = parse_grid([*words(done)[:-1], "sweep.influence.projection_dim_factor=0,4,8"])
    ablate(grid, out, repeat=1)
    np.testing.assert_array_equal(scores(cells[0]), removed)
    assert {name: (out / "cells" / name).stat().st_mtime_ns for name in kept} == kept
    collect(out)
    table = json.loads((out / "ablation.json").read_text())
    assert [cell["status"] for cell in table["cells"]] == ["done"] * 6


def test_a_folder_of_another_rollout_is_refused(done: Path, tmp_path: Path) -> None:
    other = parse_grid(words(done, "rollout.n=4"))
    with pytest.raises(GradtraceError, match="another rollout"):
        ablate(other, done / "out", repeat=1)
    with pytest.raises(GradtraceError, match="no checkpoint and no run"):
        ablate(other, tmp_path / "new", checkpoint=tmp_path)


def test_a_failing_cell_is_named_and_the_others_go_on(done: Path, tmp_path: Path) -> None:
    sweep = "sweep.influence.module_name_filter=[mlp],[no_such_layer]"
    grid = parse_grid([*overrides(done), "trainer.influence_trace.hessian_mode=identity", sweep])
    ablate(grid, tmp_path / "out", repeat=1)
    collect(tmp_path / "out")
    first, second = json.loads((tmp_path / "out" / "ablation.json").read_text())["cells"]
    assert first["status"] == "done"
    assert second["status"] == "failed" and "no_such_layer" in second["error"]


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        (["sweep.influence.hesian_mode=inverse"], "hessian_mode"),
        (["sweep.influence.hessian_mode=inverse,diagonal"], "diagonal"),
        (["sweep.influence.hessian_mode=inverse,inverse"], "each once"),
        (["sweep.influence.solver=cg"], "solver"),
        ([], "Nothing to vary"),
    ],
)
def test_mistakes_are_found_before_anything_runs(sweep: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(GradtraceError, match=message):
        parse_grid([*overrides(tmp_path), *sweep])


def test_separation_counts_pairs_within_groups() -> None:
    nan = np.nan
    dense = np.array([[3.0, 5.0], [1.0, nan], [4.0, 4.0], [9.0, 9.0], [9.0, 9.0]])
    good = np.array([True, False, False, True, False])
    group = np.array([0, 0, 0, 1, 1])
    # Group 0: 4 beats 1 and ties with 4; group 1: a tie.
    assert separation(dense, good, group) == (pytest.approx((1 + 0.5 + 0.5) / 3), 3)


def test_totals_that_are_labels_are_told_from_others() -> None:
    group, good = np.repeat(np.arange(3), 4), np.array([True, False, False, True] * 3)
    advantages = np.where(good, 1.0, -1.0)
    labels = np.where(good, 0.5, -0.5)[:, None] * np.ones((12, 3))
    assert label_r2(labels, good, group, advantages) == pytest.approx(1.0)
    others = np.random.default_rng(0).normal(size=(12, 3))
    assert label_r2(others, good, group, advantages) < 0.6
    assert label_r2(labels[:4], good[:4], group[:4], advantages[:4]) is None


def test_the_first_wrong_token_ranks_from_the_most_negative() -> None:
    dense = np.array([[1.0, -2.0, 0.0], [1.0, 0.0, -1.0], [5.0, 5.0, 5.0]])
    wrong, good = np.array([1, 1, -1]), np.array([False, False, True])
    assert first_wrong_ranks(dense, good, wrong) == (0.5, pytest.approx((1.0 + 0.5) / 2), 2)
    assert first_wrong_ranks(dense, good, np.array([-1, -1, -1])) == (None, None, 0)


def test_spearman_is_the_correlation_of_ranks_over_the_tokens_both_have() -> None:
    generator = np.random.default_rng(0)
    a, b = generator.integers(0, 5, 50).astype(float), generator.integers(0, 5, 50).astype(float)
    a[3] = b[7] = np.nan
    both = ~np.isnan(a) & ~np.isnan(b)

    def counted(values: np.ndarray) -> list[float]:
        return [(values < x).sum() + ((values == x).sum() + 1) / 2 for x in values]

    assert spearman(a, b) == pytest.approx(np.corrcoef(counted(a[both]), counted(b[both]))[0, 1])
    assert spearman(a, -a) == pytest.approx(-1.0) and spearman(a, np.exp(a)) == pytest.approx(1.0)
    assert spearman(np.ones(4), np.arange(4.0)) is None


def test_a_checkpoint_gives_the_weights(done: Path, tmp_path: Path) -> None:
    settings = overrides(done, "trainer.total_steps=1", "trainer.validation.every=0")
    run = train(load_config(settings)).run_dir
    checkpoint = run / "checkpoints" / "step_000001"
    ablate(
        parse_grid([*settings, "sweep.influence.hessian_mode=identity"]),
        tmp_path / "out",
        checkpoint,
        repeat=1,
    )
    shared = json.loads((tmp_path / "out" / "shared.json").read_text())
    start = json.loads((done / "out" / "shared.json").read_text())
    assert shared["checkpoint"] == str(checkpoint)
    assert shared["weights_sha256"] == weights_digest(build_components(load_config(settings), checkpoint))
    assert shared["weights_sha256"] != start["weights_sha256"]
    assert len(list((tmp_path / "out" / "cells").glob("*.npz"))) == 1
