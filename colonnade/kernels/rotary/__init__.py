"""Angles of positions, and heads turned by them."""
