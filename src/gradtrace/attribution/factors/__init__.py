"""Scores from captured factors: for y = Wx, u = ∂loss/∂y and v = x at every position of a real backward pass.

For the definitions that `InfluenceConfig.uses_factors` names, for TracIn's products and for norms of single responses.
Start with engine.py; hooks.py captures, scoring.py scores inside the backward pass, loss_terms.py afterwards.
"""
