"""Checkpoints come back as they were, or the one before does: after kills, full disks, and bytes gone bad."""
