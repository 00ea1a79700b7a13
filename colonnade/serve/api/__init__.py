"""OpenAI's HTTP API for an engine in another process."""
