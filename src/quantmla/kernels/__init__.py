"""Attention over the packed cache."""
