"""How long the k-th gradient of a round takes, and how many backups that is worth, for many kinds of slowness."""
