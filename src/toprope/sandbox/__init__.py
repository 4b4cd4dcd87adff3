"""Sandboxes: where code that nobody vouches for runs, behind one small interface; leases, so that none is orphaned."""
