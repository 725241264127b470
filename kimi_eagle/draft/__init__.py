"""The draft: its vocabulary map, configuration, data, training and checkpoint."""
