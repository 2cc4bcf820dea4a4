"""Finds samples that occur twice, within and across datasets, and samples of an evaluation set in training data.

scan: read every sample --> signature: hashes of its text and media
candidates: signatures that may belong together --> confirm: read both again and compare
clusters: of each group one sample stays --> report: a list, a contact sheet, names for split.yaml
"""
