"""What more than one adapter needs around somebody else's kernels: scratch, index mends, masked row copies."""
