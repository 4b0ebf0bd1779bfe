"""Runs on disk: folders that one process holds, checkpoints that resume to the bit, records of what came out."""
