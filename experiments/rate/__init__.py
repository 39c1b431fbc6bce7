"""Updates to a target against the quorum and the backups, beside theory; and how many backups pay."""
