"""exl3eval: exact KL divergence of EXL3 models and kernels, with intervals and a verdict.

Importing this package loads neither torch nor transformers; each module imports what it needs.
"""

__version__ = "0.1.0"
