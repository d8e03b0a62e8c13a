"""What each API key may use: requests and tokens per minute, and how many requests at once."""
