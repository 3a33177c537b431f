"""`python -m quantmla` is `quantmla`."""

from quantmla.cli import main

main()
