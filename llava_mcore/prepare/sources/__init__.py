"""Sources of rows: one file per kind of container, independent of conversations."""
