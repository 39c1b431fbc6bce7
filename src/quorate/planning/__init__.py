"""Which policy to use, and how many backups to take: seconds per update, updates to the target, a recommendation."""
