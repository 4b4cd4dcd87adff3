"""Other people's formats, as they spell them. Never converts."""
