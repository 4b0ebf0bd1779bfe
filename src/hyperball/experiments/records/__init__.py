"""What lies in the folders of runs: whether it is whole, what was tested and attacked, and what that found."""
