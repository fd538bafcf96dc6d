"""Pure half of training: factors, optimizer, loss, state, and the step that is compiled once."""
