"""Experiments: recipes by name, grids of them, the published tables, and the demo."""
