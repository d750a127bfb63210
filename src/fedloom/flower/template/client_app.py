"""What runs at each client, anew for every message. The data never leave it: only what was learnt of them does."""

from fedloom.flower import client_app

from .task import data, model

app = client_app(model, data)
