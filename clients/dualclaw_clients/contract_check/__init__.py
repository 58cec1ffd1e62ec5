"""The contract gate as a command: what a change of the protos would break, and for whom, in any repository's CI."""
