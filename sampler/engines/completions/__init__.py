"""A back-end that is an endpoint for completions: token ids in, token ids out."""
