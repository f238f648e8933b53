"""The model as everything else uses it: statistics of responses, micro-batch layouts, loss and optimizer."""
