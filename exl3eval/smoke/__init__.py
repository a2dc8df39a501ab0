"""A smoke test of the decode path: a planted secret must come back, and greedy text must go where the reference's goes.

Companions of the divergence, never a substitute: text that looks right does not say how far the distributions are.
"""
