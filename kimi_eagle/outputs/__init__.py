"""What commands print with --json, as types: documented, and JSON Schemas are made of them."""
