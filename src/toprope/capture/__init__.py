"""Custody of sampled tokens: protocols, stores, recorder, delivery. Never decides rewards."""
