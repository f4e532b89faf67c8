"""The files that grade a task inside its container. They are copied there and have no dependencies."""
