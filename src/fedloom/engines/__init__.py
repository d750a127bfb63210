"""How a Work is trained."""
