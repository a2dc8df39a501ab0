"""The gate: from stored runs and a declared policy to a verdict that a CI can act on."""
