"""The commands, one file each. `base/` has what they share: the table of commands, their entry, flags, a bar."""
