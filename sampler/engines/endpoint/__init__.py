"""Remote endpoints that speak the HTTP API of OpenAI: all of HTTP, and nothing of what is said."""
