"""`bench blobs`: one and several holders, honest and lying."""
