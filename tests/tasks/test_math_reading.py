"""What a mathematical answer says is read as a whole: lists, several boxes, tags, and no reward for two answers."""

from __future__ import annotations

import os

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gradtrace.tasks.rewards import named_reward
from gradtrace.tasks.verification.judge import judge

EXAMPLES = int(os.environ.get("GRADTRACE_FUZZ", "100"))


def score(response: str, answer: str, require: str = "any") -> float:
    """The judge's verdict in this process: nothing here takes long."""
    return judge({"response": response, "answer": answer, "require": require})["score"]


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        (r"\boxed{3, 5, 7}", "3,5,7", 1.0),
        ("#### 3,5,7", "7, 3, 5", 1.0),
        (r"\boxed{-2,1}", "$-2,1$", 1.0),
        (r"\boxed{1,234,567}", "1234567", 1.0),
        ("#### 1,234.5", "1234.5", 1.0),
        ("Answer: 1000,99 €", "1000.99", 1.0),
        (r"\boxed{1,2}", "1.2", 0.0),
        (r"\boxed{1.2}", "1,2", 0.0),
        (r"\boxed{3.57}", "3,5,7", 0.0),
        ("#### 3.5", "3,5,7", 0.0),
        ("#### 1,23", "123", 0.0),
        ("#### 1,234", "1.234", 0.0),
    ],
)
def test_comma_groups_thousands_only_before_three_digits(response: str, answer: str, expected: float) -> None:
    assert score(response, answer) == expected


@pytest.mark.parametrize(
    "response",
    [
        "<think>9+9</think><answer>The total is 18.</answer>",
        "<think>9+9</think>\n<answer>\n18\n</answer>",
        r"<answer>\boxed{18}</answer>",
        "<answer>#### 18</answer>",
        "<answer>18</answer> I checked it 3 times.",
        "The total is 18</answer>",
        "18</answer>",
        "18.<|im_end|>",
        "18.</s>",
        "The total is 18.<|im_end|>\n<|im_start|>user",
        "18<｜end▁of▁sentence｜>",
        "#### 18</s>",
        "Answer: 18<end_of_turn>",
    ],
)
def test_answer_in_tags_counts(response: str) -> None:
    assert score(response, "18") == 1.0
    assert score(response, "17") == 0.0


def test_answer_in_tags_is_a_form_that_can_be_required() -> None:
    responses = ["<answer>The total is 18.</answer>", r"\boxed{18}", "18", r"<answer>\boxed{18}</answer>"]
    assert [score(response, "18", "answer") for response in responses] == [1.0, 0.0, 0.0, 0.0]
    assert named_reward("math", {"require": "answer", "workers": 1})(responses[:1], [{"answer": "18"}]) == [1.0]


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        (r"\boxed{1,2}", r"\boxed{1} and \boxed{2}", 1.0),
        (r"\boxed{2} and \boxed{1}", "1, 2", 1.0),
        (r"\(\boxed{1}\), \(\boxed{2}\)", r"\boxed{1,2}", 1.0),
        (r"\boxed{(1,2)} \quad \text{and} \quad \boxed{(2,1)}", "(1,2),(2,1)", 1.0),
        (r"\boxed{2}", r"\boxed{1} and \boxed{2}", 0.0),
        (r"\boxed{17} or \boxed{18}", "18", 0.0),
        (r"\boxed{17} \boxed{18}", "18", 0.0),
        (r"\boxed{18}, \boxed{18}", "18", 1.0),
        (r"\boxed{17} no, \boxed{18}", "18", 1.0),
        (r"\boxed{9} and therefore \boxed{18}", "18", 1.0),
        (r"\boxed{18} no, \boxed{17}", "18", 0.0),
        (r"\boxed{\{1,2\}}", "2, 1", 1.0),
        (r"\boxed{(1,2)}", "(1, 2)", 1.0),
        (r"\boxed{(2,1)}", "(1, 2)", 0.0),
        (r"\boxed{[1,2]}", "(1, 2)", 0.0),
    ],
)
def test_boxes_that_are_one_answer_are_a_list_and_else_the_last_counts(
    response: str, answer: str, expected: float
) -> None:
    assert score(response, answer) == expected


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("2, -2", r"\pm 2"),
        (r"\boxed{2, -2}", r"\pm 2"),
        (r"\boxed{\pm 2}", "2, -2"),
        ("x != 5", r"x \neq 5"),
        (r"\boxed{x \neq 5}", "x != 5"),
        ("#### x <= 5", r"x \leq 5"),
        ("28 percent", r"28\%"),
        (r"\boxed{28\text{ percent}}", r"28\%"),
        ("It is 50% of 1, so 0.5", "0.5"),
        ("So x > 3 and the answer is 18", "18"),
        ("The answer is 18. Note that 20 > 18.", "18"),
        ("#### .5", "0.5"),
        ("x = 1 or x = 2", r"x=1 \text{ or } x=2"),
        (r"\boxed{x = 1 \lor x = 2}", "x=2, x=1"),
        ("The roots are 3 and 5.", "3, 5"),
        (r"\boxed{\text{at least }18}", r"\text{at least } 18"),
        (r"\boxed{3\text{ h }20\text{ min}}", r"3 \text{ h } 20 \text{ min}"),
        (r"\boxed{\frac{1}{\mathrm{e}}}", r"e^{-1}"),
        (r"\boxed{5\text{ cm}^2}", "5"),
        (r"\boxed{\frac{1}{3} \approx 0.33}", "1/3"),
        (r"\boxed{≈ 18}", "18"),
        (r"\boxed{8\pi.}", r"8\pi"),
        (r"The answer is $\begin{pmatrix}-1&0\0&-1\end{pmatrix}$.", r"\begin{pmatrix}-1&0\0&-1\end{pmatrix}"),
        (r"\boxed{x = 1,000 \text{ m}}", "1000"),
        # Numbers beside the answer are no alternatives to it.
        ("In 3 days he has 18", "18"),
        ("With $10 she could buy 5 pens.", "5"),
        ("Final answer: 17 apples in the morning make 18 in all.", "18"),
        ("the number is not 10 which is 18", "18"),
    ],
)
def test_same_answer_in_other_words(response: str, answer: str) -> None:
    assert score(response, answer) == 1.0


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"\boxed{3\text{ h }20\text{ min}}", r"3\text{ h }40\text{ min}"),
        (r"\boxed{1+\frac{1}{\mathrm{e}}}", r"1-\frac{1}{\mathrm{e}}"),
        (r"\boxed{18 \text{ alternatively } \frac{17}{1}}", "18"),
        (r"\boxed{18 \text{ (or 17)}}", "18"),
        (r"\boxed{18 \text{ or more}}", "18"),
        (r"\boxed{x=17=18}", "18"),
        (r"\boxed{17 \approx 18}", "18"),
        (r"\boxed{17 \to 18}", "18"),
        ("18 is not the answer", "18"),
        ("18 < x", "18"),
        ("no more than 18", "18"),
        (r"either $x$ or maybe $y$", "y"),
    ],
)
def test_what_math_verify_would_leave_out_counts(response: str, answer: str) -> None:
    assert score(response, answer) == 0.0


