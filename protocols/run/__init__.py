"""What a run is: RunSpec, the model it trains, who may join, and the layout of what its members send."""
