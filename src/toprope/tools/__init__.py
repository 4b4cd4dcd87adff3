"""Tools as authors write them and as agents reach them: specifications and grants."""
