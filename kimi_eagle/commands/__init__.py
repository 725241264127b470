"""The commands of the CLI, a module each: `add(subparsers)` declares one, and what it runs imports
what it needs only then. `cli` lists them."""
