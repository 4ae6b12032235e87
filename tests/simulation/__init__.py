"""Random worlds for the real scheduler and cache manager, seeded, checked after every step.

``python -m tests.simulation --help`` runs as many as one likes.
"""
