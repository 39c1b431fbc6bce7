"""What the engines with real worker processes share: arithmetic of workers and learner, memory, the life of tickets."""
