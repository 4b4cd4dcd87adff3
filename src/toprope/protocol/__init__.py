"""Our own messages between servers, closed where NeMo Gym's are closed."""
