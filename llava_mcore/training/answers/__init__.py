"""Answers to questions of the validation split while a run trains."""
