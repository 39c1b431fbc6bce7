"""Training scripts under torchrun: `DataParallel`, the sampler, and everything that runs behind them."""
