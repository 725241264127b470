"""The hidden-state store: shards of many rows, and an index from row key to shard and place."""
