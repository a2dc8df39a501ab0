"""`kernels check`: the exactness properties that every route must have, and proof that the checks can fail."""
