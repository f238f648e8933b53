"""Texts as people read them: prompts by role, Markdown and LaTeX, characters that tokens cut in two; never as HTML."""

from __future__ import annotations

import re
from pathlib import Path

from playwright.sync_api import expect

from tests.viewer.serving import Watched

RENDER = """async (source) => {
  const { richText } = await import("/static/js/text.js");
  const node = document.createElement("div");
  node.append(...richText(source));
  return node.innerHTML;
}"""
MESSAGES = """async (pieces) => {
  const { messagesOf, readVocabulary } = await import("/static/js/text.js");
  const special = pieces.flatMap(([, control], index) => (control ? [index] : []));
  const ids = pieces.map((_, index) => index);
  return messagesOf(readVocabulary({ ids, bytes: pieces.map(([hex]) => hex), special }));
}"""
CONTROL = re.compile(r"(<\|[^|]*\|>|<start_of_turn>|<end_of_turn>|\[/?INST\]|<｜[^｜]*｜>)")


def plain(html: str) -> str:
    return re.sub(r"<[^>]+>", "", html)


def test_markdown_and_latex_become_readable_text(viewer: Watched) -> None:
    page = viewer.open("#/run")
    for source, shown in {
        r"so \boxed{200}.": "so 200.",
        r"answer in \boxed{}.": r"answer in \boxed{}.",
        r"$x^2 \le \frac{a+b}{2}$": "x2 ≤ (a+b)⁄2",
        r"\[\sqrt{2} \cdot \pi\]": "√2 · π",
        r"\lfloor 7/2 \rfloor, a_b and \unknown": r"⌊ 7/2 ⌋, a_b and \unknown",
        "# Title\n- one **two** `x*y*z`": "Title• one two x*y*z",
        "costs $5": "costs $5",
        "<img src=x onerror=alert(1)>": "&lt;img src=x onerror=alert(1)&gt;",
    }.items():
        html = page.evaluate(RENDER, source)
        assert plain(html) == shown
        assert "<img" not in html


def test_code_keeps_its_text_and_a_formula_over_lines_is_one(viewer: Watched) -> None:
    page = viewer.open("#/run")
    assert page.evaluate(RENDER, "```python\na_b = **c\n```").count("a_b = **c") == 1
    assert 'class="math"' in page.evaluate(RENDER, "$$a\n= b$$")
    assert page.evaluate(RENDER, "x^2").count("<sup>") == 0  # outside of a formula ^ is a character


HEADER = "<|start_header_id|>{}<|end_header_id|>\n\n"
TEMPLATES: dict[str, list[tuple[str, str]] | None] = {
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nuser\n2+2?<|im_end|>\n<|im_start|>assistant\n": [
        ("system", "Be brief."),
        ("user", "user\n2+2?"),
    ],
    f"<|begin|>{HEADER.format('user')}What?<|eot_id|>{HEADER.format('assistant')}": [("user", "What?")],
    "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nYes<end_of_turn>": [
        ("user", "Hi"),
        ("assistant", "Yes"),
    ],
    "[INST] Do it [/INST]": [("user", "Do it")],
    "<｜User｜>Q<｜Assistant｜>": [("user", "Q")],
    "2*8+4=": None,
}


def test_chat_templates_say_who_speaks(viewer: Watched) -> None:
    page = viewer.open("#/run")
    for prompt, messages in TEMPLATES.items():
        parts = [part for part in CONTROL.split(prompt) if part]
        found = page.evaluate(MESSAGES, [(part.encode().hex(), bool(CONTROL.fullmatch(part))) for part in parts])
        assert (None if found is None else [(each["role"], each["text"]) for each in found]) == messages


def test_characters_cut_over_tokens_are_whole_again(viewer: Watched) -> None:
    text = "<|user|>日本🙂 שלום"
    whole = text.encode()
    pieces = [(b"<|user|>".hex(), True), *(((bytes([byte]).hex()), False) for byte in whole[8:])]
    found = viewer.open("#/run").evaluate(MESSAGES, pieces)
    assert found == [{"role": "user", "text": "日本🙂 שלום"}]


def test_a_group_is_read_without_boilerplate_and_its_tokens_are_a_key_away(viewer: Watched, runs_dir: Path) -> None:
    page = viewer.open("#/group?run=prose&step=1&group=1&view=read")
    expect(page.locator(".prompt .readable")).to_be_visible()
    expect(page.locator(".prompt .readable")).not_to_contain_text("im_start")
    expect(page.locator(".row .reading").first).to_be_visible()
    expect(page.locator(".row .t:visible")).to_have_count(0)
    page.get_by_role("button", name="raw").click()
    expect(page.locator(".prompt .text:not(.readable)")).to_contain_text("<|im_start|>")
    page.get_by_role("radio", name="one", exact=True).click()
    expect(page.locator(".row .t:visible").first).to_be_visible()
