"""Scores from captured factors: for y = Wx, u = ∂loss/∂y and v = x at every position of a real backward pass.

For the definitions that are not `InfluenceConfig.is_parts`, and for TracIn's products (ghost.py). Start with engine.py:
layers.py has the hooks, capture.py sorts what they deliver, one_pass.py scores it inside the backward pass, and
loss_terms.py afterwards.
"""
