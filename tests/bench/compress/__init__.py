"""`bench compress`: encoder and fold beside the published pipeline and memcpy."""
