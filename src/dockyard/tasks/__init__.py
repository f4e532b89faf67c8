"""Where tasks come from: folders, registries, dataset rows and generated tasks."""
