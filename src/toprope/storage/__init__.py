"""What a durable file needs: append, sync, repair, lock. Knows bytes and rows, nothing else."""
