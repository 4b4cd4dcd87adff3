"""Bytes that compare: canonical JSON, digests, rolling hashes."""
