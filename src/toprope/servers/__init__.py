"""The four roles. They never import each other; they speak only the protocol."""
