"""The local model store: names, catalogue, installation."""

from ftlaunch.store.names import canonical, resolve

__all__ = ["canonical", "resolve"]
