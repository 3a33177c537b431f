"""Grouped-query checkpoints in, native MLA checkpoints out, without training."""
