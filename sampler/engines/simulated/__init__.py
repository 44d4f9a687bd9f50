"""A simulated accelerator: everything of a model but the model."""
