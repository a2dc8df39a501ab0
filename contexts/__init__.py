"""Held-out texts, shipped with the package as `exl3eval.contexts`. Data only; see `exl3eval.suite`."""
