"""What all experiments share: trials that survive a stop, curves, tuning, spread over seeds, the command line."""
