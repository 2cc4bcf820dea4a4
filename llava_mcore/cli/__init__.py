"""One file a command; the only place that knows every package."""
