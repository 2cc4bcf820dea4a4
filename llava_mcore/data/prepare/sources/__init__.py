"""Where rows come from: one file a kind of container. A source knows nothing of conversations."""
