"""`doctor`: what this machine has, what the project needs, and a self-test of one training step.

Without torch: packages are imported, and the step is run, by processes of their own. A broken package ends those.
"""
