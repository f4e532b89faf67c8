"""SLiME owns the loop and calls our rollouts: its hooks, and the launcher that points it at them."""
