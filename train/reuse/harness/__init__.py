"""A model of text under tasks of others: what the lm-eval harness asks of one."""
