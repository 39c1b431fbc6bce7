"""Sync with backups beside async on an Inception net, at 53, 106 and 212 workers."""
