"""Starting, ending and signaling processes: children, workers of a local world, a server that forks them."""
