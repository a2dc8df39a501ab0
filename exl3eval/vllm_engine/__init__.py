"""vLLM as an engine: each arm in a fresh child process, scored on the logits that the engine itself emitted."""
