"""The local web page, its data and the metrics: read only."""
