"""Workers, learner shards and their keeper as Ray actors: the same run on many machines that come and go."""
