"""Model files and the decoder. Nothing in this package or above it imports torch before this line has run."""

import os

# torch's OpenMP runtime lets idle threads spin for milliseconds by default. On a core that others want too, each of a
# step's hundred parallel regions then waits for a thread that isn't running: seen, 2,150 ms a step in place of 270.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
