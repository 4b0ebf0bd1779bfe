"""The parts of the page about a results folder."""
