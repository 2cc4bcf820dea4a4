"""The table of commands, their common entry, and flags that several of them have."""
