"""The worker's part in objectives: which term a run has, and how it enters the loss of a step."""
