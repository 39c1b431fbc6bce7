"""Code that several engines use: gradients, updates, shared memory, and tickets in real time."""
