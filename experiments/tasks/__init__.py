"""The data of the experiments, one task a file."""