@pytest.mark.parametrize("name", ["gsm8k", "last_number"])
@pytest.mark.parametrize(
    ("text", "expected"),
    [(".5", 1.0), ("$.50", 1.0), ("0.5</s>", 1.0), ("0.5<|im_end|>", 1.0), ("5", 0.0), ("0.5 or 0.6", 0.0),
     ("0.6, maybe 0.5", 0.0), ("0.5, 0.6", 0.0), ("0,5", 0.0), ("0.5/3", 0.0), ("0.5 or more", 0.0)],
)  # fmt: skip
def test_rewards_that_read_one_number_know_hedges_and_points(name: str, text: str, expected: float) -> None:
    response = f"#### {text}" if name == "gsm8k" else f"Answer: {text}"
    for answer in ("0.5", "#### .5") if name == "gsm8k" else ("0.5", ".5"):
        assert named_reward(name)([response], [{"answer": answer}]) == [expected]


# ---------------------------------------------------------------- beside math-verify

FORMS = (
    *("-5", "1/2", r"\frac{1}{2}", "0.5", "1,000", "1000", r"\sqrt{8}", r"2\sqrt{2}", "(1,2)", "[1,2]"),
    *(r"\{1,2\}", r"\{2,1\}", "2,1", "x=3", "3", r"(-\infty,2]", r"x \leq 2", "x^2+1", "1+x^2", r"\pm 2", "2,-2"),
)
OURS = {(gold, r"50\%") for gold in ("1/2", r"\frac{1}{2}", "0.5")}
"""Pairs that are equal here and not there: a share and its percentage."""


def test_boxed_answers_are_judged_as_math_verify_judges_them() -> None:
    """Every form of an answer against every other one."""
    from math_verify import parse, verify

    other = set()
    for gold in FORMS:
        for said in (*FORMS, r"50\%"):
            theirs = float(verify(parse(rf"\boxed{{{gold}}}"), parse(rf"\boxed{{{said}}}")))
            if score(rf"\boxed{{{said}}}", rf"\boxed{{{gold}}}") != theirs:
                other.add((gold, said))
    assert other == OURS


# ---------------------------------------------------------------- hedges

