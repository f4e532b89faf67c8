"""What grades a task, inside its container: copied there as it is, so it stands on its own."""
