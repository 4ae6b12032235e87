"""Benchmarks: ``python -m bench`` runs those that need no peer; each is also a module of its own."""
