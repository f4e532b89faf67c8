"""Tasks and their sources: folders, registries, dataset rows and generated tasks."""
