"""Whether this machine, this installation and this root can do the work. Imports nothing heavy."""
