"""The run folder: everything that a run records, and how it is read back."""
