"""What is known of verifiers: the one place that knows nesting, prefixes and tensor names."""
