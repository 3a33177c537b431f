"""Checkpoint files: which tensors a family has, how to read them, how to write the fused ones."""
