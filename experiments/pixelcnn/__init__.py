"""PixelCNN on CIFAR-10: one worker, async, and sync with a backup, in virtual time."""
