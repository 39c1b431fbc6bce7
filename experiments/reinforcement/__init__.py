"""Policy gradient on CartPole under full sync, backups, softsync and async on 16 machines."""
