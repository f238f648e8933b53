"""An instrument that one file defines is traced in a real run, listed, shown, exported and reported by everything."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
from playwright.sync_api import Browser, expect

from gradtrace import open_run
from gradtrace.cli import main
from gradtrace.commands.report import make_report
from gradtrace.errors import GradtraceError
from gradtrace.instruments.entropy_trace import RECORD as ENTROPY_RECORD
from gradtrace.instruments.entropy_trace import EntropyTraceConfig
from gradtrace.instruments.entropy_trace.reporter import EntropyReporter
from gradtrace.instruments.record import Record
from gradtrace.trace.columns import Column, InstrumentRecord, register_instrument
from gradtrace.trace.token_text import TokenBytes
from gradtrace.trace.writer import TraceWriter
from tests.instruments import calibration
from tests.training import small
from tests.viewer.serving import Watched, serving


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    calibration.register()
    folder = tmp_path_factory.mktemp("calibrated")
    path = folder / "run"
    trainer = small.trainer(folder, "trainer.total_steps=2")
    entropies = Record(ENTROPY_RECORD, EntropyTraceConfig(), TraceWriter(path, "entropy_trace", on_error="raise"))
    trainer.steps.add("entropy_trace", EntropyReporter(entropies))
    trainer.steps.add("calibration", calibration.Calibration(path))
    trainer.fit(0)
    entropies.close()
    trainer.files.write_token_bytes(TokenBytes.from_tokenizer(trainer.components.task.tokenizer))
    yield path
    calibration.forget()


def test_it_is_traced_and_read_back(run_dir: Path) -> None:
    step = open_run(run_dir).step("calibration", 2)
    assert step["confidence"][0] == pytest.approx(step.tokens(0)["probability"].mean())
    assert step.meta["brier"] == open_run(run_dir).metrics()[0][-1]["calibration/brier"]


def test_it_is_listed_and_shown_in_the_terminal(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "ls", str(run_dir)]) == 0
    assert "how sure the policy was" in capsys.readouterr().out.replace("\n", " ")
    assert main(["trace", "show", str(run_dir), "--kind", "calibration", "--color", "never"]) == 0
    shown = capsys.readouterr().out
    assert "probability: probability of the token" in shown and "confidence" in shown


def test_it_is_exported(run_dir: Path, tmp_path: Path) -> None:
    target = tmp_path / "tokens.parquet"
    assert main(["trace", "export", str(run_dir), str(target), "--kind", "calibration"]) == 0
    table = pyarrow.parquet.read_table(target)
    assert {"confidence", "probability", "text"} <= set(table.column_names)
    assert table.num_rows == sum(entry.tokens for entry in open_run(run_dir).entries("calibration").values())


def test_the_viewer_shows_it(run_dir: Path, browser: Browser) -> None:
    step = open_run(run_dir).step("calibration", 2)
    surest = int(step["confidence"].argmax())
    with serving([run_dir]) as address:
        watched = Watched(browser.new_page(viewport={"width": 1440, "height": 900}), address)
        page = watched.open("#/run")
        page.get_by_role("link", name="Calibration").click()
        expect(page.locator("h1")).to_have_text("Calibration, step 2")
        expect(page.locator("tr.opens")).to_have_count(step.n_responses)
        first = page.locator("tr.opens").first
        assert first.get_attribute("data-response") == str(surest)  # by its first number, highest first
        first.click()
        expect(page.locator(".opened .t")).to_have_count(int(step["length"][surest]))
        expect(page.locator(".opened .tokens")).to_have_attribute("data-channel", "probability")
        page.keyboard.press("[")
        expect(page.locator("h1")).to_have_text("Calibration, step 1")
        assert watched.errors == [] and watched.foreign_requests == []
        page.close()


def test_a_column_with_a_channel_is_a_colour_of_the_group_page(run_dir: Path, browser: Browser) -> None:
    table = open_run(run_dir).step_table(2)
    assert table.channels()["probability"].channel == "Probability"
    g = next(g for g in range(table.n_groups) if len(table.members(g)))
    r = int(table.members(g)[0])
    values = table.need("probability")[table.tokens(r)]
    with serving([run_dir]) as address:
        watched = Watched(browser.new_page(viewport={"width": 1440, "height": 900}), address)
        page = watched.open(f"#/group?step=2&group={g}&view=stack&scale=group")
        page.get_by_label("What column 2 shows").select_option("Probability")
        expect(page.locator(".legend.slot-1 .unit")).to_have_text("of 1")
        expect(page.locator(".explain .slot-1")).to_have_text("Probability of the token.")
        row = page.locator(".row[aria-label^='Response r0,']")
        row.scroll_into_view_if_needed()
        expect(row.locator(".slot-1 .t")).to_have_count(len(values))
        top = float(np.quantile(table.need("probability")[table.tokens_of(table.members(g))], 0.99))
        level = min(6, 1 + int(float(values[0]) / top * 6)) if values[0] / top >= 0.06 else None
        expect(row.locator(".slot-1 .t").first).to_have_class(re.compile(rf"\bl{level}\b" if level else r"\bt\b"))
        row.locator(".slot-1 .t").first.hover()
        expect(page.locator(".readout")).to_contain_text("probability")
        page.reload()  # the colour is in the address
        expect(page.get_by_label("What column 2 shows")).to_have_value("probability")
        assert watched.errors == [] and watched.foreign_requests == []
        page.close()


def test_a_report_holds_it(run_dir: Path, browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(make_report([run_dir]).page)
    page = browser.new_page()
    page.goto(f"file://{file}#/calibration")
    expect(page.locator("h1")).to_have_text("Calibration, step 2")
    page.close()


def test_records_that_contradict_others_are_refused() -> None:
    def record(**changes: object) -> InstrumentRecord:
        plain = {"name": "mine", "label": "Mine", "meaning": "m", "switch": "s=1", "required": ("group_id",)}
        return InstrumentRecord(**{**plain, **changes})  # type: ignore[arg-type]

    with pytest.raises(GradtraceError, match="already"):
        register_instrument(record(name="tracin"))
    with pytest.raises(GradtraceError, match="described twice"):
        register_instrument(record(brings=(Column("entropy", "int32", "token", "another one"),)))
    with pytest.raises(GradtraceError, match="nothing describes: nowhere"):
        register_instrument(record(required=("nowhere",)))
    with pytest.raises(GradtraceError, match="belongs to 'entropy_probe'"):
        register_instrument(record(page="probe"))
