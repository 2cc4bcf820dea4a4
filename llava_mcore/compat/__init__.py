"""All patches of third-party packages, and differences between their versions. Each file names its versions."""
