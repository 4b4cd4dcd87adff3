"""The model server: one inference engine behind three dialects."""
