"""Pictures and videos that are cut into tiles: how many, and which tokens stand for them."""
