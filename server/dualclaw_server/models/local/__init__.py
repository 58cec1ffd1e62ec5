"""The local model: a small one that runs on this machine, without a key and without a network."""
