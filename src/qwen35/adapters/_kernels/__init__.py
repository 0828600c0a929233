"""What more than one adapter needs around somebody else's kernels: index mends, masked row copies."""
