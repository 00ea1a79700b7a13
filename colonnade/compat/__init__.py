"""Compatibility layers: other libraries' interfaces over this library's parts."""
