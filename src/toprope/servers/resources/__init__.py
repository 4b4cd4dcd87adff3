"""The resources server: per-episode state, tools and verify."""
