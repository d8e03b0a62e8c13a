"""The router role: OpenAI-compatible gateway and the conductor that owns every accepted request."""
