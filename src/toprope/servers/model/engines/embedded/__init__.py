"""The embedded engine: a real small language model inside this process, offline, with every id and logprob exact."""
