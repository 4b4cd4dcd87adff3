"""The composition root: configuration in, running system out."""
