"""Did a change make quorate slower? The same cases in two checkouts."""
