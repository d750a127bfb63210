"""A federation with Fedloom and Flower: README.md says how to run it, task.py has the model and the data."""
