"""Distributed systems that run the training loop themselves and call Dockyard for rollouts."""
