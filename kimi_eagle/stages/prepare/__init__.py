"""`prepare`: conversations → token-exact training rows."""
