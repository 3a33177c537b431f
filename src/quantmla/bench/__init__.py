"""How fast the kernels are, beside BF16 kernels in the same run."""
