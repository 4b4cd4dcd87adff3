"""Tasks in, results out: plan, dispatch, finish, summary, audit."""
