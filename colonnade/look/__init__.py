"""Look inside a model: the viewer "Inside the matrix", its recorder and server, and tables of expert choices.

The viewer is a static page (``static/``, built from ``viewer/`` by ``make viewer``) that draws products of matrices in
three dimensions. :mod:`~colonnade.look.expression`, :mod:`~colonnade.look.values` and
:mod:`~colonnade.look.partition` implement its rules in Python; shared test vectors keep both implementations equal.
"""

from colonnade.look.routing import TOKEN_CLASSES, RoutedText, classify_tokens, record_routing, routing_tables

__all__ = ["TOKEN_CLASSES", "RoutedText", "classify_tokens", "record_routing", "routing_tables"]
