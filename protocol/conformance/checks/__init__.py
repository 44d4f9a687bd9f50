"""The checks, a module for each subject. ``catalogue`` puts them in order."""
