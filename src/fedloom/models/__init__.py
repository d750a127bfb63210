"""Models by name, sized from the data."""

from fedloom.models.catalogue import REGISTRY, model

__all__ = ["REGISTRY", "model"]
