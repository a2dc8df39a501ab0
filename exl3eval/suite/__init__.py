"""Held-out contexts: loading, verifying, tokenizing and building a suite."""
