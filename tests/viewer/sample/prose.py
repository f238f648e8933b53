"""Sentences for the sample data: solutions of one counting problem, some right, some with a slip.

In braces stands what a solution hangs on: {+ right}, {- wrong}, {* a word that decides how it goes on}.
"""

from __future__ import annotations

import re

PROMPT = (
    "How many positive integers n ≤ 1000 are divisible by 6 or by 10, but not by 15? "
    "Reason step by step, and put the final answer in \\boxed{}."
)
OTHER_PROMPTS = (
    "Find the sum of all positive integers n such that n^2 + 12n - 2007 is a perfect square.",
    "A fair coin is flipped 8 times. What is the probability that no two heads are adjacent?",
    "Let f(x) = x^3 - 3x + 1. How many real solutions does f(f(x)) = 0 have?",
    "What is the remainder when 7^100 is divided by 13?",
    "In how many ways can 10 identical balls be put in 4 distinct boxes so that no box is empty?",
    "The roots of x^2 - 6x + k = 0 differ by 2. Find k.",
    "Compute the number of trailing zeros of 125! in base 10.",
)
ANSWER = "200"

OPENINGS = (
    "{*We} have to count the integers n ≤ 1000 that are multiples of 6 or of 10 and are no multiples of 15.",
    "{*Let} A hold the multiples of 6, B those of 10 and C those of 15. The size of (A ∪ B) \\ C is asked for.",
    "{*First}, in other words: n counts if 6 or 10 divides it, and 15 does not.",
    "{*To} answer this, inclusion-exclusion gives the union, and then the multiples of 15 in it have to go.",
)
SIXES = (
    "{*There} are \\lfloor 1000/6 \\rfloor = {+166} multiples of 6, because 6 \\cdot 166 = 996 and 1002 is too large.",
    "{*The} multiples of 6 are 6, 12, 18, ..., 996. That makes 996 / 6 = {+166} of them.",
)
SIXES_WRONG = (
    "{*The} multiples of 6: 1000 / 6 = 166.67, which rounds to {-167}, so we have {-167} of them.",
    "{*There} are about 1000/6 multiples of 6, that is {-167}.",
)
TENS = (
    "{*There} are \\lfloor 1000/10 \\rfloor = {+100} multiples of 10.",
    "{*Similarly}, 10, 20, ..., 1000 are exactly {+100} numbers.",
)
OVERLAP = (
    "{*Some} are counted twice: the multiples of lcm(6, 10) = {+30}. There are \\lfloor 1000/30 "
    "\\rfloor = {+33} of those.",
    "{*Both} 6 and 10 divide n when {+30} does. Counting these gives {+33}, as 30 \\cdot 33 = 990.",
)
OVERLAP_WRONG = (
    "{*Some} are counted twice: the multiples of 6 \\cdot 10 = {-60}. There are \\lfloor 1000/60 "
    "\\rfloor = {-16} of those.",
    "{*Both} divide n when {-60} does. There are {-16} such numbers, since 60 \\cdot 16 = 960.",
)
UNION = (
    "{*By} inclusion-exclusion the union has {U} elements.",
    "{*Adding} up and taking the double count away, |A ∪ B| = {U}.",
)
REMOVE = (
    "{*Which} of these are multiples of 15? Such a number must be {*even}, so {+30} divides it. There "
    "are {+33} of those.",
    "{*But} only the multiples of 15 that are {*actually} in the union may go. They are the multiples "
    "of {+30}, so {+33} of them.",
)
REMOVE_WRONG = (
    "{*Next} the multiples of 15 go. There are \\lfloor 1000/15 \\rfloor = {-66} of those, so we subtract {-66}.",
    "{*Finally} we take away what 15 divides. Up to 1000 that is {-66} numbers.",
)
CHECKS = (
    "{*Wait}, let me check the overlap. 30 = 2 \\cdot 3 \\cdot 5 is a multiple of 6, of 10 and of 15, "
    "so all of it goes in the last step. That is {+consistent}.",
    "{*Let} me verify it up to 60. There the union has 14 elements, and without 30 and 60 it has "
    "{+12}. The formula gives 10 + 6 - 2 - 2 = {+12}.",
    "{*Checking}: in every block of 30 there are 6, 12, 18, 24 and 10, 20, that is {+6} numbers. 33 "
    "blocks make 198, and 996 and 1000 are left, so {+200}.",
)
CHECKS_WRONG = (
    "{*Let} me look at the first few: 6, 10, 12, 18, 20, 24, 30. Of these {-none} is a problem, so "
    "the count looks right.",
    "{*This} seems reasonable: about a quarter of all integers are multiples of 6 or 10, and we have "
    "{-removed} the multiples of 15.",
)
ENDINGS = (
    "{*Therefore} the answer is {A}.",
    "{*So} the final answer is {A}.",
)

_WORD = re.compile(r"\n+| ?\\[A-Za-z]+| ?[A-Za-z]+|\d| ?[^A-Za-z\d\s]|\s+")
_SPLIT = {
    "inclusion": 5, "exclusion": 3, "multiples": 8, "consistent": 7, "similarly": 7, "actually": 6,
    "reasonable": 6, "integers": 7, "verify": 4, "therefore": 5, "divisible": 5, "formula": 5,
}  # fmt: skip


def pieces(text: str) -> list[str]:
    """Cut like a byte-pair vocabulary does: spaces in front of words, digits alone, some words in two."""
    cut: list[str] = []
    for word in _WORD.findall(text):
        bare = word.lstrip(" ")
        at = _SPLIT.get(bare.lower())
        if at is None:
            cut.append(word)
        else:
            at += len(word) - len(bare)
            cut += [word[:at], word[at:]]
    return cut
