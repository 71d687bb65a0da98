"""What LoRA runs cost and learn, beside runs that train the whole model."""
