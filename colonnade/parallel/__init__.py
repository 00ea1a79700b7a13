"""Axes, meshes, layouts and launching; nothing here depends on a transformer."""
