"""What runs at the server. All settings are in pyproject.toml."""

from fedloom.flower import server_app

from .task import model, test

app = server_app(model, test=test)
