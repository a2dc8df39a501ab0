"""Policies that come with the package."""
