"""What is measured of a network: tests and their metrics, lengths of filters, learned radii."""
