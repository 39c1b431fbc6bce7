"""Does dropping late gradients starve samples that are slow by nature?"""
