"""`import_states`: hidden states out of what other trainers made for themselves."""
