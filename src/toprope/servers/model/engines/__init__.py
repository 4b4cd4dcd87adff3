"""Engines: one small interface, adapters beside it."""
