"""Rendering: histories to prompt ids, and sampled ids to messages."""
