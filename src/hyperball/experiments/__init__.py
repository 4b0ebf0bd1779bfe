"""Experiments: recipes by name, grids of them, and the demo."""
