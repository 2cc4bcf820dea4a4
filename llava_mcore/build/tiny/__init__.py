"""Tiny random folders of every class, for trying commands without weights: `build --tiny`.

`parts` has what the classes share: tokenizer, chat template, language models, random weights. `classes` has the
functions that write config, weights and processor of a class.
"""
