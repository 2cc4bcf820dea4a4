"""What a configuration must keep to."""
