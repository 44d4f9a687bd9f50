"""Sockets, HTTP, and the life of the process."""
