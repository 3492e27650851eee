"""What training would take, found without training."""
