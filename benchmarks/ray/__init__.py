"""The Ray engine beside the first-N parameter server of Ray's documentation."""
