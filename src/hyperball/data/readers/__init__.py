"""One file a format: CIFAR binary, idx, HDF5 clouds, image folders; digits and procedural clouds need no file."""
