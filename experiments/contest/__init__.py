"""All policies head to head, at equal machines, each with a learning rate of its own."""
