"""From a batch to new weights: the loss, the optimizer, the schedule, the average, and the step that joins them."""
