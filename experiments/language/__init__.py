"""A character transformer under full sync, backups, softsync and async on 16 machines."""
