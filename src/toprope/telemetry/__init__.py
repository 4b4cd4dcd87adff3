"""What is observed and never decides: log set-up and records of model calls."""
