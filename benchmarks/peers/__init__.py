"""Quorate beside the systems that people use instead: TensorFlow, MXNet, torchft, Ray's pattern and DDP, in one run."""
