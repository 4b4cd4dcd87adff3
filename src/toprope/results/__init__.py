"""The durable ledger of a run: manifest, journal, result and failure rows, and their readers."""
