from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradtrace.rollout import SamplingParams
from gradtrace.rollout import draw as draw_module
from gradtrace.rollout.draw import draw

SMALL, LARGE = 40, 3001  # one level of search, and blocks with a remainder


def filtered_probabilities(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The definition at the top of draw.py, by plain sorting, in float64."""
    values, order = (logits.double() / params.temperature).sort(descending=True, stable=True)
    if params.top_k:
        values[params.top_k :] = -torch.inf
    probabilities = values.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    probabilities[before >= params.top_p] = 0
    return torch.zeros_like(probabilities).scatter(0, order, probabilities / probabilities.sum())


@pytest.mark.parametrize("vocabulary", [SMALL, LARGE])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.6),
        SamplingParams(top_p=0.999, temperature=3.0),
        SamplingParams(top_k=12, top_p=0.7, temperature=1.5),
        SamplingParams(top_k=10_000, top_p=0.9),
    ],
    ids=repr,
)
def test_draws_invert_the_filtered_distribution(vocabulary: int, params: SamplingParams) -> None:
    """Evenly spaced uniforms must hit every token in proportion to its probability, to within one draw."""
    torch.manual_seed(0)
    logits = torch.randn(vocabulary) * 2
    count = 20_000 if vocabulary == SMALL else 4_000
    uniforms = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    expected = filtered_probabilities(logits, params)
    tokens, log_probs = draw(logits.expand(count, -1), params, uniforms)
    hits = torch.bincount(tokens, minlength=vocabulary).double()
    assert ((hits - expected * count).abs() <= 1.0 + 1e-3).all()
    torch.testing.assert_close(log_probs.double(), expected[tokens].log(), atol=1e-5, rtol=1e-5)


def test_top_p_falls_back_to_a_full_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    logits, uniforms = torch.randn(64, LARGE), torch.rand(64, dtype=torch.float64)
    params = SamplingParams(top_p=0.95)
    expected = draw(logits, params, uniforms)
    monkeypatch.setattr(draw_module, "TOP_P_CANDIDATES", 8)
    tokens, log_probs = draw(logits, params, uniforms)
    assert torch.equal(tokens, expected[0])
    torch.testing.assert_close(log_probs, expected[1])


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    torch.manual_seed(0)
    logits, uniforms = torch.randn(9, LARGE), torch.rand(9, dtype=torch.float64)
    for params in (SamplingParams(), SamplingParams(top_p=0.9), SamplingParams(top_k=7)):
        together, _ = draw(logits, params, uniforms)
        alone = [draw(logits[i : i + 1], params, uniforms[i : i + 1])[0] for i in range(9)]
        assert torch.equal(together, torch.cat(alone))


@given(
    uniform=st.sampled_from([0.0, 1e-300, 0.5, 1 - 2**-53]) | st.floats(0, 1, exclude_max=True),
    possible=st.lists(st.integers(0, LARGE - 1), min_size=1, max_size=4, unique=True),
    vocabulary=st.sampled_from([SMALL, LARGE]),
)
@settings(max_examples=150, deadline=None)
def test_impossible_tokens_are_never_drawn(uniform: float, possible: list[int], vocabulary: int) -> None:
    allowed = sorted({token % vocabulary for token in possible})
    logits = torch.full((1, vocabulary), -torch.inf)
    logits[0, allowed] = torch.linspace(-60, 60, len(allowed))
    token, log_prob = draw(logits, SamplingParams(), torch.tensor([uniform], dtype=torch.float64))
    assert int(token) in allowed
    assert torch.isfinite(log_prob).all()


def test_greedy_takes_the_largest() -> None:
    logits = torch.randn(5, SMALL)
    tokens, log_probs = draw(logits, SamplingParams(temperature=0, top_k=3), torch.zeros(5, dtype=torch.float64))
    assert torch.equal(tokens, logits.argmax(-1))
    torch.testing.assert_close(log_probs, logits.log_softmax(-1).amax(-1))
