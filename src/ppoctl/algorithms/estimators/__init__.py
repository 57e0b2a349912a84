"""Advantage estimators, one file each: the recipe table, the metrics that the estimator adds, and the estimator."""
