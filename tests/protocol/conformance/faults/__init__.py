"""Servers with one fault each. ``catalogue`` lists them."""
