"""What a run computes on: device, precision and processes, memory, and signals that stop it."""
