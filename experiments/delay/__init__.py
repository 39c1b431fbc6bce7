"""What an update that comes k iterations late costs a training in the end, and what repairs it."""
