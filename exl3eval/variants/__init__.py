"""Declared variants, one TOML file each. Data only; see `exl3eval.variant`."""
