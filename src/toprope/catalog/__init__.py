"""The environments and agents that ship."""
