"""Speed of the kernels on synthetic weights: a benchmark, and the dispatch tables that come out of it."""
