"""`judge`: a rubric scored by a second model server, and tasks for it."""
