"""Config of a run as frozen data, and the command line that makes one. Imports no JAX."""
