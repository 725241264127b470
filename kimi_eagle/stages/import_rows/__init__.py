"""`import_rows`: rows out of what other trainers made for themselves."""
