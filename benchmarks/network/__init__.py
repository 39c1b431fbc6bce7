"""The collective engine on hosts with a network of their own, beside DDP, blocking SGD and the limits."""
