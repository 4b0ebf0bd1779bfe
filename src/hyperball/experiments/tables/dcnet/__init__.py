"""Liu et al., Decoupled Networks, CVPR 2018: one file a table or figure, beside what some of them share."""
