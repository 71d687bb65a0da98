"""Which work goes on beside the inner steps, and where the worker's time goes."""
