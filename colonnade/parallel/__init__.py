"""Axes, meshes, layouts and launching; nothing here knows what a transformer is."""
