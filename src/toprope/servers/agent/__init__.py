"""The agent server: agent sessions and activations."""
