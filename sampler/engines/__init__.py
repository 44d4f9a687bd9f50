"""Back-ends other than a model of our own, behind the same interface."""
