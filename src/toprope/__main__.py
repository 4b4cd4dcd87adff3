"""`python -m toprope` is the program `toprope`."""

from toprope.cli.app import main

main()
