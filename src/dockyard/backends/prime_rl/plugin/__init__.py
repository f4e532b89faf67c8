"""The plug-in that verifiers loads as `harbor_env`. No other part of Dockyard imports it: it needs verifiers."""
