"""What the simulated engine costs: per ticket, with gradients beside a bare PyTorch loop, and in memory."""
