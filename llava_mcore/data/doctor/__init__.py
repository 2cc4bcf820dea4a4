"""Looks a dataset over before it is trained on, through the functions that training uses."""
