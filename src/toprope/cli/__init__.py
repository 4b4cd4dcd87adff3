"""The `toprope` program: one module a command."""
