"""A server of one model by OpenAI's API, on loopback (docs/serve.md)."""
