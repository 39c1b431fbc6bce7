"""What backups cost in bytes and seconds, and whether a few per cent more machines buy as much speed."""
