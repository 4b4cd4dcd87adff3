"""`python_code`: write a function; its tests run in a sandbox, and the answers are compared outside."""
