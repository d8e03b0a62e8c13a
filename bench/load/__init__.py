"""The load test: offers requests to any OpenAI-compatible server and says what was true of it."""
