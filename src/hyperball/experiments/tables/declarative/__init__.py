"""Du, Adaptive robust pooling and projections: one file a table, beside what some of them share."""
