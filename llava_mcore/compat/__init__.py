"""Every patch of the packages below us, and what differs between their versions: each says for which versions it is."""
