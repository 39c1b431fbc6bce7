"""torch.distributed collectives: replicated parameters, gradients averaged by all-reduce."""
