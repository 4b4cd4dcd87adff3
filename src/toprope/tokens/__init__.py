"""The record of one model call, its lineage and the life of a rollout's capture. Never touches disk."""
