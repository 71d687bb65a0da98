"""Which parts of the model this node trains where members share them: experts of a mixture, FFN slices."""
