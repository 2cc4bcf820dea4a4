"""The vision towers: `base.py` says what a family defines, each file is one, and `registry.py` lists them."""
