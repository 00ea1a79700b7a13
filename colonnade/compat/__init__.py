"""Doors for programs that were written for other libraries: their names, over this library's parts."""
