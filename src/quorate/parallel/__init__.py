"""Training scripts under torchrun: `DataParallel`, what it hands out, and what it saves."""
