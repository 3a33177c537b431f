"""Inference engines that run a model on the packed cache."""
