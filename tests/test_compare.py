"""`gradtrace compare`: intervals over seeds, equal cost, thresholds, pictures, and words for what is missing."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from gradtrace.cli import main
from gradtrace.commands.compare.comparison import compare
from gradtrace.commands.compare.runs import RunCurves, group_runs, load_run
from gradtrace.commands.pages.picture import Curve, line_picture, number_text, spread_apart, ticks_between
from gradtrace.errors import GradtraceError
from gradtrace.intervals import mean_interval, paired_difference, t_quantile, welch_difference
from gradtrace.trace.run_files import RunFiles
from gradtrace.trace.writer import TraceWriter
from tests.trace.trace_fakes import influence_columns

STEPS = 11


def write_run(
    path: Path,
    seed: int,
    rate: float,
    *,
    steps: int = STEPS,
    kept: int = 24,
    validation: int = 0,
    counts: bool = True,
    config: str = "",
) -> Path:
    """A run whose metric rises by `rate` a step, shifted by 0.01 · seed."""
    files = RunFiles(path)
    files.write_config(
        f"data: {{train_batch_size: 8}}\nrollout: {{n: 4}}\n"
        f"trainer: {{seed: {seed}, name: {path.name}, total_steps: {steps}}}\nactor: {{lr: {rate}}}\n{config}"
    )
    for step in range(steps):
        row = {"score": rate * step + 0.01 * seed, "timing_s/step": 2.5, "timing_s/testing": 0.5}
        if counts:
            row |= {"perf/trained_responses": kept, "perf/generated_responses": 32 + validation}
        files.log(step, row)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for seed in range(4):
        write_run(tmp_path / f"plain-s{seed}", seed, 0.05, kept=32)
        write_run(tmp_path / f"tracin-s{seed}", seed, 0.10, kept=16, validation=32)
    return tmp_path


def loaded(folder: Path) -> list[RunCurves]:
    return [load_run(path) for path in sorted(folder.iterdir())]


# ---------------------------------------------------------------- statistics


@pytest.mark.parametrize(("freedom", "value"), [(1, 12.7062), (4, 2.7764), (30, 2.0423), (60, 2.0003), (1000, 1.9623)])
def test_quantiles_are_those_of_students_t(freedom: float, value: float) -> None:
    assert t_quantile(freedom) == pytest.approx(value, abs=2e-4)


def test_quantiles_between_whole_degrees_lie_between_them() -> None:
    assert t_quantile(4) > t_quantile(4.5) > t_quantile(5)


def test_the_interval_covers_the_mean_at_its_promised_rate() -> None:
    generator = np.random.default_rng(0)
    samples = generator.normal(3.0, 2.0, (4000, 4))
    intervals = [mean_interval(sample.tolist()) for sample in samples]
    covered = np.mean([each.low <= 3.0 <= each.high for each in intervals])
    assert 0.935 < covered < 0.965


def test_pairing_removes_what_the_seeds_share() -> None:
    shared = np.array([0.0, 5.0, -3.0, 9.0])
    paired = paired_difference((shared + 1).tolist(), shared.tolist())
    assert paired.mean == pytest.approx(1.0) and paired.half == pytest.approx(0.0, abs=1e-12)
    assert welch_difference((shared + 1).tolist(), shared.tolist()).half > 5


def test_one_value_has_no_interval() -> None:
    assert mean_interval([2.0]).mean == 2.0 and math.isnan(mean_interval([2.0]).half)
    assert math.isnan(welch_difference([1.0], [2.0, 3.0]).half)


# ---------------------------------------------------------------- groups


def test_runs_that_differ_in_their_seed_alone_are_one_group(folder: Path) -> None:
    groups = group_runs(loaded(folder))
    assert [(group.label, len(group.runs)) for group in groups] == [("plain", 4), ("tracin", 4)]
    assert groups[0].seeds == [0, 1, 2, 3]
    assert groups[1].differs == "actor.lr=0.1"


def test_names_that_share_letters_only_stay_apart(tmp_path: Path) -> None:
    write_run(tmp_path / "chains", 1, 0.1)
    write_run(tmp_path / "chains-b", 2, 0.1)
    assert [group.label for group in group_runs(loaded(tmp_path))] == ["chains"]


def test_named_groups_take_what_their_globs_match(folder: Path) -> None:
    groups = group_runs(loaded(folder), ["first two=*-s[01]"])
    assert [(group.label, len(group.runs)) for group in groups] == [
        ("first two", 4),
        ("plain", 2),
        ("tracin", 2),
    ]
    with pytest.raises(GradtraceError, match=r"no run .* matches nothing-\*"):
        group_runs(loaded(folder), ["none=nothing-*"])
    with pytest.raises(GradtraceError, match="LABEL=GLOB"):
        group_runs(loaded(folder), ["nothing-*"])


# ---------------------------------------------------------------- curves


def test_mean_and_interval_are_over_seeds_at_every_step(folder: Path) -> None:
    result = compare(group_runs(loaded(folder)), "score")
    plain = result.groups[0]
    assert plain.x.tolist() == list(range(STEPS))
    np.testing.assert_allclose(plain.mean, 0.05 * np.arange(STEPS) + 0.015)
    expected = 3.1824 * np.std([0, 0.01, 0.02, 0.03], ddof=1) / 2
    np.testing.assert_allclose(plain.half, expected, rtol=1e-4)
    assert result.at == 10 and plain.at.mean == pytest.approx(0.515)
    difference = result.groups[1].difference
    assert difference is not None and result.groups[1].is_paired
    assert difference.mean == pytest.approx(0.5) and difference.half == pytest.approx(0, abs=1e-9)


def test_steps_to_the_threshold_are_where_each_seed_crosses_it(folder: Path) -> None:
    result = compare(group_runs(loaded(folder)), "score", threshold=0.4)
    assert result.rises
    assert result.groups[0].reached == pytest.approx([8.0, 7.8, 7.6, 7.4])
    assert result.groups[1].reached == pytest.approx([4.0, 3.9, 3.8, 3.7])
    high = compare(group_runs(loaded(folder)), "score", threshold=0.52)
    assert len(high.groups[0].reached) == 2  # of four seeds


def test_a_falling_metric_reaches_its_threshold_from_above(tmp_path: Path) -> None:
    write_run(tmp_path / "falls", 0, -0.1)
    result = compare(group_runs(loaded(tmp_path)), "score", threshold=-0.45)
    assert not result.rises and result.groups[0].reached == pytest.approx([4.5])


@pytest.mark.parametrize(
    ("against", "plain_end", "tracin_end"),
    [("trained", 320, 160), ("generated", 320, 640), ("time", 20.0, 20.0), ("steps", 10, 10)],
)
def test_axes_add_up_what_a_step_costs(folder: Path, against: str, plain_end: float, tracin_end: float) -> None:
    """Kept responses alone are trained on; validation rollouts are generated; evaluation is no training time."""
    result = compare(group_runs(loaded(folder)), "score", against)
    assert [group.x[-1] for group in result.groups] == pytest.approx([plain_end, tracin_end])
    assert result.at == pytest.approx(min(plain_end, tracin_end))


def test_at_equal_generated_responses_the_advantage_shrinks(folder: Path) -> None:
    result = compare(group_runs(loaded(folder)), "score", "generated")
    first, second = (group.at.mean for group in result.groups)
    assert second == pytest.approx(first)  # twice as fast, at twice the cost


def test_seeds_of_unequal_time_are_read_off_at_equal_time(tmp_path: Path) -> None:
    for seed, seconds in ((0, 1.0), (1, 3.0)):
        files = RunFiles(tmp_path / f"run-s{seed}")
        files.write_config(f"trainer: {{seed: {seed}}}")
        for step in range(1, 13):
            files.log(step, {"score": float(step), "timing_s/step": seconds})
    group = compare(group_runs(loaded(tmp_path)), "score", "time").groups[0]
    assert group.x[0] == 3.0 and group.x[-1] == 12.0
    assert group.mean[-1] == pytest.approx((12 + 4) / 2)


def test_old_runs_without_counts_are_estimated_and_said(tmp_path: Path) -> None:
    write_run(tmp_path / "old", 0, 0.1, counts=False)
    result = compare(group_runs(loaded(tmp_path)), "score", "generated")
    assert result.groups[0].x[-1] == 320
    assert any("train_batch_size · rollout.n" in remark for remark in result.remarks)
    write_run(tmp_path / "tracin", 0, 0.1, counts=False, config="")
    (tmp_path / "tracin/config.yaml").write_text("trainer: {tracin: {enable: true}}")
    with pytest.raises(GradtraceError, match="tracin logged no perf/generated_responses"):
        compare(group_runs([load_run(tmp_path / "tracin")]), "score", "generated")


def test_a_run_without_the_metric_is_left_out_and_the_nearest_is_named(folder: Path) -> None:
    files = RunFiles(folder / "other")
    files.write_config("trainer: {seed: 9}")
    files.log(1, {"score/mean": 0.5})
    result = compare(group_runs(loaded(folder)), "score")
    assert "other is left out: it has no score, the nearest it has is score/mean" in result.remarks
    with pytest.raises(GradtraceError, match="no run has the metric scor, the nearest it has is score"):
        compare(group_runs(loaded(folder)), "scor")


def test_smoothing_averages_the_last_values(folder: Path) -> None:
    run = load_run(folder / "plain-s0")
    _, raw = run.series("score", "steps")
    _, smooth = run.series("score", "steps", 3)
    assert smooth[0] == raw[0] and smooth[5] == pytest.approx(raw[3:6].mean())


# ---------------------------------------------------------------- pictures


def test_a_picture_is_well_formed_and_holds_every_curve() -> None:
    hostile = '<script>&"\x00'
    svg = line_picture(
        [Curve(hostile, [0, 1, 2, 3], [0, 1, math.nan, 2], [0, 0.5, math.nan, 1.5], [0, 1.5, math.nan, 2.5])],
        hostile,
        "x",
        "y",
    )
    root = ElementTree.fromstring(svg)
    names = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert '<script>&" ' in names
    assert svg.count('class="line c0"') == 1  # the end alone, after the gap, is a point
    assert svg.count('class="mark c0"') == 1 and svg.count("<polygon") == 2


def test_points_of_a_line_lie_where_their_values_say() -> None:
    svg = line_picture([Curve("a", [0, 5, 10], [0, 50, 100])], "t", "x", "y")
    path = svg.split('class="line c0" d="M')[1].split('"')[0]
    (x0, y0), (x1, y1), (x2, y2) = (map(float, point.split()) for point in path.split("L"))
    assert x1 == pytest.approx((x0 + x2) / 2, abs=0.1) and y1 == pytest.approx((y0 + y2) / 2, abs=0.1)
    assert y2 < y0 and x2 > x0


def test_pictures_of_nothing_and_of_one_value_can_be_drawn() -> None:
    ElementTree.fromstring(line_picture([], "t", "x", "y"))
    ElementTree.fromstring(line_picture([Curve("a", [3], [math.nan])], "t", "x", "y"))
    ElementTree.fromstring(line_picture([Curve("a", [3], [0.0])], "t", "x", "y", identity=True))
    with pytest.raises(ValueError, match="one length"):
        Curve("a", [1, 2], [1])


def test_labels_keep_their_distance_and_their_order() -> None:
    places = spread_apart([10.0, 10.0, 10.0, 80.0], 15, 0, 100)
    assert all(b - a >= 15 for a, b in itertools.pairwise(places))
    assert places[1] == pytest.approx(10, abs=6) and places[3] == 80
    assert spread_apart([99.0, 99.5], 15, 0, 100)[-1] <= 100


def test_ticks_are_round_and_cover_the_data() -> None:
    assert ticks_between(0.013, 0.987, 5) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks_between(0.0, 0.0, 4)[0] < 0
    assert number_text(-2500.0, [-2500.0, 0.0]) == "\u22122,500"
    assert number_text(2e-5, [0.0, 2e-5]) == "2e\u22125"


# ---------------------------------------------------------------- the command


def test_the_command_prints_a_table_and_writes_every_format(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(path) for path in sorted(folder.iterdir())]
    for name in ("out.html", "out.svg", "out.json"):
        assert main(["compare", *runs, "--metric", "score", "-o", str(folder.parent / name)]) == 0
    printed = capsys.readouterr().out
    assert "0.515" in printed and "95 % t-interval" in printed
    page = (folder.parent / "out.html").read_text()
    assert (
        "<svg" in page
        and "<script" not in page
        and "http" not in page.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    )
    ElementTree.fromstring((folder.parent / "out.svg").read_text())
    numbers = json.loads((folder.parent / "out.json").read_text())["comparisons"][0]
    assert [group["label"] for group in numbers["groups"]] == ["plain", "tracin"]
    assert numbers["groups"][1]["difference_to_first"]["mean"] == pytest.approx(0.5)


def test_influence_in_nats_and_that_of_captured_factors_are_not_compared(folder: Path) -> None:
    in_nats = influence_columns()
    older = {name: values for name, values in in_nats.items() if not name.startswith("influence")}
    older["influence_position"] = in_nats["influence"]
    runs = []
    for name, columns in (("nats", in_nats), ("older", older), ("without", None)):
        path = write_run(folder.parent / name, 0, 0.05)
        RunFiles(path).log(STEPS, {"score": 1.0, "influence_trace/validity": 0.9})
        if columns is not None:
            with TraceWriter(path, "influence_trace", on_error="raise") as writer:
                writer.write(1, columns)
        runs.append(load_run(path))
    assert [run.influence_unit for run in runs] == ["nats", "influence", ""]
    with pytest.raises(GradtraceError, match="nats in nats, and in the unit of captured factors in older"):
        compare(group_runs(runs), "influence_trace/validity")
    assert compare(group_runs(runs), "score").groups
    assert compare(group_runs([runs[0], runs[2]]), "influence_trace/validity").groups


def test_bad_requests_are_said_in_one_sentence(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(path) for path in sorted(folder.iterdir())]
    for arguments, words in (
        (["-o", "x.png"], "must end in .html, .svg, .json"),
        (
            ["--metric", "score", "--against", "steps", "--against", "time", "-o", "x.svg"],
            "an SVG holds one picture",
        ),
        (["--metric", "score", "--at", "99"], "cannot be compared at steps = 99"),
        (["--metric", "skore"], "nearest it has is score"),
        (["--smooth", "0", "--metric", "score"], "1 or more"),
    ):
        assert main(["compare", *runs, *arguments]) == 2
        assert words in capsys.readouterr().err
    assert main(["compare", str(folder)]) == 2
    assert "no run at" in capsys.readouterr().err


def test_without_a_metric_the_validation_reward_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = RunFiles(tmp_path / "run")
    files.log(1, {"critic/rewards/mean": 0.1, "val-core/arithmetic/reward/mean@4": 0.25})
    assert main(["compare", str(tmp_path / "run")]) == 0
    assert "val-core/arithmetic/reward/mean@4" in capsys.readouterr().out
    assert main(["compare", str(tmp_path / "run"), "--list"]) == 0
    assert "critic/rewards/mean" in capsys.readouterr().out