NUMBERS = st.lists(st.integers(2, 99), min_size=2, max_size=4, unique=True)
IN_WORDS = [
    *(
        " or ",
        ", or ",
        " or maybe ",
        ", maybe ",
        " maybe ",
        ", perhaps ",
        ", possibly ",
        " or possibly ",
        " and ",
        ", ",
    ),
    *(
        "; ",
        " to ",
        "–",
        " – ",
        " through ",
        " | ",
        " & ",
        " / or ",
        "? Maybe ",
        ". Or maybe ",
        ", alternatively ",
        "? ",
    ),
    *(
        " or else ",
        ", but it could be ",
        ", though it might also be ",
        r" \lor ",
        r" \cup ",
        r" \vee ",
        " or, rather, ",
    ),
    *(" apples or ", " apples, or perhaps ", r" \text{ or } ", r"\text{, maybe }", " (or ", ", otherwise "),
]
IN_LATEX = [
    *(r" \lor ", r"\cup ", r" \vee ", r" \land ", r" \text{ or } ", r" \text{ or maybe } ", r"\text{, maybe }", ", "),
    *(" or ", "; ", r" \mid ", r" \quad \text{or} \quad ", r" \text{ apples, perhaps } ", r" \& ", " and ", r" \to "),
    *(r" \mathrm{\ or\ } ", r"\text{–}", r" \text{ (maybe not) } ", r" \implies ", " or maybe ", "|"),
]
WORDS = [
    *(
        "{}",
        "{}.",
        "The total is {}.",
        "Answer: {}",
        "So the answer is {}.",
        "#### {}",
        "<answer>{}</answer>",
        "{}</s>",
    ),
    *(
        "<think>9 + 9</think><answer>It is {}.</answer>",
        "**Answer:** {}",
        "Final answer: {}",
        "9 + 9. It is {} apples.",
    ),
    *("First we add.\nThe total is {}<|im_end|>", "{}</answer>", "It is either {}.", "The answer is ${}$.", r"\({}\)"),
]
LATEX = [r"\boxed{%s}", r"So $\boxed{%s}$.", r"<answer>\boxed{%s}</answer>", r"\boxed{x = %s}", r"\[\boxed{%s}\]"]
LATEX += [r"\boxed{%s \text{ apples}}", r"\boxed{\text{either } %s}", r"#### $%s$", "$%s$"]
BETWEEN_BOXES = [" or ", " and ", ", ", " ", "; ", r" \text{ or } ", "$ or $", " or maybe ", r"\quad\text{or}\quad"]
BOUNDS = [
    *(
        "not {}",
        "at least {}",
        "at most {}",
        "more than {}",
        "fewer than {}",
        "under {}",
        "> {}",
        "≥ {}",
        ">= {}",
        "!= {}",
    ),
    *(
        r"\ge {}",
        r"\neq {}",
        "{} or more",
        "{} or less",
        "{} < x",
        "x > {}",
        "it isn't {}",
        "never {}",
        "{} at most",
        "{}+",
    ),
]


@st.composite
def hedges(draw: st.DrawFn) -> tuple[str, str]:
    """A response that names several answers, or bounds or denies the one it names, and that right answer."""
    numbers = draw(NUMBERS)
    right = str(draw(st.sampled_from(numbers)))
    form = draw(st.sampled_from(["words", "latex", "boxes", "bound"]))
    if form == "bound":
        template = draw(st.sampled_from([*WORDS[:11], r"\boxed{{{}}}"]))
        return template.format(draw(st.sampled_from(BOUNDS)).format(right)), right
    between = {"words": IN_WORDS, "latex": IN_LATEX, "boxes": BETWEEN_BOXES}[form]
    parts = [rf"\boxed{{{number}}}" if form == "boxes" else str(number) for number in numbers]
    text = parts[0] + "".join(draw(st.sampled_from(between)) + part for part in parts[1:])
    if form == "latex":
        return draw(st.sampled_from(LATEX)) % text, right
    return (text if form == "boxes" else draw(st.sampled_from(WORDS)).replace("{}", text)), right


@settings(max_examples=EXAMPLES, deadline=None)
@given(hedges())
@example((r"\boxed{17 \lor 18}", "18"))
@example((r"\boxed{17\cup 18}", "18"))
@example(("Answer: 17 or maybe 18", "18"))
@example(("17, maybe 16, 15, or 18", "18"))
@example((r"\boxed{1,2}", "1.2"))
@example((r"\boxed{2}", r"\boxed{1} and \boxed{2}"))
@example(("<answer>17 or 18</answer>", "18"))
@example(("17 or 18.<|im_end|>", "18"))
@example((r"\boxed{\pm 2}", "2"))
@example(("#### .5 or .6", "0.5"))
@example(("So x > 3 and the answer is 17 or 18", "18"))
@example((r"\boxed{18 \text{ maybe } 17 \text{ dollars}}", "18"))
def test_hedged_answer_is_worth_nothing(case: tuple[str, str]) -> None:
    response, right = case
    assert score(response, right) == 0.0


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.integers(2, 10**7), st.sampled_from([*WORDS[:15], *LATEX[:6]]), st.booleans())
def test_the_same_forms_without_a_hedge_are_worth_one(value: int, template: str, grouped: bool) -> None:
    text = f"{value:,}" if grouped else str(value)
    assert score(template % text if "%s" in template else template.replace("{}", text), str(value)) == 1.0
