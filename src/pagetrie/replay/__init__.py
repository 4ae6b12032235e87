"""Replay of recorded traffic on the code that serves: the real index, cache manager and scheduler."""
