"""`toprope show`."""


def show() -> None:
    """Show."""
