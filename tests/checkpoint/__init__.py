"""After kills, full disks and damaged bytes, the newest checkpoint loads as it was saved, or the one before does."""
