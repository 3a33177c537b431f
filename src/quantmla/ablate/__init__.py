"""Every method in every format on one model: which part of the result comes from where."""
