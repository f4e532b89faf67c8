"""The plug-in that verifiers loads as `harbor_env`. Nothing else of Dockyard imports it: it needs verifiers."""
