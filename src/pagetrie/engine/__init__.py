"""Scheduler, sequences and step loop. Imports the cache, no torch, no server."""
