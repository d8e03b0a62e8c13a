"""The load test: offers requests to any OpenAI-compatible server and says what was true. No torch, no engine."""
