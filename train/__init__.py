"""Everything that runs: data, mesh, optimizer, step, loop, checkpoints."""
