"""An engine that is an endpoint for chat completions: messages in, text out."""
