"""The live view of a run: follow its trace as it grows, and show it in a browser or a terminal."""
