"""Running an arm: a model directory under a variant, over contexts, to hidden states and logits."""
