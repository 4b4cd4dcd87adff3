"""Token-in: a call is given the recorded ids of the turn that it continues, and only what came since is rendered."""
