"""The HTTP layer: OpenAI's endpoints over an engine in another process."""
