"""Scores of a checkpoint, measured through the packed cache, with what is needed to repeat them."""
