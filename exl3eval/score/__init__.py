"""Exact divergences per position, from two arms' FP32 logits."""
