"""Pure: which torch the fleet gets, which packages a node lacks, and the steps that bring them there."""
