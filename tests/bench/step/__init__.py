"""What a step costs: gradients, time and memory of micro-batches and of recomputation."""
