"""The environment server: one `POST /run` is one episode."""
