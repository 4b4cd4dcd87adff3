"""Snapshot in; trace, or masked with reasons, out. Pure, and never raises on bad evidence."""
