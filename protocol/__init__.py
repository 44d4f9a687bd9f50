"""What may be said on the wire, and in which order. Pure: no I/O, clock, tensor or event loop."""
