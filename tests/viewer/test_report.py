"""The report: one file, opened from the disk, without a server and without a network."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from gradtrace.cli import main
from gradtrace.commands.report import make_report, show
from gradtrace.errors import GradtraceError
from gradtrace.viewer.bundle import bundle_script
from gradtrace.viewer.server import static_files
from tests.viewer.serving import Watched
from tests.viewer.test_live_and_broken import HOSTILE, RUN_NAME, hostile_run


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1440, "height": 900}, offline=True)
    context.set_default_timeout(30_000)
    yield context.new_page()
    context.close()


def test_a_report_works_from_the_disk(page: Page, runs_dir: Path, tmp_path: Path) -> None:
    output = tmp_path / "report.html"
    runs = [str(runs_dir / "chains"), str(runs_dir / "chains-b")]
    assert main(["report", *runs, "-o", str(output), "--steps", "2", "--max-groups", "3"]) == 0
    watched = Watched(page, output.as_uri().rsplit("/", 1)[0])
    watched.open("report.html")
    expect(page.locator(".keys .key .mono")).to_have_text(["chains", "chains-b"])
    expect(page.locator("[data-chart=reward] path.line:not(.raw)")).to_have_count(2)
    page.get_by_role("link", name="Step 2").click()
    expect(page.locator("tbody tr")).to_have_count(12)
    expect(page.locator("tr.opens")).to_have_count(3)
    page.locator("tr.opens:has(td.c-change:not(:text('–')))").click()
    page.locator(".row .slot-1 .t").nth(4).click()
    expect(page.locator(".bar-column")).to_have_count(8)
    page.locator(".response-id").first.click()
    expect(page.locator(".legend.slot-1 .target")).to_contain_text("on r")
    before = page.locator(".prompt .caption").text_content()
    page.reload()
    expect(page.locator(".prompt .caption")).to_have_text(before or "")
    page.keyboard.press("l")
    expect(page.locator(".prompt .caption")).not_to_have_text(before or "")
    page.get_by_role("link", name="Tokens").click()
    expect(page.locator("td.c-count").first).to_be_visible()
    assert watched.errors == [] and watched.foreign_requests == []


def test_a_report_holds_nothing_from_elsewhere(runs_dir: Path) -> None:
    page = make_report([runs_dir / "prose"], max_groups=1).page
    assert not re.search(r"(src|href)=", page.split("<script")[0])
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in page


def test_hostile_text_cannot_leave_the_data_of_a_report(page: Page, tmp_path: Path) -> None:
    output = tmp_path / "report.html"
    output.write_text(make_report([hostile_run(tmp_path)]).page, encoding="utf-8")
    for hash_ in ("#/run", "#/step", "#/group", "#/tokens?min=1"):
        page.goto(output.as_uri() + hash_)
        page.reload()
        expect(page.locator("main > div")).to_be_visible()
        assert page.evaluate("window.hacked") is None
    page.goto(output.as_uri() + "#/group")
    page.reload()
    expect(page.locator(".row .slot-1 .t").first).to_have_text(HOSTILE[0].decode())
    assert page.title().endswith("gradtrace") and RUN_NAME in page.title()


def test_show_works_inside_a_notebook_frame(page: Page, runs_dir: Path, tmp_path: Path) -> None:
    notebook = tmp_path / "notebook.html"
    cell = show(runs_dir / "chains", steps=[2])._repr_html_()
    notebook.write_text(f"<!doctype html><h1>cell</h1>{cell}", encoding="utf-8")
    page.goto(notebook.as_uri())
    frame = page.frame_locator("iframe")
    frame.get_by_role("link", name="Group").click()
    frame.locator(".row .slot-1 .t").nth(4).click()
    expect(frame.locator(".bar-column")).to_have_count(8)
    assert page.url == notebook.as_uri()  # links of the frame do not move the notebook
    assert 'sandbox="allow-scripts"' in cell


def test_asking_for_what_is_not_there_is_an_error(runs_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(GradtraceError, match="no trace of step 99"):
        make_report([runs_dir / "chains"], steps=[99])
    with pytest.raises(GradtraceError, match="groups 0 to 11"):
        make_report([runs_dir / "chains"], groups=[50])
    with pytest.raises(GradtraceError, match="no run at"):
        show(tmp_path)


def test_effects_beyond_the_budget_are_left_out_and_said(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradtrace.commands.report.PAIRWISE_BUDGET", 1_000)
    report = make_report([runs_dir / "chains"], steps=[2], max_groups=4)
    assert report.groups == 4 and any("left out" in remark for remark in report.remarks)


def test_modules_can_be_bundled_and_names_do_not_clash() -> None:
    script = bundle_script(static_files())
    assert not re.search(r"^\s*(import|export) ", script, re.M)
    assert script.index("// js/dom.js") < script.index("// js/app.js") < script.index("// js/main.js")


def test_the_bundler_refuses_what_it_does_not_understand() -> None:
    with pytest.raises(ValueError, match="both export one"):
        bundle_script({
            "js/main.js": b'import { one } from "./a.js";\nimport { two } from "./b.js";\n',
            "js/a.js": b"export const one = 1;\n",
            "js/b.js": b"export const one = 2;\nexport const two = 2;\n",
        })  # fmt: skip
    with pytest.raises(ValueError, match="circle"):
        bundle_script({
            "js/main.js": b'import { a } from "./a.js";\n',
            "js/a.js": b'import { b } from "./b.js";\nexport const a = 1;\n',
            "js/b.js": b'import { a } from "./a.js";\nexport const b = 1;\n',
        })  # fmt: skip
    with pytest.raises(ValueError, match="does not know"):
        bundle_script({"js/main.js": b'import * as all from "./a.js";\n'})


def test_every_module_of_the_viewer_is_reached_from_its_entry() -> None:
    script = bundle_script(static_files())
    modules = [name for name in static_files() if name.endswith(".js")]
    assert [name for name in modules if f"// {name}\n" not in script] == []


def test_a_report_holds_the_pages_of_tracin_and_the_probe(page: Page, runs_dir: Path, tmp_path: Path) -> None:
    output = tmp_path / "report.html"
    output.write_text(make_report([runs_dir / "chains"], steps=[2]).page, encoding="utf-8")
    page.goto(output.as_uri())
    page.get_by_role("link", name="TracIn").click()
    expect(page.locator("h1")).to_have_text("TracIn, step 2")
    page.locator(".responses tr.opens").first.click()
    expect(page.locator(".opened .t").first).to_be_visible()
    page.get_by_role("link", name="Entropy probe").click()
    expect(page.locator("h1")).to_have_text("Entropy probe, step 2")
    expect(page.locator(".probe-row .map .t").first).to_be_visible()


def test_what_a_report_leaves_out_is_said_on_its_page(
    page: Page, runs_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradtrace.viewer.pages.RESPONSES", 1)
    output = tmp_path / "report.html"
    output.write_text(make_report([runs_dir / "chains"], steps=[2]).page, encoding="utf-8")
    page.goto(output.as_uri() + "#/tracin")
    page.locator(".responses tr.opens").nth(3).click()
    expect(page.locator(".opened")).to_contain_text("This report does not hold that part of the run. Its beginning:")
