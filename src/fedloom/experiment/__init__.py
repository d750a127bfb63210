"""Runs as folders: config, run, comparison."""
