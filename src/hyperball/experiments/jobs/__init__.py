"""Processes that train, test, attack and draw the cells of a table or grid, and what keeps them in order."""
