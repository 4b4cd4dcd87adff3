"""Who a call belongs to: ids, the current rollout, the one codec of the path prefix."""
