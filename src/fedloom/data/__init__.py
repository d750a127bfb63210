"""Data sets and how they are dealt out to clients."""
