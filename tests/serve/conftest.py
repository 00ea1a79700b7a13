"""Servers that several modules use."""

from collections.abc import Iterator

import pytest

from tests.serve.serving import Running, server


@pytest.fixture(scope="session")
def tool_server() -> Iterator[Running]:
    """Its chat template shows tools, in Mistral's notation."""
    with server({"tools": True}, page_tokens=4, pages=512, token_budget=64, admin_key="boss") as it:
        yield it
