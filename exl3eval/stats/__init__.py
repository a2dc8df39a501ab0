"""Cluster statistics: intervals, paired differences, tests. Arrays in, dataclasses out."""
